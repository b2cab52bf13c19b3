"""Every attention backend, tried on this machine: a forward and a backward of a tiny model.

    each document alone, float32, the untouched model     the reference
    all documents in one packed row, by the backend       the trial
    the same row without boundaries                       the control: a leak, which must be seen

The chosen backend is also tried on a row whose documents compute their common prefixes once.

Verdicts: ``"exact"`` (within rounding), ``"differs"``, ``"refused"`` (it cannot be exact, and says
why), ``"not installed"``, ``"error"``.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from trl_packing.attention import flash_attn
from trl_packing.attention.backends import (
    CHOICES,
    refusals,
    resolve_attention,
)
from trl_packing.attention.install import install_attention, take_prefix_keys
from trl_packing.documents.labels import IGNORE_INDEX, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.isolation.fallback import with_fallbacks
from trl_packing.isolation.measure import NOISE_FACTOR
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.exactness.shared_step import shared_documents
from trl_packing.tools.exactness.tiny_models import tiny_model
from trl_packing.tools.exactness.tiny_step import (
    Documents,
    StepResult,
    one_at_a_time,
    rounding_tolerance,
    tiny_documents,
)

# Kernels that compute in half precision only. The others are tried in float32, where a leak is
# furthest above rounding.
HALF_PRECISION = (*flash_attn.VERSIONS, "varlen")


@dataclass(frozen=True)
class Trial:
    """The result of one backend.

    Attributes:
        backend: its name.
        verdict: one of those above.
        reason: why it was refused, or the error; empty if it ran.
        difference: largest relative difference of logits, loss and gradients from the reference;
            of loss and gradients in a row that shares prefixes.
        tolerance: the largest difference that rounding explains.
        leak: the difference if documents see each other.
    """

    backend: str
    verdict: str
    reason: str = ""
    difference: float | None = None
    tolerance: float | None = None
    leak: float | None = None


@dataclass(frozen=True)
class Trials:
    """The results of all backends, from fast to slow.

    Attributes:
        architecture: of the tiny model.
        device: where it ran.
        dtype: in which the run computes, half precision or float32.
        trials: the results.
        chosen: the backend that a run takes; None if none is exact.
        prefixes: a row of it that shares prefixes; None if none was tried.
    """

    architecture: str
    device: str
    dtype: str
    trials: tuple[Trial, ...]
    chosen: str | None
    prefixes: Trial | None = None

    def __getitem__(self, backend: str) -> Trial:
        return next(trial for trial in self.trials if trial.backend == backend)


def try_backends(
    device: str, dtype: torch.dtype, *, architecture: str = "llama", model: Any = None
) -> Trials:
    """Try all backends.

    Args:
        device: a device of torch.
        dtype: in which the run computes attention.
        architecture: a model type of `tiny_models`.
        model: the model of the run, which may be on the meta device; its sizes refuse backends too.
    """
    tiny = tiny_model(architecture).to(device)
    reasons = refusals(tiny if model is None else model, device=device, dtype=dtype)
    comparison = _Comparison(tiny, tiny_documents())
    trials = [_trial(comparison, name, reasons.get(name), dtype) for name in CHOICES[1:]]
    exact = {trial.backend for trial in trials if trial.verdict == "exact"}
    first = resolve_attention(tiny if model is None else model, device=device, dtype=dtype)
    chosen = next((c.backend for c in with_fallbacks(first) if c.backend in exact), None)
    return Trials(
        architecture=architecture,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        trials=tuple(trials),
        chosen=chosen,
        prefixes=None if chosen is None else _trial_of_prefixes(tiny, chosen, dtype),
    )


class _Comparison:
    """Documents of a tiny model, alone; and how far rounding and a leak move them, by dtype."""

    def __init__(self, model: Any, documents: Documents) -> None:
        self.model = model
        self.documents = documents
        self.exact = one_at_a_time(model, self.documents)
        self._limits: dict[torch.dtype, tuple[float, float]] = {}

    def limits(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return the largest difference that rounding explains, and the difference of a leak."""
        if dtype not in self._limits:
            model = copy.deepcopy(self.model).to(dtype)
            tolerance = rounding_tolerance(self.model, self.documents, self.exact)
            if dtype != torch.float32:
                rounded = one_at_a_time(model, self.documents)
                tolerance = max(tolerance, NOISE_FACTOR * max(rounded.distance(self.exact)))
            together = {
                key: [token for document in self.documents for token in document[key]]
                for key in ("input_ids", "labels")
            }
            leak = max(one_at_a_time(model, [together]).distance(self.exact))
            self._limits[dtype] = tolerance, leak
        return self._limits[dtype]


def _trial(comparison: _Comparison, name: str, refusal: str | None, dtype: torch.dtype) -> Trial:
    if name in flash_attn.VERSIONS and name not in flash_attn.installed():
        return Trial(name, "not installed", refusal or "")
    if refusal is not None:
        return Trial(name, "refused", refusal)
    return _tried(comparison, name, dtype, PackedCollator())


def _trial_of_prefixes(model: Any, name: str, dtype: torch.dtype) -> Trial:
    """Return the result of a row that computes the common prefixes of its documents once."""
    if (refusal := take_prefix_keys(model, name)) is not None:
        return Trial(name, "refused", refusal)
    comparison = _Comparison(model, shared_documents())
    return _tried(comparison, name, dtype, PackedCollator(shares_prefixes=True))


def _tried(
    comparison: _Comparison, name: str, dtype: torch.dtype, collator: PackedCollator
) -> Trial:
    dtype = dtype if name in HALF_PRECISION else torch.float32
    tolerance, leak = comparison.limits(dtype)
    model = copy.deepcopy(comparison.model).to(dtype).train()
    try:
        install_attention(model, resolve_attention(model, name))
        packed = _packed(model, collator(comparison.documents))
    except Exception as error:  # kernels raise all kinds of errors
        first_line = (str(error).splitlines() or [""])[0]
        return Trial(name, "error", f"{type(error).__name__}: {first_line}")
    # A token of a row that shares prefixes stands for those of several documents.
    distance = packed.distance_of_step if collator.shares_prefixes else packed.distance
    difference = max(distance(comparison.exact))
    verdict = "exact" if difference <= min(tolerance, leak / 2) else "differs"
    return Trial(name, verdict, "", difference, tolerance, leak)


def _packed(model: Any, row: dict[str, Any]) -> StepResult:
    """Return the step of all documents in one packed row."""
    batch = {k: v.to(model.device) if torch.is_tensor(v) else v for k, v in row.items()}
    labels = batch.pop("labels")[0, 1:]
    given, _ = batch.pop(TOKEN_WEIGHTS, None), batch.pop(TARGET_COUNTS, None)
    weights = (labels != IGNORE_INDEX).float() if given is None else given[0, 1:]
    logits = model(**batch | {"use_cache": False}).logits[0].float()
    nll = F.cross_entropy(logits[:-1], labels, reduction="none")
    loss = (nll * weights).sum() / weights.sum()
    loss.backward()
    gradients = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    return StepResult(logits.detach(), loss.item(), gradients)


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
