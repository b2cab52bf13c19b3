"""An installed flash-attn package, used through transformers' FlashAttention path.

transformers passes `cu_seq_lens_q/k` and `max_length_q/k` of the batch to the varlen kernel. This
module knows the order in which versions are tried, and gathers the keys of rows with shared
prefixes; the kernels align the causal mask and the window at the last key (from 2.1). Head sizes,
soft-caps and GPUs that a version lacks are found by the isolation check, with one backward.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from trl_packing.attention.prefix_keys import gather_keys

VERSIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2")

# Fastest first, by the first number of the compute capability.
_BY_CAPABILITY = {8: (2, 3), 9: (3, 4, 2)}
_ON_OTHERS = (4, 2)


def versions_for(capability: tuple[int, int] | None) -> list[str]:
    """Return the versions to try on a GPU, fastest first; all of them if it is not known."""
    if capability is None:
        return list(VERSIONS)
    versions = _BY_CAPABILITY.get(capability[0], _ON_OTHERS)
    return [f"flash_attention_{version}" for version in versions]


def installed() -> list[str]:
    """Return the FlashAttention versions that transformers finds installed, newest first."""
    # transformers 5.17 does not know FlashAttention-4 yet.
    return [
        name
        for name in VERSIONS
        if getattr(import_utils, f"is_flash_attn_{name[-1]}_available", bool)()
    ]


def is_flash_attention(implementation: str | None) -> bool:
    """Whether `implementation` names FlashAttention, from a package or from a hub kernel."""
    name = (implementation or "").replace("attention", "attn").replace("_", "-")
    return "flash-attn" in name


def drops_sinks(implementation: str) -> bool:
    """Whether transformers drops sinks under `implementation`: versions 2 and 3 have none."""
    return implementation.endswith(("flash_attention_2", "flash_attention_3", "flash-attn2"))


def gather_prefix_keys(implementation: str) -> None:
    """Make transformers' attention function `implementation` gather the keys of shared prefixes.

    transformers passes their boundaries, but the row itself as the keys.
    """
    if gathers_prefix_keys(implementation):
        return
    function = ALL_ATTENTION_FUNCTIONS[implementation]

    @functools.wraps(function)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        key_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if key_index is None:
            return function(module, query, key, value, *args, **kwargs)
        rows = [x.squeeze(0).transpose(0, 1) for x in (key, value)]  # from (1, heads, T, dim)
        gathered = [gather_keys(x, key_index) for x in rows]
        key, value = (x.transpose(0, 1).unsqueeze(0) for x in gathered)
        with _gather_again_in_backward(rows, gathered, key_index):
            return function(module, query, key, value, *args, **kwargs)

    attention.gathers_prefix_keys = True  # type: ignore[attr-defined]
    AttentionInterface.register(implementation, attention)


def _gather_again_in_backward(
    rows: list[Tensor], gathered: list[Tensor], key_index: Tensor
) -> AbstractContextManager[Any]:
    """Return a block in which autograd saves `rows` in place of the keys gathered from them."""
    # Gradient checkpointing saves nothing of the block by hooks of its own; ours would replace it.
    is_hooked = _top_saved_tensors_default_hooks(True) is not None
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or is_hooked:
        return nullcontext()
    sources = {
        x.untyped_storage().data_ptr(): row.detach() for x, row in zip(gathered, rows, strict=True)
    }

    def pack(saved: Tensor) -> Any:
        row = sources.get(saved.untyped_storage().data_ptr())
        if row is None or saved.dtype != row.dtype:
            return saved
        return row, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        row, *layout = saved
        return gather_keys(row, key_index).as_strided(*layout)

    return saved_tensors_hooks(pack, unpack)


def gathers_prefix_keys(implementation: str | None) -> bool:
    """Whether the attention function `implementation` gathers the keys of shared prefixes."""
    return getattr(ALL_ATTENTION_FUNCTIONS.get(implementation), "gathers_prefix_keys", False)
