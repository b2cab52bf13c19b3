"""Verify one model: measure whether packed documents see each other, backend by backend.

Text alone is checked; a run checks images of its own data.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import take_prefix_keys
from trl_packing.attention.model_facts import config_of, loading_options
from trl_packing.config import PackingOptions
from trl_packing.isolation.check import CheckResult, Refusal, attempt, check_prefixes
from trl_packing.isolation.guard import check_backend
from trl_packing.isolation.probes import random_tokens
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.support import FAMILIES


def load_model(
    model: Any, args: Any, *, dtype: str | None, device: str | None
) -> tuple[Any, str, int]:
    """Return the model of a run on its device, its attention, and the tokens of the longest probe.

    Args:
        model: a hub id, a folder, or a model.
        args: the settings of the run.
        dtype: a data type of torch, or ``"auto"``; None: that of the run, or float32.
        device: None uses CUDA if it is available, and the CPU otherwise.
    """
    dtype = str(dtype or (args.model_init_kwargs or {}).get("dtype") or "float32")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--dtype {dtype} is no data type of torch; try float32 or bfloat16")
    if isinstance(model, str):
        kind = config_of(model, args).model_type
        loader: Any = AutoModelForCausalLM
        others = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind in others:
            loader = AutoModelForImageTextToText
        model = loader.from_pretrained(model, dtype=dtype, **loading_options(args))
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return model.to(place), PackingOptions.of(args).attention, args.max_length or 1024


def reads_images(model: Any) -> bool:
    """Return whether rows with images are packed for the model."""
    return model.config.model_type in FAMILIES


def verify(
    model: Any, attention: str, max_length: int, *, gradients: bool
) -> Iterator[tuple[str, CheckResult]]:
    """Yield each backend and its result, from fast to slow, until one is exact on the model.

    `attention` is a backend, or ``"auto"`` for all that may be exact. The longest probe has
    `max_length` tokens.
    """
    first = resolve_attention(model, attention)
    for choice in (first, *first.slower):
        result = check_backend(
            model, choice, max_length=max_length, gradients=gradients, training=True
        )
        yield choice.backend, result
        if result:
            return


def verify_prefixes(
    model: Any, attention: str, max_length: int, *, gradients: bool = False
) -> CheckResult:
    """Return whether documents may share prefixes, by a backend that `verify` found exact."""
    if reason := take_prefix_keys(model, attention):
        return Refusal(reason)
    longest = random_tokens(model, seed=1)(max_length)
    return attempt(
        check_prefixes,
        model,
        [longest],
        PackedCollator(),
        attention=attention,
        gradients=gradients,
        training=True,
    )


def as_json(backend: str, result: CheckResult) -> dict[str, Any]:
    """Return a result for JSON: the verdict and its evidence, or the refusal."""
    if isinstance(result, Refusal):
        return {"backend": backend, "verdict": "refused", "reason": str(result)}
    return {"backend": backend, **asdict(result)}


def as_text(backend: str, result: CheckResult) -> str:
    """Return a result in lines."""
    if isinstance(result, Refusal):
        return f"{backend:14} refused: {result}"
    gradients = result.gradient_difference
    further = f"\n{'':14} gradients {gradients:.1e}" if gradients is not None else ""
    return (
        f"{backend:14} {result.verdict}: max |Δlogit| {result.difference:.1e}, "
        f"rounding {result.noise:.1e},\n{'':14} a leak {result.leak:.1e} ({result.probe}){further}"
    )
