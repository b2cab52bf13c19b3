"""Attention backends from fastest to slowest; the first that passes the isolation check is used.

    flash, varlen, documents   kernels that take boundaries          chosen by `resolve_attention`
    model                      the model's native mask, from position_ids
    mask                       an explicit 4-D block-diagonal mask
    padded                     padded rows of the same documents
    equal_lengths              rows of equal length, without padding

All of them train the same documents in each step to the same loss. They differ in speed only.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from trl_packing.attention.backends import NATIVE_ATTENTION, AttentionChoice
from trl_packing.attention.install import check_backward, install_attention
from trl_packing.attention.sharding import all_reduce_max
from trl_packing.isolation.check import IsolationReport, check_isolation, stage_from_error
from trl_packing.isolation.measure import Stage

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """An exception that a model raised against packed documents. It is false, as a leak is.

    Attributes:
        error: type and first line of the exception.
        stage: what was running. Another backend helps only after a packed call of the model.
    """

    error: str
    stage: Stage = Stage.PACKED

    @property
    def verdict(self) -> str:
        """ "refused" or "not finite", beside the verdicts of an `IsolationReport`."""
        return "not finite" if self.stage is Stage.NOT_FINITE else "refused"

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.error

    @classmethod
    def from_error(cls, error: Exception) -> "Refusal":
        """Return the refusal that `error` is."""
        first_line, *_ = [*str(error).splitlines(), ""]
        return cls(f"{type(error).__name__}: {first_line}", stage_from_error(error))


CheckResult = IsolationReport | Refusal


def with_fallbacks(choice: AttentionChoice) -> list[AttentionChoice]:
    """Return `choice` and its fallbacks, from fast to slow."""
    is_native = choice.backend in NATIVE_ATTENTION
    after = NATIVE_ATTENTION.index(choice.backend) + 1 if is_native else 0
    native = [AttentionChoice(name, None, "", choice.native) for name in NATIVE_ATTENTION[after:]]
    return [choice, *choice.slower, *native]


def install_first(model: nn.Module, choices: Sequence[AttentionChoice]) -> list[AttentionChoice]:
    """Install the first of `choices` that can be installed; return it and those after it.

    A package that was built for another torch fails only when it is imported, which is here.

    Raises:
        Exception: the error of the last choice, if none can be installed.
    """
    for number, choice in enumerate(choices):
        try:
            install_attention(model, choice)
        except Exception as error:
            if choice is choices[-1]:
                raise
            failed = f"{choice.backend} {_in_short(Refusal.from_error(error))}"
            logger.warning(f"{failed}: trying {choices[number + 1].backend}")
        else:
            return list(choices[number:])
    raise ValueError("no attention backend was given to install")


def install_first_exact(
    model: nn.Module,
    choices: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    wrapped: nn.Module | None = None,
    agree: bool = True,
    further: Callable[[AttentionChoice], CheckResult] | None = None,
    **options: Any,
) -> tuple[AttentionChoice, CheckResult]:
    """Install the first of `choices` that passes the isolation check; return it and its result.

    If none passes, or a check breaks off (out of memory, interrupted), the first is installed.

    Args:
        model: the model on which backends are installed.
        choices: backends, from fast to slow.
        documents: token ids ``(T,)`` of each document of the check.
        wrapped: the model that the check calls, by default `model`.
        agree: whether a backend must pass on all ranks. If False, each rank decides for itself,
            which is safe only where no forward of the model waits for other ranks.
        further: another check, which a backend must pass too.
        options: further arguments of `check_isolation`.

    Returns:
        The installed backend, whose reason says how faster ones failed. The result of its check,
        which is false if no backend passes: then it is the result of the first one.
    """
    try:
        options = options | {"wrapped": wrapped}
        return _first_exact(model, choices, documents, agree, further, options)
    except BaseException:
        # The backend whose check broke off may leak.
        install_first(model, choices)
        raise


def _first_exact(
    model: nn.Module,
    choices: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray],
    agree: bool,
    further: Callable[[AttentionChoice], CheckResult] | None,
    options: dict[str, Any],
) -> tuple[AttentionChoice, CheckResult]:
    failed: list[CheckResult] = []
    for choice in choices:
        result = check_backend(model, choice, documents, thorough=bool(failed), **options)
        if agree:
            result = worst_of_ranks(result)
        if result and further is not None:
            result = further(choice)
        if result:
            return _with_reason(choice, choices, failed), result
        failed.append(result)
        if result.verdict == "not finite":
            break  # without packing, and by any backend
    first, *_ = install_first(model, choices)
    return _with_reason(first, choices, failed if len(failed) > 1 else []), _first_result(failed)


def _first_result(failed: Sequence[CheckResult]) -> CheckResult:
    """Return the result of the first backend.

    Its refusal is put down to the packed call, unless all backends failed at the earlier stage.
    """
    first = failed[0]
    if isinstance(first, Refusal) and len({getattr(f, "stage", None) for f in failed}) > 1:
        return replace(first, stage=Stage.PACKED)
    return first


def check_backend(
    model: nn.Module,
    choice: AttentionChoice,
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    wrapped: nn.Module | None = None,
    **options: Any,
) -> CheckResult:
    """Install `choice` and return the result of the isolation check with it.

    A kernel that will train also runs one small backward. The arguments are those of
    `install_first_exact`.

    Raises:
        torch.OutOfMemoryError: the check did not fit into memory, which says nothing about leaks.
    """
    checked = model if wrapped is None else wrapped
    try:
        install_attention(model, choice)
        with check_backward(model, training=options.get("training")) as faults:
            report = check_isolation(checked, documents, attention=str(choice), **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # models raise all kinds of errors against a packed batch
        return Refusal.from_error(error)
    return Refusal(faults[0].splitlines()[0]) if report and faults else report


def _with_reason(
    choice: AttentionChoice, choices: Sequence[AttentionChoice], failed: Sequence[CheckResult]
) -> AttentionChoice:
    """Return `choice` with the failures of the first of `choices` as its reason."""
    reasons = [f"{c.backend} {_in_short(f)}" for c, f in zip(choices, failed, strict=False)]
    return replace(choice, reason="; ".join(reasons)) if reasons else choice


def _in_short(result: CheckResult) -> str:
    if isinstance(result, Refusal):
        return f"refused ({result.error[:80]})"
    where = " with images" if "image" in result.probe else ""
    leaks = result.verdict == "leaks"
    return f"leaks by {result.difference:.2g}{where}" if leaks else f"{result.verdict}{where}"


_VERDICTS = ("isolated", "inconclusive", "leaks", "refused", "not finite")

# Seconds that a rank whose forward raised waits for the others. They may hang in that forward,
# where a sharded model gathers its weights, until the timeout of the process group.
_PATIENCE = 60.0


def worst_of_ranks(result: CheckResult) -> CheckResult:
    """Return `result`, or a worse one of another rank: ranks that disagree wait for ever.

    Raises:
        RuntimeError: this rank's forward raised, and the others do not answer.
    """
    mine = _VERDICTS.index(result.verdict)
    patience = _PATIENCE if isinstance(result, Refusal) else None
    try:
        worst = all_reduce_max(mine, patience=patience)
    except RuntimeError as error:
        if patience is None:
            raise
        raise RuntimeError(
            f"the isolation check raised {result} on this rank, and the others do not answer: they "
            "wait for it in a forward of the sharded model"
        ) from error
    if worst == mine:
        return result
    if isinstance(result, Refusal) or _VERDICTS[worst] in ("refused", "not finite"):
        stage = Stage.NOT_FINITE if _VERDICTS[worst] == "not finite" else Stage.PACKED
        return Refusal("another rank refuses it, and says why", stage)
    return replace(result, verdict=_VERDICTS[worst], probe="on another rank than this")
