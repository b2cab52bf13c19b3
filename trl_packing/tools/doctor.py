"""The doctor: whether this machine can train packed documents, and what to install.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing.attention import flash_attn
from trl_packing.attention.backends import CHOICES, refusals, resolve_attention
from trl_packing.data.printable import escape_hidden
from trl_packing.isolation.check import CheckResult, Refusal
from trl_packing.isolation.guard import check_backend
from trl_packing.tools.verify import VerifiedModel
from trl_packing.versions import TESTED, installed_version, is_tested

_OTHERS = ("trl-packing", "numpy", "torch", "peft", "bitsandbytes", "deepspeed", "flash-attn")

# Kernels that compute in half precision only. The others are tried in float32, where a leak is
# furthest above rounding.
HALF_PRECISION = (*flash_attn.VERSIONS, "varlen")

PREFIXES = "shared prefixes"  # the trial of a row that shares them, by the chosen backend
_MAX_LENGTH = 128  # tokens of a row of the trial


@dataclass(frozen=True)
class Device:
    """A device that can train: "cuda", "mps", "xpu" or "cpu", its bytes and CUDA's capability."""

    kind: str
    name: str
    total_bytes: int | None = None
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        memory = "" if self.total_bytes is None else f", {self.total_bytes / 1e9:,.1f} GB"
        capability = "" if self.capability is None else ", sm{}{}".format(*self.capability)
        return f"{self.name}{memory}{capability}"


