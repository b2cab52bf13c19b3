"""Sentences that say why packed documents cannot be kept apart, with a way out that fits."""

from typing import Any

from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.isolation.fallback import Found, Refusal
from trl_packing.isolation.measure import Stage
from trl_packing.models.introspection import rope_thresholds, text_config


def why_not_exact(model: Any, way: AttentionChoice, found: Found, *, named: bool) -> str:
    """Return why `model` is not trained by `way`, and what to do.

    named: whether `attention` was named; otherwise all ways were tried, and the reason of `way`
        says what each failed by.
    """
    name = type(model).__name__
    if isinstance(found, Refusal):
        if found.stage is Stage.ALONE:
            return f"{name} cannot run a document even alone, unpacked: {found}{_limits(model)}"
        if found.stage is Stage.COLLATOR:
            return f"the data collator makes no packed row: {found}"
        if named:
            return f"{name} cannot run packed documents by {way}: {found}. {_auto(way)}"
        return f"{name} cannot run packed documents by any way: {way.reason}"
    if found.verdict == "inconclusive":
        return f"{found}; the run goes on (trl-packing verify --dtype float32 sees more)"
    ways_out = [_auto(way) if named else f"No other way is exact either ({way.reason})"]
    if rope_thresholds(model):
        ways_out.append(
            "keep documents on one side of the model's length threshold with max_length"
        )
    return f"{found}. {', or '.join(ways_out)}; isolation_check='warn' trains all the same"


def _auto(way: AttentionChoice) -> str:
    padded = "" if way.backend in PADDED else " (attention='padded' fits most models)"
    return f"Set attention='auto', which takes the fastest exact way{padded}"


def _limits(model: Any) -> str:
    """Return the two limits of ids and lengths that a document may have crossed."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    limits = [
        f"{value:,} {what}"
        for value, what in (
            (getattr(embeddings, "num_embeddings", None), "token ids"),
            (getattr(text_config(model), "max_position_embeddings", None), "positions"),
        )
        if isinstance(value, int)
    ]
    return f" (the model has {' and '.join(limits)})" if limits else ""
