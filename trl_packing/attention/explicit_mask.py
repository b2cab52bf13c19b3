"""An explicit 4-D mask for packed calls: block-diagonal, causal, T×T.

For models whose attention is their own and that build their mask without looking at `position_ids`
(they would let documents see each other), but take a finished mask as it is.

A finished mask replaces every mask that the model would build, so windows and chunks are drawn in
here: one mask for all layers, or one a layer type where the model says that it has several.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trl_packing.attention.interface import BOUNDARIES, wrap_packed_calls
from trl_packing.documents import block_diagonal_mask
from trl_packing.length_constants import text_config

NAME = "mask"


def mask_packed_calls(backbone: nn.Module) -> None:
    """Let packed calls of `backbone` run with a 4-D mask instead of boundaries."""
    text = text_config(backbone)

    def masked(forward: Callable[..., Any], **kwargs: Any) -> Any:
        lengths = kwargs["cu_seq_lens_q"].long().diff()
        unmasked = {k: v for k, v in kwargs.items() if k == "position_ids" or k not in BOUNDARIES}
        mask = packed_mask(lengths.to(kwargs["position_ids"].device), text, _dtype(backbone))
        return forward(**unmasked | {"attention_mask": mask})

    wrap_packed_calls(backbone, masked)


def packed_mask(seq_lengths: Tensor, config: Any, dtype: torch.dtype) -> Any:
    """Return the additive mask ``(1, 1, T, T)``, or a dict of them by layer type."""
    types = set(getattr(config, "layer_types", None) or ())
    window: Any = getattr(config, "sliding_window", None)
    chunk: Any = getattr(config, "attention_chunk_size", None)
    masks = {
        "full_attention": lambda: block_diagonal_mask(seq_lengths[None], dtype=dtype),
        "sliding_attention": lambda: block_diagonal_mask(
            seq_lengths[None], window=window, dtype=dtype
        ),
        "chunked_attention": lambda: block_diagonal_mask(_chunks(seq_lengths, chunk), dtype=dtype),
    }
    if len(types) > 1 and types <= masks.keys():
        return {name: masks[name]() for name in types}
    if types:
        return masks[types.pop()]() if types <= masks.keys() else masks["full_attention"]()
    return masks["sliding_attention" if window else "full_attention"]()


def _chunks(seq_lengths: Tensor, chunk: int) -> Tensor:
    """Return the lengths ``(1, pieces)`` of documents cut into chunks, isolated like documents."""
    pieces = [
        min(chunk, length - start)
        for length in seq_lengths.tolist()
        for start in range(0, length, chunk)
    ]
    return torch.tensor([pieces], device=seq_lengths.device)


def _dtype(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
