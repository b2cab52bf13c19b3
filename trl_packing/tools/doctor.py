"""The doctor: whether this machine can train packed documents, and what to install.

    Device          what can train here                                    → Finding
    try_backends    the isolation check of each backend on a tiny Llama    → Trials
    diagnose        versions, devices, both of these                       → Diagnosis: text, JSON

Verdicts of a trial are "exact" (within rounding), "differs", "refused" (it cannot be exact, and
says why), "not installed" and "error". Findings are

    ok     as it should be
    -      not used here, and why
    note   training works, and this is worth knowing
    fail   training would fail; the text says why, and the way out

Nothing is downloaded, and nothing is sent.
"""

import copy
import os
import platform
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing.attention import flash_attn
from trl_packing.attention.backends import CHOICES, refusals, resolve_attention
from trl_packing.data.printable import escape_hidden
from trl_packing.isolation.check import CheckResult, Refusal
from trl_packing.isolation.guard import check_backend, with_fallbacks
from trl_packing.tools.verify import VerifiedModel
from trl_packing.versions import TESTED, installed_version, is_tested

_OTHERS = ("trl-packing", "numpy", "torch", "peft", "bitsandbytes", "deepspeed", "flash-attn")

# Kernels that compute in half precision only. The others are tried in float32, where a leak is
# furthest above rounding.
HALF_PRECISION = (*flash_attn.VERSIONS, "varlen")

_MAX_LENGTH = 128  # tokens of a row of the trial
_NAMES = 18  # columns of the names of findings


class Finding(NamedTuple):
    """One line of the doctor: "ok", "-", "note" or "fail", a name, and a sentence or a value."""

    status: str
    name: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """Findings under their headings, and the facts behind them as plain values for JSON."""

    sections: dict[str, list[Finding]]
    facts: dict[str, Any] = field(default_factory=dict)

    def of(self, status: str) -> list[str]:
        """Return the findings with this status, in words."""
        found = [finding for section in self.sections.values() for finding in section]
        return [f"{each.name}: {each.text}" for each in found if each.status == status]

    @property
    def failures(self) -> list[str]:
        """The reasons why training would fail; empty if it would not."""
        return self.of("fail")

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        failures, notes = self.failures, self.of("note")
        return {"trains": not failures, "failures": failures, "notes": notes, **self.facts}

    def text(self, width: int = 80) -> str:
        """Return the diagnosis for a terminal of `width` columns."""
        lines: list[str] = []
        for heading, findings in self.sections.items():
            lines += textwrap.wrap(heading, width)
            for status, name, text in findings:
                lines += _wrap(text, f"  {status:4}  {name:{_NAMES - 1}} ", width)
            lines.append("")
        number = len(self.failures)
        verdict = f"Training would fail, for {number} reason{'s' * (number > 1)}:"
        lines += textwrap.wrap(
            verdict if number else "Nothing here would stop a training run.", width
        )
        for failure in self.failures:
            lines += _wrap(failure, "  - ", width)
        return "\n".join(lines)


def _wrap(text: str, start: str, width: int) -> list[str]:
    """Return `text` after `start`; further lines are indented by as much."""
    indent: Any = {"initial_indent": start, "subsequent_indent": " " * len(start)}
    width = max(width, len(start) + 20)
    return textwrap.wrap(escape_hidden(text), width, break_on_hyphens=False, **indent)


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


