"""Registers packed kernels with transformers, for packed calls only.

A *packed call* has cu_seq_lens_q and no attention_mask: no mask is built, and the packed kernel
runs. Any other call (a padded batch, generate, a 4-D mask) gets the model's native mask and
attention function. Both functions are registered under one name: without the mask function, every
other call would silently run without a mask (transformers 5.23).
"""

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing.attention.calls import needs_no_mask
from trl_packing.attention.model_facts import PACKED_NAMES
from trl_packing.attention.prefix_keys import PrefixKeys, prefix_keys
from trl_packing.documents.host_row import BOUNDARIES


class KernelOptions(NamedTuple):
    """Options of one call of a packed kernel.

    `scale` multiplies the dot products. A query sees `window` tokens, itself included; None or 0:
    all before it. `softcap` bounds the scaled scores, ``softcap * tanh(score / softcap)``. `sinks`
    ``(heads,)`` are learned logits that take part in the softmax and attend to nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


# Attention within documents; `document_sdpa.document_attention` describes the arguments.
PackedKernel = Callable[..., Tensor]

# Arguments of the interface that change the result and that no packed kernel computes.
_UNSUPPORTED = ("position_bias", "attention_bias", "alibi", "head_mask", "dropout")


def register_packed_kernel(name: str, kernel: PackedKernel) -> None:
    """Register `kernel` as `name`, with SDPA for other calls, and as `name_over_eager`."""
    for fallback in ("sdpa", "eager"):
        registered = implementation_name(name, fallback)
        PACKED_NAMES.add(registered)
        AttentionInterface.register(registered, functools.partial(_attend, kernel, fallback))
        AttentionMaskInterface.register(registered, functools.partial(_mask, fallback))


def implementation_name(name: str, fallback: str) -> str:
    """Return the `attn_implementation` of kernel `name` with `fallback` for all other calls."""
    return f"{name}_over_eager" if fallback == "eager" else name


# Models build their masks before attention runs, and some (gpt_oss) without the position_ids that
# reveal packing, so both functions below ask for the call that runs.


_find_documents = masking_utils.find_packed_sequence_indices


@functools.wraps(_find_documents)
def _find_documents_for_mask(position_ids: Tensor) -> Tensor | None:
    # The search waits for the device.
    return None if needs_no_mask() else _find_documents(position_ids)


masking_utils.find_packed_sequence_indices = _find_documents_for_mask


def _mask(fallback: str, *args: Any, **kwargs: Any) -> Tensor | None:
    if needs_no_mask() and kwargs.get("attention_mask") is None:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[fallback](*args, **kwargs)


def _attend(
    kernel: PackedKernel,
    fallback: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    # Not every eager function of transformers takes every option: pass on only those given.
    given = {name: option for name, option in options.items() if option is not None}
    causal = given.get("is_causal", getattr(module, "is_causal", True))
    if "cu_seq_lens_q" not in given or attention_mask is not None or not causal:
        if "key_index" in given:
            raise NotImplementedError(
                f"{type(module).__name__} has a mask of its own or is not causal, and the row "
                "has shared prefixes (key_index); set prefix_sharing='off'"
            )
        others = {name: given[name] for name in given if name not in BOUNDARIES}
        native = _fallback_function(fallback, module)
        return native(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    if dropout:
        given["dropout"] = dropout
    if unknown := [argument for argument in _UNSUPPORTED if argument in given]:
        raise NotImplementedError(
            f"{type(module).__name__} passes {unknown[0]!r} to attention, which packed kernels "
            "do not compute; set attention='model'"
        )
    if query.shape[0] != 1:
        raise ValueError(
            f"a packed batch is one flat row, got {query.shape[0]} rows with cu_seq_lens_q; "
            "flatten the rows as PackedCollator does"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    kernel_options = KernelOptions(
        scale, given.get("sliding_window"), given.get("softcap"), given.get("s_aux")
    )
    keys = prefix_keys(*map(given.get, ("cu_seq_lens_k", "key_index", "max_length_k")))
    if key.shape[2] > query.shape[2]:  # a chunk of a document behind those in the cache
        keys = PrefixKeys(given["cu_seq_lens_k"], None, given.get("max_length_k"))
    # As autocast does for SDPA; it does not reach custom ops.
    dtype = value.dtype
    if torch.is_autocast_enabled(value.device.type):
        dtype = torch.get_autocast_dtype(value.device.type)
    # Norms kept in float32 (PEFT) leave query and key wider than value.
    query, key, value = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    output = kernel(
        query,
        key,
        value,
        given["cu_seq_lens_q"],
        kernel_options,
        given.get("max_length_q"),
        **({} if keys is None else {"keys": keys}),
    )
    return output.unsqueeze(0), None


def _fallback_function(fallback: str, module: nn.Module) -> Callable[..., tuple[Tensor, Any]]:
    if fallback != "eager":
        return ALL_ATTENTION_FUNCTIONS[fallback]
    # Eager attention is a function of the model's file, passed to the interface as its default.
    for cls in type(module).__mro__:
        if function := getattr(sys.modules[cls.__module__], "eager_attention_forward", None):
            return function
    raise NotImplementedError(
        f"{type(module).__name__} has no eager attention; load it with attn_implementation='sdpa'"
    )
