"""The exact ways to run packed documents, tried in order until the isolation check passes.

    flash, varlen, documents   kernels that take boundaries          what `resolve_attention` finds
    model                      the model's own mask, from position_ids
    mask                       an explicit 4-D block-diagonal mask
    padded                     padded rows of the same documents
    equal_lengths              rows of equal length, nothing padded

Every way trains the same documents per step to the same loss; they differ in speed alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from trl_packing.attention.backends import NATIVE_ATTENTION, AttentionChoice
from trl_packing.attention.install import check_backward, install_attention
from trl_packing.isolation.check import IsolationReport, check_isolation, stage_of
from trl_packing.isolation.measure import Stage
from trl_packing.models.sharding import all_reduce_max

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Refusal:
    """What was raised against running packed documents some way. Like a leak, it is not true.

    error: type and first line of the exception.
    stage: what was running. Unless it was a packed call of the model, no other way helps.
    """

    error: str
    stage: Stage = Stage.PACKED
    verdict: ClassVar[str] = "refused"

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.error

    @classmethod
    def of(cls, error: Exception) -> "Refusal":
        first_line, *_ = [*str(error).splitlines(), ""]
        return cls(f"{type(error).__name__}: {first_line}", stage_of(error))


Found = IsolationReport | Refusal


def with_fallbacks(choice: AttentionChoice) -> list[AttentionChoice]:
    """Return `choice` and the ways that come after it, from fast to slow."""
    first = 0
    if choice.backend in NATIVE_ATTENTION:
        first = NATIVE_ATTENTION.index(choice.backend) + 1
    native = [AttentionChoice(name, None, "", choice.native) for name in NATIVE_ATTENTION[first:]]
    return [choice, *choice.slower, *native]


def install_first(model: nn.Module, ways: Sequence[AttentionChoice]) -> list[AttentionChoice]:
    """Install the first of `ways` that lets itself be installed; return it and those after it.

    A package whose build does not fit this torch shows when it is imported. Raises what the last
    of `ways` raises.
    """
    for number, way in enumerate(ways):
        try:
            install_attention(model, way)
        except Exception as error:
            if way is ways[-1]:
                raise
            failed = f"{way.backend} {_in_short(Refusal.of(error))}"
            logger.warning(f"{failed}: trying {ways[number + 1].backend}")
        else:
            return list(ways[number:])
    raise ValueError("there is no way to install")


def install_first_exact(
    model: nn.Module,
    ways: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    wrapped: nn.Module | None = None,
    agree: bool = True,
    **options: Any,
) -> tuple[AttentionChoice, Found]:
    """Install the first of `ways` that passes the isolation check on all ranks; return both.

    With `agree=False` every rank decides for itself: where no forward of the model waits for other
    ranks, so that any of them may be on another way.

    The check runs on `wrapped`, by default `model`, with `documents` and `options` of
    `check_isolation`. Where no way passes, the first one is installed and what it failed by comes
    with it: a report that is not true, or what was raised against being run that way. If a check
    breaks off (out of memory, interrupted), the first one is installed, too.
    """
    try:
        return _first_exact(model, ways, documents, agree, options | {"wrapped": wrapped})
    except BaseException:
        # A way in the middle of its check may be one that leaks.
        install_first(model, ways)
        raise


def _first_exact(
    model: nn.Module,
    ways: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray],
    agree: bool,
    options: dict[str, Any],
) -> tuple[AttentionChoice, Found]:
    failed: list[Found] = []
    for way in ways:
        found = check_backend(model, way, documents, thorough=bool(failed), **options)
        if agree:
            found = _worst_of_ranks(found, model)
        if found:
            return _because(way, ways, failed), found
        failed.append(found)
    first, *_ = install_first(model, ways)
    return _because(first, ways, failed if len(failed) > 1 else []), _first_of(failed)


def _first_of(failed: Sequence[Found]) -> Found:
    """Return what the first way failed by; a packed call is to blame unless all failed before."""
    first = failed[0]
    if isinstance(first, Refusal) and len({getattr(f, "stage", None) for f in failed}) > 1:
        return replace(first, stage=Stage.PACKED)
    return first


def check_backend(
    model: nn.Module,
    way: AttentionChoice,
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    wrapped: nn.Module | None = None,
    **options: Any,
) -> Found:
    """Install `way`; return the isolation check's report on it, or what was raised against it.

    A kernel that is to train runs one small backward, too.
    """
    checked = model if wrapped is None else wrapped
    try:
        install_attention(model, way)
        with check_backward(model, training=options.get("training")) as faults:
            report = check_isolation(checked, documents, attention=str(way), **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model raises that cannot take such a batch
        return Refusal.of(error)
    return Refusal(faults[0].splitlines()[0]) if report and faults else report


def _because(
    way: AttentionChoice, ways: Sequence[AttentionChoice], failed: Sequence[Found]
) -> AttentionChoice:
    """Return `way` with what others failed by as its reason."""
    reasons = [f"{w.backend} {_in_short(f)}" for w, f in zip(ways, failed, strict=False)]
    return replace(way, reason="; ".join(reasons)) if reasons else way


def _in_short(found: Found) -> str:
    if isinstance(found, Refusal):
        return f"refused ({found.error[:80]})"
    return f"leaks by {found.difference:.2g}" if found.verdict == "leaks" else found.verdict


_VERDICTS = ("isolated", "inconclusive", "leaks", "refused")


def _worst_of_ranks(found: Found, model: nn.Module) -> Found:
    """Return `found`, or what is worse on another rank: whoever goes on alone waits for ever."""
    own = _VERDICTS.index(found.verdict)
    worst = all_reduce_max(own, next(model.parameters()).device)
    if worst == own:
        return found
    if isinstance(found, Refusal) or _VERDICTS[worst] == "refused":
        return Refusal("another rank refuses it, and says why")
    return replace(found, verdict=_VERDICTS[worst], probe="on another rank than this")
