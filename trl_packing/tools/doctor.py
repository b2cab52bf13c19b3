"""The doctor: whether this machine can train packed documents, and what to install.

    ok     as it should be
    -      not used here, and why
    note   training works, and this is worth knowing
    fail   training would fail; the text says why, and the way out

Nothing is downloaded, and nothing is sent.
"""

import copy
import platform
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing.attention import flash_attn
from trl_packing.attention.backends import CHOICES, refusals, resolve_attention
from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden
from trl_packing.isolation.check import CheckResult, Refusal
from trl_packing.isolation.guard import check_backend
from trl_packing.tools.verify import verify_prefixes
from trl_packing.versions import TESTED, installed_version, is_tested

_OTHERS = ("trl-packing", "numpy", "torch", "peft", "bitsandbytes", "deepspeed", "flash-attn")
# Kernels of recurrent layers; without them, these layers run by document.
_RECURRENT = {
    "flash-linear-attention": "Qwen3.5, Kimi Linear, LFM2",
    "mamba-ssm": "Nemotron-H, Granite 4, Falcon-H1, Bamba, Jamba",
}

# Kernels that compute in half precision only. The others are tried in float32, where a leak is
# furthest above rounding.
HALF_PRECISION = (*flash_attn.VERSIONS, "varlen")

PREFIXES = "shared prefixes"  # the trial of a row that shares them, by the chosen backend
_MAX_LENGTH = 128  # tokens of a row of the trial


class Device(NamedTuple):
    """A device that can train: "cuda", "mps", "xpu" or "cpu", what it is, CUDA's capability."""

    kind: str
    name: str
    capability: tuple[int, int] | None = None


def read_devices() -> list[Device]:
    """Return the devices that training uses: the accelerators, or the CPU."""
    if torch.cuda.is_available():
        devices = []
        for number in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(number)
            name = f"{gpu.name}, {gpu.total_memory / 1e9:.1f} GB, sm{gpu.major}{gpu.minor}"
            devices.append(Device("cuda", name, (gpu.major, gpu.minor)))
        return devices
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        return [Device(accelerator.type, accelerator.type.upper())]
    capability = torch.backends.cpu.get_cpu_capability()
    return [Device("cpu", f"{quantity(torch.get_num_threads(), 'thread')}, {capability}")]


class Trial(NamedTuple):
    """The result of one backend.

    `verdict` is "chosen" (exact, and a run takes it), "exact", "differs", "refused",
    "not installed" or "error"; `text` the evidence or the reason.
    """

    verdict: str
    text: str = ""

    @classmethod
    def of(cls, result: CheckResult) -> "Trial":
        """Return the trial with this result of a check."""
        if isinstance(result, Refusal):
            return cls("error", str(result))
        return cls(
            "exact" if result else "differs",
            f"by {result.difference:.0e} (a leak: {result.leak:.1g})",
        )


class Finding(NamedTuple):
    """One line of the doctor: "ok", "-", "note" or "fail", a name, and a sentence or a value."""

    status: str
    name: str
    text: str


class Diagnosis(NamedTuple):
    """Findings under their headings, and as plain values; `failures` would stop training."""

    sections: dict[str, list[Finding]]
    facts: dict[str, Any]

    def text(self, width: int = 80) -> str:
        """Return the diagnosis for a terminal of `width` columns."""
        lines: list[str] = []
        for heading, findings in self.sections.items():
            lines.append(heading)
            for status, name, text in findings:
                start = f"  {status:4}  {name:17} "
                lines += textwrap.wrap(
                    escape_hidden(text),
                    width,
                    initial_indent=start,
                    subsequent_indent=" " * len(start),
                    break_on_hyphens=False,
                )
            lines.append("")
        verdict = "Training would fail: see above." if self.facts["failures"] else ""
        return "\n".join([*lines, verdict or "Nothing here would stop a training run."])


def diagnose(devices: Sequence[Device] = (), trials: dict[str, Trial] | None = None) -> Diagnosis:
    """Return the diagnosis of this machine, or of given devices and results of backends."""
    first, *_ = devices = list(devices or read_devices())
    is_half = first.kind == "cuda" and (first.capability or (0, 0)) >= (8, 0)
    trials = trials or try_backends(first.kind, torch.bfloat16 if is_half else torch.float32)
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    installed = {name: installed_version(name) for name in (*TESTED, *_OTHERS)}
    found = [Finding("ok", device.kind, device.name) for device in devices]
    if first.kind == "cuda" and not is_half:
        found.append(Finding("note", "bf16", "not before sm80: set --fp16 True --bf16 False"))
    sections = {
        "Versions": [Finding("ok", "python", system), *_versions(installed)],
        "Devices": found,
        "Attention (a tiny Llama, packed against each document alone)": _attention(trials, first),
    }
    every = [finding for section in sections.values() for finding in section]
    failures = [f"{name}: {text}" for status, name, text in every if status == "fail"]
    names = [device.name for device in devices]
    results = {name: [*trial] for name, trial in trials.items()}
    facts = {
        "trains": not failures,
        "failures": failures,
        "versions": installed,
        "machine": {"system": system, "devices": names},
        "attention": {"chosen": chosen_of(trials), **results},
    }
    return Diagnosis(sections, facts)


