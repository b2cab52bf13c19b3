"""An installed flash-attn package, used through transformers' FlashAttention path.

transformers passes `cu_seq_lens_q/k` and `max_length_q/k` of the batch to the varlen kernel. This
module knows the order in which versions are tried, and gathers the keys of rows with shared
prefixes; the kernels align the causal mask and the window at the last key (from 2.1). Head sizes,
soft-caps and GPUs that a version lacks are found by the isolation check, with one backward.
"""

import functools
from typing import Any

from torch import Tensor, nn
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
    checks = [getattr(import_utils, f"is_flash_attn_{v[-1]}_available", bool) for v in VERSIONS]
    return [name for name, is_available in zip(VERSIONS, checks, strict=True) if is_available()]


def is_flash_attention(implementation: str | None) -> bool:
    """Whether `implementation` names FlashAttention, from a package or from a hub kernel."""
    name = (implementation or "").replace("attention", "attn").replace("_", "-")
    return "flash-attn" in name


def drops_sinks(implementation: str) -> bool:
    """Whether transformers drops sinks under `implementation`: versions 2 and 3 have none."""
    return implementation.endswith(("flash_attention_2", "flash_attention_3", "flash-attn2"))


def gather_prefix_keys(implementation: str) -> None:
    """Make transformers' attention function `implementation` gather the keys of shared prefixes.

    transformers passes the boundaries of the keys to the kernel, but the row itself as the keys.
    Calls without `key_index` stay unchanged.
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
        if key_index is not None:  # both are (1, heads, T, dim)
            rows = (gather_keys(x[0].transpose(0, 1), key_index) for x in (key, value))
            key, value = (x.transpose(0, 1).unsqueeze(0) for x in rows)
        return function(module, query, key, value, *args, **kwargs)

    attention.gathers_prefix_keys = True  # type: ignore[attr-defined]
    AttentionInterface.register(implementation, attention)


def gathers_prefix_keys(implementation: str | None) -> bool:
    """Whether the attention function `implementation` gathers the keys of shared prefixes."""
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return getattr(function, "gathers_prefix_keys", False)
