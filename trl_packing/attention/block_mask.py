"""An explicit 4-D mask for packed calls: block-diagonal, causal, T×T.

For models outside transformers' attention interface that ignore `position_ids` when they build
their mask, but use a 4-D mask unchanged. It replaces every mask that the model would build, so it
contains windows too: one mask, or one per layer type. The tokens of an image see each other in both
directions in Gemma 3, and in the layers with a window of large Gemma 4 models: until 5.23, the mask
of transformers looks images up by the position in the document, not in the row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.calls import Call, Forward
from trl_packing.attention.model_facts import layer_values, text_config
from trl_packing.documents.boundaries import mask_from_document_ids
from trl_packing.documents.host_row import BOUNDARIES, host_boundaries, to_device

NAME = "mask"


def run_with_mask(backbone: nn.Module, forward: Forward, kwargs: Call) -> Any:
    """Run a packed call of `backbone` with a 4-D mask instead of boundaries."""
    text = text_config(backbone)
    boundaries = kwargs["cu_seq_lens_q"]
    is_gemma4 = getattr(text, "use_bidirectional_attention", None) == "vision"
    types = kwargs.get("mm_token_type_ids" if is_gemma4 else "token_type_ids")
    images = None if types is None else _images(types[0] == 1, boundaries)
    dtype = next((p.dtype for p in backbone.parameters() if p.is_floating_point()), torch.float32)
    lengths = np.diff(host_boundaries(boundaries))
    device = kwargs["position_ids"].device
    mask = packed_mask(lengths, text, dtype, device, images, is_gemma4)
    kept = {k: v for k, v in kwargs.items() if k == "position_ids" or k not in BOUNDARIES}
    return forward(**kept | {"attention_mask": mask})


def packed_mask(
    seq_lengths: Sequence[int] | np.ndarray,
    config: Any,
    dtype: torch.dtype,
    device: torch.device | None = None,
    images: Tensor | None = None,
    windows_only: bool = False,
) -> Any:
    """Return the additive mask ``(1, 1, T, T)``, or a dict of such masks by layer type.

    `seq_lengths` ``(N,)`` are the tokens of each document, `config` is the model's text config, and
    `images` ``(T,)`` the image of each token, −1 on text. With `windows_only`, layers without a
    window see images in one direction only. Several sizes of windows, and chunks, are refused.
    """
    types = set(getattr(config, "layer_types", None) or ())
    windows = sorted(set(layer_values(config, "sliding_window")))
    if len(windows) > 1 or "chunked_attention" in types:
        found = f"several sizes of sliding_window: {windows}" if len(windows) > 1 else "chunks"
        raise NotImplementedError(f"layers have {found}; set attention='padded'")
    window = windows[0] if windows else None
    ids = np.repeat(np.arange(len(seq_lengths)), seq_lengths)[None]

    if not types:
        types = {"sliding_attention" if window else "full_attention"}
    elif not types <= {"full_attention", "sliding_attention"}:
        types = {"full_attention"}
    masks = {}
    for kind in types:
        size = window if kind == "sliding_attention" else None
        mask = mask_from_document_ids(to_device(ids, device), window=size, dtype=dtype)
        if images is not None and (size is not None or not windows_only):
            is_open = (images[:, None] == images) & (images >= 0)
            if size is not None:
                token = torch.arange(len(images), device=images.device)
                is_open &= token[:, None] - token < size
            mask = mask.masked_fill(is_open, 0)
        masks[kind] = mask
    return masks if len(masks) > 1 else mask


def _images(is_image: Tensor, boundaries: Tensor) -> Tensor:
    """Return the image of each token ``(T,)`` int64, −1 on text; images end with their document."""
    starts = is_image.clone()
    starts[1:] &= ~is_image[:-1]
    inside = boundaries[(boundaries > 0) & (boundaries < len(is_image))].long()
    starts[inside] = is_image[inside]
    return torch.where(is_image, starts.cumsum(0) - 1, -1)
