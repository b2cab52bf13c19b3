"""The doctor: whether this machine can train packed documents, and what to install.

    settings.py    the options of a run              → RunSettings
    backends.py    each attention backend, tried     → Trials
    diagnose       versions, devices, both of these  → Diagnosis: text, JSON

Nothing is downloaded, and nothing is sent. Everything that judges devices takes them as `Device`,
so that a test can judge a GPU that is not there.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import torch
from packaging.requirements import Requirement
from transformers import AutoModelForCausalLM

from trl_packing.tools.doctor.backends import Trial, Trials, advice, try_backends
from trl_packing.tools.doctor.findings import Diagnosis, Finding, Section, Status
from trl_packing.tools.doctor.settings import RunSettings, load_config
from trl_packing.versions import TESTED, installed_version, is_tested

_OPTIONAL = ("peft", "bitsandbytes", "deepspeed", "flash-attn", "kernels", "triton")


@dataclass(frozen=True)
class Device:
    """A device that can train.

    Attributes:
        kind: ``"cuda"``, ``"mps"``, ``"xpu"`` or ``"cpu"``.
        name: of the product.
        total_bytes: its memory; None if it is not known.
        capability: CUDA's compute capability, such as (8, 0).
    """

    kind: str
    name: str
    total_bytes: int | None = None
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        memory = "" if self.total_bytes is None else f"{self.total_bytes / 1e9:,.1f} GB"
        capability = "" if self.capability is None else "sm{}{}".format(*self.capability)
        return ", ".join(filter(None, [self.name, memory, capability]))


def diagnose(
    words: Sequence[str] = (),
    *,
    devices: Sequence[Device] = (),
    trials: Trials | None = None,
) -> Diagnosis:
    """Return the diagnosis of this machine, and of a run on it.

    Args:
        words: options of a training command; without ``--model``, nothing that depends on one is
            diagnosed.
        devices: of the machine; none reads them.
        trials: results of the attention backends; None tries them.

    Raises:
        ValueError: an option is unknown.
    """
    run = RunSettings.from_words(words)
    devices = devices or read_devices(use_cpu=run.args.use_cpu)
    run, versions = run.on(devices[0]), installed_versions()
    found = [Finding("ok", device.kind, str(device)) for device in devices]
    sections = [
        _versions(versions),
        Section("Devices", tuple(found)),
        _precision(devices[0], run),
    ]
    config, problem = load_config(run)
    trials = trials or try_backends(devices[0].kind, run.attention_dtype, _on_meta(config))
    sections.append(_attention(trials, devices[0]))
    if problem is not None:
        sections.append(Section("Model", (problem,)))
    facts = {
        "versions": versions,
        "machine": {"system": _system(), "devices": [asdict(device) for device in devices]},
        "attention": asdict(trials),
        "command": list(words),
    }
    return Diagnosis(tuple(sections), facts)


def _on_meta(config: Any) -> Any:
    """Return the model on the meta device with its native attention; None without a text model."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, ImportError):
        return None


# --- versions -------------------------------------------------------------------------------------


def installed_versions() -> dict[str, str]:
    """Return the versions of this package, of its requirements, and of optional packages."""
    wanted = ["trl-packing", *(r.name for r in requirements()), *_OPTIONAL]
    found = {name: installed_version(name) for name in wanted}
    return {name: number for name, number in found.items() if number is not None}


def requirements() -> list[Requirement]:
    """Return the requirements of this package, without those of its extras."""
    try:
        found = map(Requirement, requires("trl-packing") or [])
    except PackageNotFoundError:  # imported from a folder that is not installed
        return []
    return [r for r in found if r.marker is None or "extra" not in str(r.marker)]


def _versions(versions: dict[str, str]) -> Section:
    """Return whether the versions are required, tested, or neither."""
    findings = [Finding("ok", "python", _system())]
    for requirement in requirements():
        name, number = requirement.name, versions.get(requirement.name)
        if number is None or not requirement.specifier.contains(number, prereleases=True):
            text = f"{number or 'missing'}: pip install '{name}{requirement.specifier}'"
            findings.append(Finding("fail", name, text))
    for name, (oldest, newest) in TESTED.items():
        number = versions.get(name, "0")
        if is_tested(name, number):
            findings.append(Finding("ok", name, f"{number} (tested: {oldest} to {newest})"))
        elif name in versions:
            text = f"{number} is not among those tested: {oldest} to {newest}"
            findings.append(Finding("note", name, text))
    others = [name for name in versions if name not in TESTED]
    listed = ", ".join(f"{name} {versions[name]}" for name in others)
    return Section("Versions", (*findings, Finding("ok", "also", listed)))


def _system() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


# --- devices and precision ------------------------------------------------------------------------


def read_devices(*, use_cpu: bool) -> list[Device]:
    """Return the devices that training uses; `use_cpu` ignores accelerators."""
    if not use_cpu and torch.cuda.is_available():
        return [_cuda(index) for index in range(torch.cuda.device_count())]
    for kind in ("mps", "xpu"):
        backend = getattr(torch, kind, None)
        if not use_cpu and backend is not None and backend.is_available():
            return [Device(kind, kind.upper())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    name = f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}"
    return [Device("cpu", name)]


def _cuda(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    return Device("cuda", found.name, found.total_memory, (found.major, found.minor))


def _precision(device: Device, run: RunSettings) -> Section:
    if run.problem:
        return Section("Precision", (Finding("fail", "settings", run.problem),))
    notes = [Finding("note", "advice", text) for text in _precision_advice(device, run)]
    return Section("Precision", (Finding("ok", "this run", run.precision), *notes))


def _precision_advice(device: Device, run: RunSettings) -> list[str]:
    """Return how to set bf16 and fp16 on a device, where this differs from the run's."""
    found = []
    if device.capability is not None and device.capability < (8, 0) and not run.args.fp16:
        found.append("no bf16 before sm80: set --fp16 True --bf16 False")
    elif device.capability is not None and device.capability >= (8, 0) and run.args.fp16:
        found.append("bf16 is as fast as fp16 here and does not overflow: set --bf16 True")
    return found


# --- attention ------------------------------------------------------------------------------------


def _attention(trials: Trials, device: Device) -> Section:
    findings = [_finding(trial, trials.chosen) for trial in trials.trials]
    if trials.prefixes is not None:
        findings.append(_shared_prefixes(trials.prefixes))
    if trials.chosen is None:
        text = "no backend keeps documents apart on this device; train on another one"
        findings.append(Finding("fail", "attention", text))
    else:
        findings.append(Finding("ok", "to be faster", advice(trials, device.capability)))
    return Section("Attention", tuple(findings), "a tiny Llama, packed against each document alone")


def _finding(trial: Trial, chosen: str | None) -> Finding:
    if trial.verdict in ("error", "differs"):
        return Finding("note", trial.backend, trial.numbers)
    if trial.backend == chosen:
        return Finding("ok", trial.backend, f"chosen: the fastest here; {trial.numbers}")
    slower = ", but slower" * (trial.verdict == "exact")
    return Finding("-", trial.backend, trial.numbers + slower)


def _shared_prefixes(trial: Trial) -> Finding:
    """Return whether prefix_sharing is exact here; if not, a run trains without it."""
    is_exact = trial.verdict == "exact"
    status: Status = "ok" if is_exact else "note"
    without = "" if is_exact else "; a run computes them in every document"
    return Finding(status, "shared prefixes", trial.numbers + without)