def _versions(installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """Yield a finding for each tested library, and one for the others."""
    for name, (oldest, newest) in TESTED.items():
        tested = f"{installed[name]} (tested: {oldest} to {newest})"
        yield Finding("ok" if is_tested(name) else "note", name, tested)
    others = [f"{name} {installed[name]}" for name in _OTHERS if installed[name] is not None]
    yield Finding("ok", "also", ", ".join(others))


def chosen_of(trials: Mapping[str, Trial]) -> str | None:
    """Return the backend that a run takes; None if none is exact."""
    return next((name for name, trial in trials.items() if trial.verdict == "chosen"), None)


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


def try_backends(device: str, dtype: torch.dtype) -> dict[str, Trial]:
    """Try all backends on a device, from fast to slow, those of half precision in `dtype`."""
    tiny = tiny_llama().to(device)
    reasons = refusals(tiny, device=device, dtype=dtype)
    models: dict[str, Any] = {}
    trials = {}
    for name in CHOICES[1:]:
        if name in flash_attn.VERSIONS and name not in flash_attn.installed():
            trials[name] = Trial("not installed", reasons.get(name) or "")
        elif reason := reasons.get(name):
            trials[name] = Trial("refused", reason)
        else:
            of_kernel = dtype if name in HALF_PRECISION else torch.float32
            models[name] = model = copy.deepcopy(tiny).to(of_kernel).train()
            result = check_backend(
                model,
                resolve_attention(model, name),
                training=True,
                gradients=True,
                max_length=_MAX_LENGTH,
            )
            trials[name] = Trial.of(result)
    best = resolve_attention(tiny, device=device, dtype=dtype)
    for choice in (best, *best.slower):
        name = choice.backend
        if trials[name].verdict == "exact":
            trials[name] = Trial("chosen", trials[name].text)
            return trials | {PREFIXES: Trial.of(verify_prefixes(models[name], name, _MAX_LENGTH))}
    return trials


def _attention(trials: Mapping[str, Trial], device: Device) -> list[Finding]:
    statuses = {"chosen": "ok", "error": "note", "differs": "note"}
    findings = []
    for name, (verdict, text) in trials.items():
        status = statuses.get(verdict, "ok" if name == PREFIXES else "-")
        findings.append(Finding(status, name, f"{verdict}: {text}" if text else verdict))
    if chosen_of(trials) is None:
        text = "no backend keeps documents apart on this device; train on another one"
        return [*findings, Finding("fail", "attention", text)]
    findings.append(Finding("ok", "to be faster", advice(trials, device.capability)))
    ways = ["by document, in one row; their kernels need an NVIDIA GPU"]
    if device.kind == "cuda":
        ways = []
        for package, families in _RECURRENT.items():
            missing = f"by document; pip install {package}"
            way = "kernels" if installed_version(package) else missing
            ways.append(f"{families}: {way}")
    return [*findings, Finding("-", "recurrent layers", ". ".join(ways))]


_INSTALL = {
    "flash_attention_4": "pip install flash-attn-4 (for sm90 to sm120)",
    "flash_attention_3": "github.com/Dao-AILab/flash-attention, folder hopper: setup.py install",
    "flash_attention_2": "pip install flash-attn --no-build-isolation (needs nvcc, compiles long)",
}


def advice(trials: Mapping[str, Trial], capability: tuple[int, int] | None) -> str:
    """Return what to install to be faster on a GPU of CUDA's `capability`, or why nothing is."""
    chosen = chosen_of(trials)
    oldest = "flash_attention_2"
    if capability is None or capability < (8, 0):
        return "nothing to install: flash-attn and varlen need an NVIDIA GPU from sm80 (A100)"
    best = flash_attn.versions_for(capability)[0]
    if chosen == best or (chosen == "varlen" and best == oldest):
        return f"nothing to install: {chosen} is the fastest exact backend here"
    for name in (best, oldest) if chosen not in (oldest, "varlen") else (best,):
        if trials[name] == Trial("not installed"):
            return f"{_INSTALL[name]}; {chosen} is used until then"
    return f"nothing to install: {best} is not possible ({trials[best].text})"