def read_devices() -> list[Device]:
    """Return the devices that training uses: the accelerators, or the CPU."""
    if torch.cuda.is_available():
        found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        return [Device("cuda", f.name, f.total_memory, (f.major, f.minor)) for f in found]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return [Device(accelerator.type, accelerator.type.upper())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [Device("cpu", f"{cores} cores, {torch.backends.cpu.get_cpu_capability()}")]


class Finding(NamedTuple):
    """One line of the doctor: "ok", "-", "note" or "fail", a name, and a sentence or a value."""

    status: str
    name: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """Findings under their headings, and all of them as plain values for JSON.

    Among the values, `failures` are the reasons why training would fail.
    """

    sections: dict[str, list[Finding]]
    facts: dict[str, Any]

    def text(self, width: int = 80) -> str:
        """Return the diagnosis for a terminal of `width` columns."""
        lines: list[str] = []
        for heading, findings in self.sections.items():
            lines.append(heading)
            for status, name, text in findings:
                start = f"  {status:4}  {name:17} "
                indent: Any = {"initial_indent": start, "subsequent_indent": " " * len(start)}
                whole = escape_hidden(text)
                lines += textwrap.wrap(whole, width, break_on_hyphens=False, **indent)
            lines.append("")
        verdict = "Training would fail: see above." if self.facts["failures"] else ""
        return "\n".join([*lines, verdict or "Nothing here would stop a training run."])


def diagnose(
    devices: Sequence[Device] = (), trials: "Mapping[str, Trial] | None" = None
) -> Diagnosis:
    """Return the diagnosis of this machine, or of given devices and results of backends."""
    first, *_ = devices = list(devices or read_devices())
    is_half = first.kind == "cuda" and (first.capability or (0, 0)) >= (8, 0)
    trials = trials or try_backends(first.kind, torch.bfloat16 if is_half else torch.float32)
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    installed = {name: installed_version(name) for name in (*TESTED, *_OTHERS)}
    versions = [Finding("ok", "python", system)]
    for name, (oldest, newest) in TESTED.items():
        tested = f"{installed[name]} (tested: {oldest} to {newest})"
        versions.append(Finding("ok" if is_tested(name) else "note", name, tested))
    others = [f"{name} {installed[name]}" for name in _OTHERS if installed[name] is not None]
    versions.append(Finding("ok", "also", ", ".join(others)))
    found = [Finding("ok", device.kind, str(device)) for device in devices]
    if first.kind == "cuda" and not is_half:
        found.append(Finding("note", "bf16", "not before sm80: set --fp16 True --bf16 False"))
    heading = "Attention (a tiny Llama, packed against each document alone)"
    sections = {"Versions": versions, "Devices": found, heading: _attention(trials, first)}
    said: dict[str, list[str]] = {"fail": [], "note": []}
    for finding in (finding for section in sections.values() for finding in section):
        said.setdefault(finding.status, []).append(f"{finding.name}: {finding.text}")
    facts = {
        "trains": not said["fail"],
        "failures": said["fail"],
        "notes": said["note"],
        "versions": {name: number for name, number in installed.items() if number is not None},
        "machine": {"system": system, "devices": [asdict(device) for device in devices]},
        "attention": {"chosen": chosen_of(trials)} | {k: asdict(v) for k, v in trials.items()},
    }
    return Diagnosis(sections, facts)


# --- attention ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """The result of one backend.

    Attributes:
        verdict: "exact", "differs", "refused", "not installed" or "error".
        reason: why it was refused, or the error.
        difference: the largest difference of a logit between packed and alone.
        leak: the difference if documents see each other.
        is_chosen: a run takes this backend.
    """

    verdict: str
    reason: str = ""
    difference: float | None = None
    leak: float | None = None
    is_chosen: bool = False

    @classmethod
    def of(cls, result: CheckResult) -> "Trial":
        """Return the trial with this result of a check."""
        if isinstance(result, Refusal):
            return cls("error", str(result))
        return cls("exact" if result else "differs", "", result.difference, result.leak)

    def __str__(self) -> str:
        if self.difference is None:
            return self.verdict + f": {self.reason}" * bool(self.reason)
        return f"{self.verdict}, by {self.difference:.0e} (a leak: {self.leak:.1g})"


def chosen_of(trials: Mapping[str, Trial]) -> str | None:
    """Return the backend that a run takes; None if none is exact."""
    return next((name for name, trial in trials.items() if trial.is_chosen), None)


def tiny_llama() -> LlamaForCausalLM:
    """Return a random model of two layers on the CPU; random numbers elsewhere stay as they are."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2))


def try_backends(device: str, dtype: torch.dtype) -> dict[str, Trial]:
    """Try all backends on a device, from fast to slow, those of half precision in `dtype`."""
    tiny = tiny_llama().to(device)
    reasons = refusals(tiny, device=device, dtype=dtype)
    trials = {}
    for name in CHOICES[1:]:
        reason = reasons.get(name)
        if name in {*flash_attn.VERSIONS} - {*flash_attn.installed()}:
            trials[name] = Trial("not installed", reason or "")
        elif reason is not None:
            trials[name] = Trial("refused", reason)
        else:
            trials[name] = Trial.of(_check(_in_dtype(tiny, name, dtype), name, gradients=True))
    best = resolve_attention(tiny, device=device, dtype=dtype)
    for choice in (best, *best.slower):
        trial = trials[choice.backend]
        if trial.verdict == "exact":
            trials[choice.backend] = replace(trial, is_chosen=True)
            return trials | {PREFIXES: trial_of_prefixes(tiny, choice.backend, dtype)}
    return trials


def trial_of_prefixes(tiny: Any, name: str, dtype: torch.dtype) -> Trial:
    """Return the result of a row that computes the common prefixes of its documents once."""
    model = _in_dtype(tiny, name, dtype)
    _check(model, name)  # installs the backend
    return Trial.of(VerifiedModel(model, "", name, _MAX_LENGTH).verify_prefixes(name).result)


def _check(model: Any, name: str, *, gradients: bool = False) -> CheckResult:
    options: Any = {"training": True, "gradients": gradients, "max_length": _MAX_LENGTH}
    return check_backend(model, resolve_attention(model, name), **options)


def _in_dtype(tiny: Any, name: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny).to(dtype if name in HALF_PRECISION else torch.float32).train()


def _attention(trials: Mapping[str, Trial], device: Device) -> list[Finding]:
    findings = []
    for name, trial in trials.items():
        status, text = "-", str(trial)
        if trial.is_chosen:
            status, text = "ok", f"chosen: the fastest here; {trial}"
        elif name == PREFIXES and trial.verdict == "exact":
            status = "ok"
        elif name == PREFIXES:  # a run trains without sharing them
            status, text = "note", f"{trial}; a run computes them in every document"
        elif trial.verdict == "exact":
            text += ", but slower"
        elif trial.verdict in ("error", "differs"):
            status = "note"
        findings.append(Finding(status, name, text))
    if chosen_of(trials) is None:
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


def advice(trials: Mapping[str, Trial], capability: tuple[int, int] | None) -> str:
    """Return what to install to be faster on a GPU of CUDA's `capability`, or why nothing is."""
    chosen, oldest = chosen_of(trials), "flash_attention_2"
    if capability is None or capability < (8, 0):
        return (
            "nothing to install: flash-attn and varlen need an NVIDIA GPU from sm80 (A100, RTX 30)"
        )
    best = flash_attn.versions_for(capability)[0]
    if chosen == best or (chosen == "varlen" and best == oldest):
        return f"nothing to install: {chosen} is the fastest exact backend here"
    for name in (best, oldest) if chosen not in (oldest, "varlen") else (best,):
        if trials[name].verdict == "not installed" and not trials[name].reason:
            return f"{_INSTALL[name]}; {chosen} is used until then"
    return f"nothing to install: {best} is not possible ({trials[best].reason})"
