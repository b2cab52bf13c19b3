"""An installed flash-attn package, used through transformers' FlashAttention path.

transformers passes `cu_seq_lens_q/k` and `max_length_q/k` of the batch to the varlen kernel. This
module knows which versions are installed and what they lack, and gathers the keys of rows with
shared prefixes. The kernels align the causal mask and the window at the last key (from 2.1).

    version 2    sm80 and later      dropout, soft-cap, heads up to 256
    version 3    sm80 to sm90        no dropout
    version 4    sm90 to sm121       no dropout, no backward of soft-cap; heads up to 128 from sm100

The limits are read from the sources (flash-attn 2.8, its `hopper` and `flash_attn/cute`, 2026). The
isolation check runs one backward to find others (`kernel_backward.py`).
"""

import functools
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import import_utils

from trl_packing.attention.prefix_keys import gather_keys

# Newest first, as transformers names them.
VERSIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2")

MAX_HEAD_DIM = 256

# The first compute capability on which the backward of a version runs, and the first that is too
# new for its kernels. The forward of version 4 runs on sm80, but its backward asserts sm90.
_CAPABILITIES = {"2": ((8, 0), None), "3": ((8, 0), (10, 0)), "4": ((9, 0), (13, 0))}


def installed() -> list[str]:
    """Return the FlashAttention versions that transformers finds installed, newest first."""
    return [name for name in VERSIONS if _is_available(name)]


def _is_available(name: str) -> bool:
    # transformers 5.17 does not know FlashAttention-4 yet.
    available = getattr(import_utils, f"is_flash_attn_{name[-1]}_available", None)
    return available is not None and bool(available())


def refusal(
    name: str, head_sizes: Iterable[tuple[int, int]], *, softcap: bool, dropout: float
) -> str | None:
    """Return why version `name` cannot train a model exactly on this machine's GPU, or None.

    Args:
        name: one of `VERSIONS`.
        head_sizes: all pairs (size of a key, size of a value) that layers have.
        softcap: whether scores are soft-capped.
        dropout: dropout probability of attention weights, in [0, 1].
    """
    version, sizes = name[-1], sorted(head_sizes)
    widest = max(max(pair) for pair in sizes)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is not None and (reason := _capability_refusal(version, capability)):
        return reason
    for key, value in sizes:
        if value > key:  # transformers pads values to the size of keys, which would truncate these
            return f"{name} cannot take head_dim {key} with {value}"
        if version != "2" and key % 8:
            return f"{name} cannot take head_dim {key}, which is no multiple of 8"
    if version == "4" and capability is not None and capability >= (10, 0) and widest > 128:
        return f"head_dim {widest} is above 128, the most of {name} on {_sm(capability)}"
    if dropout and version != "2":
        # transformers only warns, and skips dropout, if the kernel has no such argument.
        return f"{name} has no dropout and the model sets {dropout}"
    if softcap and version == "4":
        return f"{name} has no backward with soft-cap"
    if softcap and dropout:
        return f"{name} has no soft-cap with dropout, and the model sets {dropout}"
    return _determinism_refusal(name, capability, widest)


def _capability_refusal(version: str, capability: tuple[int, int]) -> str | None:
    first, beyond = _CAPABILITIES[version]
    if capability < first:
        return f"{torch.cuda.get_device_name()} is older than {_sm(first)}"
    if beyond is not None and capability >= beyond:
        return f"version {version} has no kernels for {_sm(capability)}"
    return None


def _determinism_refusal(name: str, capability: tuple[int, int] | None, widest: int) -> str | None:
    """Return why `name` has no deterministic backward, if transformers will request one."""
    if os.environ.get("FLASH_ATTENTION_DETERMINISTIC", "0") != "1":
        return None
    if name.endswith("3") and widest > 192:
        return f"{name} has no deterministic backward for head_dim {widest}"
    if name.endswith("4") and capability is not None and capability >= (12, 0):
        return f"{name} has no deterministic backward on {_sm(capability)}"
    return None


def _sm(capability: tuple[int, int]) -> str:
    return f"sm{capability[0]}{capability[1]}"


def is_flash_attention(implementation: str | None) -> bool:
    """Whether `implementation` names FlashAttention, from a package or from a hub kernel."""
    name = (implementation or "").replace("attention", "attn").replace("_", "-")
    return "flash-attn" in name


def drops_sinks(implementation: str) -> bool:
    """Whether transformers drops attention sinks under `implementation`: version 2 has no sinks."""
    return implementation.endswith(("flash_attention_2", "flash-attn2"))


# --- shared prefixes ------------------------------------------------------------------------------


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
        if key_index is not None:  # keys are (1, heads, T, dim)
            key, value = (
                gather_keys(x[0].transpose(0, 1), key_index).transpose(0, 1).unsqueeze(0)
                for x in (key, value)
            )
        return function(module, query, key, value, *args, **kwargs)

    attention.gathers_prefix_keys = True  # type: ignore[attr-defined]
    AttentionInterface.register(implementation, attention)


def gathers_prefix_keys(implementation: str | None) -> bool:
    """Whether the attention function `implementation` gathers the keys of shared prefixes."""
    function = ALL_ATTENTION_FUNCTIONS.get(implementation)
    return getattr(function, "gathers_prefix_keys", False)
