"""NEFTune noise for packed documents: each document gets the noise that it would get alone.

    noise of a token = α / √(L · d) · uniform(−1, 1)        https://huggingface.co/papers/2310.05914

L is the length of the token's document and d the width of the embeddings. The hook of transformers
uses the length of the row as L, and the noise would depend on the other documents of the batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

from trl_packing.attention.calls import running_row
from trl_packing.documents.host_row import send

# Of padded rows, a document in each, ``(rows,)``; a plain global, because torch.compile follows it.
row_lengths: Tensor | None = None


def scale_noise_by_document(model: Any) -> None:
    """Replace the NEFTune hook of a transformers model, under its handle; no-op without one."""
    hooks = getattr(model.get_input_embeddings(), "_forward_hooks", {})
    for key, hook in hooks.items():
        if hook is neftune_post_forward_hook:
            hooks[key] = add_noise_by_document


def add_noise_by_document(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Return the embeddings `output` ``(rows, T, d)``, with noise if the module trains."""
    lengths = _lengths_of_tokens(output)
    if lengths is None:  # no packed or padded rows of ours
        return neftune_post_forward_hook(module, args, output)
    if not module.training:
        return output
    alpha: Any = module.neftune_noise_alpha
    # A rank without documents has rows of length 0.
    magnitude = alpha / (lengths.float().clamp(min=1) * output.shape[2]).sqrt()
    noise = torch.zeros_like(output).uniform_(-1, 1)
    return output + noise * magnitude[..., None].to(output.dtype)


def _lengths_of_tokens(output: Tensor) -> Tensor | None:
    """Return the length of the document of each token, ``(rows, T)`` or ``(rows, 1)``."""
    if row_lengths is not None and len(row_lengths) == len(output):
        return send(row_lengths, output.device)[:, None]
    row = running_row()
    if not row or len(output) != 1:
        return None
    boundaries = send(row["cu_seq_lens_q"], output.device)
    tokens = torch.arange(output.shape[1], device=output.device, dtype=boundaries.dtype)
    document = torch.searchsorted(boundaries[1:], tokens, right=True)
    # Tokens beyond the last boundary are virtual ones and belong to no document.
    return boundaries.diff()[document.clamp(max=len(boundaries) - 2)][None]
