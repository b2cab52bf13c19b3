"""The exact ways to run packed documents, tried in order until the isolation check passes.

    flash, varlen, documents   a kernel that takes boundaries        what `resolve_attention` finds
    model                      the model's own mask, from position_ids
    mask                       an explicit 4-D block-diagonal mask
    padded                     padded rows of the same documents
    equal_lengths              rows of equal length, nothing padded

Every way trains the same documents per step to the same loss; they differ in speed alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from trl_packing.attention import OWN_ATTENTION, AttentionChoice, install_attention
from trl_packing.engines import largest_on_any_rank
from trl_packing.isolation import IsolationReport, check_isolation


def ways_from(choice: AttentionChoice) -> list[AttentionChoice]:
    """Return `choice` and the ways that come after it, from fast to slow."""
    is_own = choice.backend in OWN_ATTENTION
    slower = OWN_ATTENTION[OWN_ATTENTION.index(choice.backend) + 1 :] if is_own else OWN_ATTENTION
    return [choice, *(AttentionChoice(backend, None, "") for backend in slower)]


def install_first_exact(
    model: nn.Module,
    ways: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    wrapped: nn.Module | None = None,
    agree: bool = True,
    **options: Any,
) -> tuple[AttentionChoice, IsolationReport | str]:
    """Install the first of `ways` that passes the isolation check on all ranks; return both.

    With `agree=False` every rank decides for itself: where no forward of the model waits for other
    ranks, so that any of them may be on another way.

    The check runs on `wrapped`, by default `model`, with `documents` and `options` of
    `check_isolation`. Where no way passes, the first one is installed and what it failed by comes
    with it: a report that is not true, or what the model says against being run that way. If a
    check raises (out of memory, interrupted), the first one is installed, too.
    """
    try:
        return _first_exact(model, ways, documents, wrapped, agree, options)
    except BaseException:
        # A way in the middle of its check may be one that leaks.
        install_attention(model, ways[0])
        raise


def _first_exact(
    model: nn.Module,
    ways: Sequence[AttentionChoice],
    documents: Sequence[Sequence[int] | np.ndarray],
    wrapped: nn.Module | None,
    agree: bool,
    options: dict[str, Any],
) -> tuple[AttentionChoice, IsolationReport | str]:
    failed: list[IsolationReport | str] = []
    for way in ways:
        install_attention(model, way)
        checked = model if wrapped is None else wrapped
        found = judge_way(checked, way, documents, thorough=bool(failed), **options)
        if agree:
            found = _worst_of_ranks(found, model)
        if not isinstance(found, str) and found:
            reasons = [f"{w.backend} {_in_short(f)}" for w, f in zip(ways, failed, strict=False)]
            return (replace(way, reason="; ".join(reasons)) if reasons else way), found
        failed.append(found)
    install_attention(model, ways[0])
    return ways[0], failed[0]


def judge_way(
    model: nn.Module,
    way: AttentionChoice,
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    **options: Any,
) -> IsolationReport | str:
    """Return the isolation check's report on the way installed, or what the model refuses it by."""
    try:
        return check_isolation(model, documents, attention=str(way), **options)
    except torch.OutOfMemoryError:
        raise
    except Exception as refusal:  # whatever a model raises that cannot take such a batch
        return f"{type(refusal).__name__}: {refusal}".splitlines()[0]


def _in_short(found: IsolationReport | str) -> str:
    if isinstance(found, str):
        return f"refused ({found[:80]})"
    return f"leaks by {found.difference:.2g}" if found.verdict == "leaks" else found.verdict


_VERDICTS = ("isolated", "inconclusive", "leaks", "refused")


def _worst_of_ranks(found: IsolationReport | str, model: nn.Module) -> IsolationReport | str:
    """Return `found`, or what is worse on another rank: whoever goes on alone waits for ever."""
    own = _VERDICTS.index("refused" if isinstance(found, str) else found.verdict)
    worst = largest_on_any_rank(own, model)
    if worst == own:
        return found
    if isinstance(found, str) or _VERDICTS[worst] == "refused":
        return "another rank refuses it, and says why"
    return replace(found, verdict=_VERDICTS[worst], probe="on another rank than this")