def read_devices() -> list[Device]:
    """Return the devices that training uses: the accelerators, or the CPU."""
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Device("cuda", f.name, f.total_memory, (f.major, f.minor)) for f in found]
    for kind in ("mps", "xpu"):
        backend = getattr(torch, kind, None)
        if backend is not None and backend.is_available():
            return [Device(kind, kind.upper())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [Device("cpu", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}")]


def diagnose(devices: Sequence[Device] = (), trials: "Trials | None" = None) -> Diagnosis:
    """Return the diagnosis of this machine.

    Args:
        devices: of the machine; none reads them.
        trials: results of the attention backends; None tries them.
    """
    devices = devices or read_devices()
    is_half = devices[0].kind == "cuda" and (devices[0].capability or (0, 0)) >= (8, 0)
    trials = trials or try_backends(devices[0].kind, torch.bfloat16 if is_half else torch.float32)
    versions = {name: installed_version(name) for name in (*TESTED, *_OTHERS)}
    found = [Finding("ok", device.kind, str(device)) for device in devices]
    if devices[0].kind == "cuda" and not is_half:
        found.append(Finding("note", "bf16", "not before sm80: set --fp16 True --bf16 False"))
    attention = "Attention (a tiny Llama, packed against each document alone)"
    sections = {"Versions": _versions(versions), "Devices": found}
    sections[attention] = _attention(trials, devices[0])
    facts = {
        "versions": {name: number for name, number in versions.items() if number is not None},
        "machine": {"system": _system(), "devices": [asdict(device) for device in devices]},
        "attention": asdict(trials),
    }
    return Diagnosis(sections, facts)


def _versions(versions: dict[str, str | None]) -> list[Finding]:
    """Return which of the versions are tested."""
    findings = [Finding("ok", "python", _system())]
    for name, (oldest, newest) in TESTED.items():
        number = versions[name] or "0"
        if is_tested(name, number):
            findings.append(Finding("ok", name, f"{number} (tested: {oldest} to {newest})"))
        else:
            text = f"{number} is not among those tested: {oldest} to {newest}"
            findings.append(Finding("note", name, text))
    others = [f"{name} {versions[name]}" for name in _OTHERS if versions[name] is not None]
    return [*findings, Finding("ok", "also", ", ".join(others))]


def _system() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The result of one backend.

    Attributes:
        backend: its name.
        verdict: "exact", "differs", "refused", "not installed" or "error".
        reason: why it was refused, or the error; empty if it ran.
        difference: the largest difference of a logit between packed and alone.
        leak: the difference if documents see each other.
    """

    backend: str
    verdict: str
    reason: str = ""
    difference: float | None = None
    leak: float | None = None

    @classmethod
    def of(cls, backend: str, result: CheckResult) -> "Trial":
        """Return the trial with this result of a check."""
        if isinstance(result, Refusal):
            return cls(backend, "error", result.error)
        return cls(backend, "exact" if result else "differs", "", result.difference, result.leak)

    def __str__(self) -> str:
        if self.difference is None:
            return self.verdict + f": {self.reason}" * bool(self.reason)
        return f"{self.verdict}, by {self.difference:.0e} (a leak: {self.leak:.1g})"


@dataclass(frozen=True)
class Trials:
    """The results of all backends, from fast to slow.

    Attributes:
        device: where they ran.
        dtype: of kernels that compute in half precision only.
        trials: the results.
        chosen: the backend that a run takes; None if none is exact.
        prefixes: a row of it that shares prefixes; None if none was tried.
    """

    device: str
    dtype: str
    trials: tuple[Trial, ...]
    chosen: str | None
    prefixes: Trial | None = None

    def __getitem__(self, backend: str) -> Trial:
        return next(trial for trial in self.trials if trial.backend == backend)


def tiny_llama() -> LlamaForCausalLM:
    """Return a random model of two layers on the CPU; random numbers elsewhere stay as they are."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def try_backends(device: str, dtype: torch.dtype) -> Trials:
    """Try all backends on a device of torch, those of half precision in `dtype`."""
    tiny = tiny_llama().to(device)
    reasons = refusals(tiny, device=device, dtype=dtype)
    trials = tuple(_trial(tiny, name, reasons.get(name), dtype) for name in CHOICES[1:])
    exact = {trial.backend for trial in trials if trial.verdict == "exact"}
    choices = with_fallbacks(resolve_attention(tiny, device=device, dtype=dtype))
    chosen = next((c.backend for c in choices if c.backend in exact), None)
    prefixes = trial_of_prefixes(tiny, chosen, dtype) if chosen else None
    return Trials(device, str(dtype).removeprefix("torch."), trials, chosen, prefixes)


def _trial(tiny: Any, name: str, refusal: str | None, dtype: torch.dtype) -> Trial:
    if name in flash_attn.VERSIONS and name not in flash_attn.installed():
        return Trial(name, "not installed", refusal or "")
    if refusal is not None:
        return Trial(name, "refused", refusal)
    return Trial.of(name, _check(_in_dtype(tiny, name, dtype), name, gradients=True))


def trial_of_prefixes(tiny: Any, name: str, dtype: torch.dtype) -> Trial:
    """Return the result of a row that computes the common prefixes of its documents once."""
    model = _in_dtype(tiny, name, dtype)
    _check(model, name)  # installs the backend
    return Trial.of(name, VerifiedModel(model, "", name, _MAX_LENGTH).verify_prefixes(name).result)


def _check(model: Any, name: str, *, gradients: bool = False) -> CheckResult:
    options: Any = {"training": True, "gradients": gradients, "max_length": _MAX_LENGTH}
    return check_backend(model, resolve_attention(model, name), **options)


def _in_dtype(tiny: Any, name: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny).to(dtype if name in HALF_PRECISION else torch.float32).train()


def _attention(trials: Trials, device: Device) -> list[Finding]:
    findings = []
    for trial in trials.trials:
        status, text = "-", str(trial) + ", but slower" * (trial.verdict == "exact")
        if trial.verdict in ("error", "differs"):
            status = "note"
        elif trial.backend == trials.chosen:
            status, text = "ok", f"chosen: the fastest here; {trial}"
        findings.append(Finding(status, trial.backend, text))
    if trials.prefixes is not None:  # if they are not exact, a run trains without sharing them
        is_exact = trials.prefixes.verdict == "exact"
        without = "; a run computes them in every document" * (not is_exact)
        status = "ok" if is_exact else "note"
        findings.append(Finding(status, "shared prefixes", f"{trials.prefixes}{without}"))
    if trials.chosen is None:
        text = "no backend keeps documents apart on this device; train on another one"
        return [*findings, Finding("fail", "attention", text)]
    return [*findings, Finding("ok", "to be faster", advice(trials, device.capability))]


_INSTALL = {
    "flash_attention_4": "pip install flash-attn-4 (written for sm90 to sm120)",
    "flash_attention_3": (
        "flash-attn 3 (written for sm90): github.com/Dao-AILab/flash-attention, folder hopper, "
        "python setup.py install"
    ),
    "flash_attention_2": "pip install flash-attn --no-build-isolation (needs nvcc, compiles long)",
}


def advice(trials: Trials, capability: tuple[int, int] | None) -> str:
    """Return what to install to be faster, or why nothing is.

    Args:
        trials: the results of all backends.
        capability: CUDA's compute capability; None on other devices.
    """
    chosen, oldest = trials.chosen, "flash_attention_2"
    if capability is None:
        return (
            f"nothing to install: flash-attn and varlen need an NVIDIA GPU, and {chosen} is the "
            "fastest exact backend here"
        )
    if capability < (8, 0):
        return "nothing to install: FlashAttention needs an NVIDIA GPU from sm80 (A100, RTX 30)"
    best = flash_attn.versions_for(capability)[0]
    if chosen == best:
        return f"nothing to install: {chosen} is the fastest exact backend here"
    if chosen == "varlen" and best == oldest:
        return (
            "nothing to install: varlen is FlashAttention 2 from PyTorch itself; the flash-attn "
            "package adds dropout and soft-cap, which this model does not need"
        )
    for name in (best, oldest) if chosen not in (oldest, "varlen") else (best,):
        if trials[name].verdict == "not installed" and not trials[name].reason:
            return f"{_INSTALL[name]}; {chosen} is used until then"
    return f"nothing to install: {best} is not possible ({trials[best].reason})"
