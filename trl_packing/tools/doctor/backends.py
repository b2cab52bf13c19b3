"""Every attention backend, tried on this machine: the isolation check on a tiny random Llama.

Verdicts: ``"exact"`` (within rounding), ``"differs"``, ``"refused"`` (it cannot be exact, and says
why), ``"not installed"``, ``"error"``.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing.attention import flash_attn
from trl_packing.attention.backends import CHOICES, refusals, resolve_attention
from trl_packing.isolation.check import CheckResult, Refusal
from trl_packing.isolation.guard import check_backend, with_fallbacks
from trl_packing.tools.exactness.verify import VerifiedModel

# Kernels that compute in half precision only. The others are tried in float32, where a leak is
# furthest above rounding.
HALF_PRECISION = (*flash_attn.VERSIONS, "varlen")

_MAX_LENGTH = 128  # tokens of a row of the trial


@dataclass(frozen=True)
class Trial:
    """The result of one backend.

    Attributes:
        backend: its name.
        verdict: one of those above.
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

    @property
    def numbers(self) -> str:
        """The verdict and its reason or its evidence, in words."""
        if self.difference is None:
            return self.verdict + f": {self.reason}" * bool(self.reason)
        return f"{self.verdict}, by {self.difference:.0e} (a leak: {self.leak:.1g})"


@dataclass(frozen=True)
class Trials:
    """The results of all backends, from fast to slow.

    Attributes:
        device: where they ran.
        dtype: in which the run computes, half precision or float32.
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


def try_backends(device: str, dtype: torch.dtype, model: Any = None) -> Trials:
    """Try all backends.

    Args:
        device: a device of torch.
        dtype: in which the run computes attention.
        model: the model of the run, which may be on the meta device; its sizes refuse backends too.
    """
    tiny = tiny_llama().to(device)
    run = tiny if model is None else model
    reasons = refusals(run, device=device, dtype=dtype)
    trials = tuple(_trial(tiny, name, reasons.get(name), dtype) for name in CHOICES[1:])
    exact = {trial.backend for trial in trials if trial.verdict == "exact"}
    choices = with_fallbacks(resolve_attention(run, device=device, dtype=dtype))
    chosen = next((c.backend for c in choices if c.backend in exact), None)
    name = str(dtype).removeprefix("torch.")
    prefixes = trial_of_prefixes(tiny, chosen, dtype) if chosen else None
    return Trials(device, name, trials, chosen, prefixes)


def _trial(tiny: Any, name: str, refusal: str | None, dtype: torch.dtype) -> Trial:
    if name in flash_attn.VERSIONS and name not in flash_attn.installed():
        return Trial(name, "not installed", refusal or "")
    if refusal is not None:
        return Trial(name, "refused", refusal)
    model = _in_dtype(tiny, name, dtype)
    choice = resolve_attention(model, name)
    result = check_backend(model, choice, training=True, gradients=True, max_length=_MAX_LENGTH)
    return Trial.of(name, result)


def trial_of_prefixes(tiny: Any, name: str, dtype: torch.dtype) -> Trial:
    """Return the result of a row that computes the common prefixes of its documents once."""
    model = _in_dtype(tiny, name, dtype)
    check_backend(model, resolve_attention(model, name), max_length=_MAX_LENGTH)  # installs it
    return Trial.of(name, VerifiedModel(model, "", name, _MAX_LENGTH).verify_prefixes(name).result)


def _in_dtype(tiny: Any, name: str, dtype: torch.dtype) -> Any:
    return copy.deepcopy(tiny).to(dtype if name in HALF_PRECISION else torch.float32).train()


# --- advice ---------------------------------------------------------------------------------------


def advice(trials: Trials, capability: tuple[int, int] | None) -> str:
    """Return what to install to be faster, or why nothing is.

    Args:
        trials: the results of all backends.
        capability: CUDA's compute capability; None on other devices.
    """
    chosen = trials.chosen
    if capability is None:
        return (
            f"nothing to install: flash-attn and varlen need an NVIDIA GPU, and {chosen} is the "
            "fastest exact backend here"
        )
    if capability < (8, 0):
        return "nothing to install: FlashAttention needs an NVIDIA GPU from sm80 (A100, RTX 30)"
    best, oldest = flash_attn.versions_for(capability)[0], "flash_attention_2"
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


_INSTALL = {
    "flash_attention_4": "pip install flash-attn-4 (written for sm90 to sm120)",
    "flash_attention_3": (
        "flash-attn 3 (written for sm90): github.com/Dao-AILab/flash-attention, folder hopper, "
        "python setup.py install"
    ),
    "flash_attention_2": "pip install flash-attn --no-build-isolation (needs nvcc, compiles long)",
}
