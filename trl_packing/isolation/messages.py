"""Messages that say why packed documents are not isolated, each with a remedy that fits."""

from typing import Any

from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.isolation.fallback import CheckResult, Refusal
from trl_packing.isolation.measure import Stage
from trl_packing.models.introspection import rope_thresholds, text_config


def why_not_exact(model: Any, choice: AttentionChoice, result: CheckResult, *, named: bool) -> str:
    """Return why `model` cannot train packed documents with `choice`, and the remedy.

    Args:
        model: the transformers model.
        choice: the backend that was checked first. Its reason lists the failures of all backends,
            unless it is `named`.
        result: its failure.
        named: whether the user chose the backend. If not, all of them were checked.
    """
    name = type(model).__name__
    if isinstance(result, Refusal):
        if result.stage is Stage.ALONE:
            return f"{name} cannot run a document even alone, unpacked: {result}{_limits(model)}"
        if result.stage is Stage.NOT_FINITE:
            return str(result).removeprefix("ValueError: ")
        if result.stage is Stage.COLLATOR:
            return f"the data collator makes no packed row: {result}"
        if named:
            return f"{name} cannot run packed documents by {choice}: {result}. {_auto(choice)}"
        return f"{name} cannot run packed documents by any backend: {choice.reason}"
    if result.verdict == "inconclusive":
        return f"{result}; the run goes on (trl-packing verify --dtype float32 sees more)"
    remedies = [_auto(choice) if named else f"No other backend is exact either ({choice.reason})"]
    if rope_thresholds(model):
        remedies.append(
            "keep documents on one side of the model's length threshold with max_length"
        )
    return f"{result}. {', or '.join(remedies)}; isolation_check='warn' trains all the same"


def _auto(choice: AttentionChoice) -> str:
    padded = "" if choice.backend in PADDED else " (attention='padded' fits most models)"
    return f"Set attention='auto', which takes the fastest exact backend{padded}"


def _limits(model: Any) -> str:
    """Return the two limits of a model, of ids and of lengths, that a document may exceed."""
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    limits = [
        f"{value:,} {unit}"
        for value, unit in (
            (getattr(embeddings, "num_embeddings", None), "token ids"),
            (getattr(text_config(model), "max_position_embeddings", None), "positions"),
        )
        if isinstance(value, int)
    ]
    return f" (the model has {' and '.join(limits)})" if limits else ""
