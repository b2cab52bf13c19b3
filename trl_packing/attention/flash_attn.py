"""An installed flash-attn package, through transformers' own FlashAttention path.

transformers hands `cu_seq_lens_q/k` and `max_length_q/k` of the batch to the varlen kernel, so
nothing needs registering here: this file only says which versions are there and what they lack.
"""

import torch
from transformers.utils import import_utils

# Newest first, as transformers names them.
VERSIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2")

MAX_HEAD_DIM = 256


def installed() -> str | None:
    """Return the newest FlashAttention that transformers finds installed and usable, or None."""
    for name in VERSIONS:
        # transformers 5.17 does not know FlashAttention-4 yet.
        available = getattr(import_utils, f"is_flash_attn_{name[-1]}_available", None)
        if available is not None and available():
            return name
    return None


def too_old() -> str | None:
    """Return why this GPU cannot run FlashAttention, or None: the package installs on any."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm80"
    return None


def is_flash_attention(implementation: str | None) -> bool:
    """Whether `attn_implementation` names FlashAttention, a package's or a hub kernel's."""
    name = (implementation or "").replace("attention", "attn").replace("_", "-")
    return "flash-attn" in name


def drops_sinks(implementation: str) -> bool:
    """Whether transformers leaves out attention sinks with it: version 2 has no place for them."""
    return implementation.endswith(("flash_attention_2", "flash-attn2"))
