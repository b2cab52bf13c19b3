"""An installed flash-attn package, through transformers' own FlashAttention path.

transformers hands `cu_seq_lens_q/k` and `max_length_q/k` of the batch to the varlen kernel, so
nothing needs registering here: this file only says which versions are there and what they lack.

    version 2    sm80 and later      dropout, soft-cap, heads up to 256
    version 3    sm80 to sm90        no dropout
    version 4    sm90 to sm121       no dropout, no backward of soft-cap; heads up to 128 from sm100

Limits are those of the sources (flash-attn 2.8, its `hopper` and `flash_attn/cute`, 2026). Others
show in the isolation check, which runs one backward (`kernel_backward.py`).
"""

import os
from collections.abc import Iterable

import torch
from transformers.utils import import_utils

# Newest first, as transformers names them.
VERSIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2")

MAX_HEAD_DIM = 256

# The first compute capability that the backward of a version runs on, and the first that is too new
# for its kernels. The forward of version 4 takes sm80, its backward asserts sm90.
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

    head_sizes: the sizes of a key and of a value, for every pair that the layers have.
    softcap, dropout: whether scores are capped, and how many attention weights are dropped.
    """
    version, sizes = name[-1], sorted(head_sizes)
    widest = max(max(pair) for pair in sizes)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is not None and (reason := _capability_refusal(version, capability)):
        return reason
    for key, value in sizes:
        if value > key:  # transformers pads values to the size of keys, and so would cut these
            return f"{name} cannot take head_dim {key} with {value}"
        if version != "2" and key % 8:
            return f"{name} cannot take head_dim {key}, which is no multiple of 8"
    if version == "4" and capability is not None and capability >= (10, 0) and widest > 128:
        return f"head_dim {widest} is above 128, the most of {name} on {_sm(capability)}"
    if dropout and version != "2":
        # transformers leaves dropout out where the kernel has no such argument, and only warns.
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
    """Return why `name` has no deterministic backward, if transformers will ask it for one."""
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
    """Whether `attn_implementation` names FlashAttention, a package's or a hub kernel's."""
    name = (implementation or "").replace("attention", "attn").replace("_", "-")
    return "flash-attn" in name


def drops_sinks(implementation: str) -> bool:
    """Whether transformers leaves out attention sinks with it: version 2 has no place for them."""
    return implementation.endswith(("flash_attention_2", "flash-attn2"))
