"""Counts the floating-point operations of a row on a model.

    matrices      2 × weights per token forward, and as many for the gradients of the input and of
                  the weights: 6 N in total, for N weights in all matrices that multiply a token
    attention     2 × 2 × heads × head_dim × pairs forward, twice that backward; a pair is a query
                  and a key that it sees: len · (len + 1) / 2 per document, fewer with a window;
                  a token that documents share, and its pairs, count once

This is the formula of PaLM (https://arxiv.org/abs/2204.02311, appendix B: 6 N + 12 · layers · heads
· head_dim · T per token) with three differences, each of which makes the number smaller:

- embeddings are looked up, not multiplied, and the head multiplies only trained positions;
- T is the length of a document, not of the row;
- the half of attention that causality masks is not counted.

Recomputation (gradient checkpointing) and padding are not counted. A frozen weight (LoRA) has no
gradient and counts 4. Layers before the first trained weight, in the order in which modules are
registered, need only a forward and count 2. In a mixture of experts, a token passes through
`num_experts_per_tok` of them. Only plain decoders (attention and linear layers) are counted.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from trl_packing.attention.model_facts import (
    EXPERT_COUNTS,
    layer_config,
    layer_values,
    text_config,
    unwrap_peft,
)


class NotCountable(ValueError):
    """The operations of a model cannot be counted, for the reason in the message."""


@dataclass(frozen=True)
class ModelFlops:
    """Floating-point operations of a model, forward and backward.

    Attributes:
        per_token: operations of all matrices except the head, per token.
        per_target: operations of the head, per trained token.
        per_pair: operations of attention per pair of query and key, summed over layers, by the
            layers' window in tokens (None: no window).
    """

    per_token: float
    per_target: float
    per_pair: dict[int | None, float]

    def of(self, lengths: np.ndarray, num_targets: int, keys: np.ndarray | None = None) -> float:
        """Return the operations of a row.

        Args:
            lengths: tokens of each document, or of each segment of a row with shared prefixes,
                ``(S,)``.
            num_targets: trained positions of the row.
            keys: tokens that each segment sees, ``(S,)``, its own last; None where these are all.
        """
        lengths = lengths.astype(np.float64)
        keys = lengths if keys is None else keys.astype(np.float64)
        attention = sum(
            flops * float((_pairs(keys, window) - _pairs(keys - lengths, window)).sum())
            for window, flops in self.per_pair.items()
        )
        return self.per_token * float(lengths.sum()) + self.per_target * num_targets + attention


def _pairs(lengths: np.ndarray, window: int | None) -> np.ndarray:
    """Return the number of pairs of a query and a visible key in each document, ``(N,)``.

    Examples:
        >>> _pairs(np.array([4.0, 2.0]), None).tolist(), _pairs(np.array([4.0, 2.0]), 2).tolist()
        ([10.0, 3.0], [7.0, 3.0])
    """
    seen = lengths if window is None else np.minimum(lengths, window)
    return lengths * seen - seen * (seen - 1) / 2


def model_flops(model: Any) -> ModelFlops:
    """Return the operations of a transformers decoder, with or without PEFT's LoRA adapters.

    Raises:
        NotCountable: the model has other adapters, a vision tower, recurrence, layers of other
            kinds, or an unknown number of experts.
    """
    adapters = (getattr(model, "peft_config", None) or {}).values()
    kinds = [str(getattr(adapter.peft_type, "value", adapter.peft_type)) for adapter in adapters]
    if kinds not in ([], ["LORA"]):
        raise NotCountable(f"adapters of other kinds than one LoRA ({', '.join(kinds)})")
    base = unwrap_peft(model)
    config, head = base.config, base.get_output_embeddings()
    is_more = hasattr(config, "vision_config") or getattr(config, "is_encoder_decoder", False)
    if is_more or text_config(base) is not config or head is None:
        raise NotCountable("the model is more than a decoder of text with a head that is a matrix")
    share, of_head = _share_of_experts(config), set(head.modules())
    per_token = per_target = 0.0
    per_pair: Counter[int | None] = Counter()
    num_layers, has_experts, gradient_flows = 0, False, False
    for name, module in base.named_modules():
        # Forward, gradients of the input, gradients of the weights.
        trains = any(p.requires_grad for p in module.parameters(recurse=False))
        passes, gradient_flows = 1 + trains + gradient_flows, gradient_flows or trains
        weights, is_expert = _weights(name, module)
        has_experts |= is_expert
        if is_expert and share is None:
            raise NotCountable(f"the config does not say how many experts {name} uses of a token")
        operations = 2 * passes * weights * (share if is_expert and share else 1.0)
        per_target += operations if module in of_head else 0.0
        per_token += 0.0 if module in of_head else operations
        has_heads = hasattr(module, "head_dim") or hasattr(module, "qk_head_dim")
        if has_heads and hasattr(module, "layer_idx"):
            # Both products of attention multiply two activations, and both need a gradient.
            trains = passes > 1 or any(p.requires_grad for p in module.parameters())
            per_pair[_window(config, module.layer_idx)] += (3 if trains else 1) * _per_pair(module)
            num_layers += 1
    if num_layers != getattr(config, "num_hidden_layers", None):
        raise NotCountable(f"{num_layers} layers have attention of a known form, not all")
    if share is not None and not has_experts:
        raise NotCountable("the config names experts, but the model has no weights of that form")
    return ModelFlops(per_token, per_target, dict(per_pair))


def _weights(name: str, module: Any) -> tuple[int, bool]:
    """Return the number of weights in the matrices of one module, and whether it holds experts."""
    # PEFT's wrapper of a matrix multiplies nothing, nor what it keeps of a module that it saves.
    is_kept = ".original_module" in f".{name}" or hasattr(module, "base_layer")
    if is_kept or isinstance(module, nn.Embedding):
        return 0, False
    # The shape of the parameter may differ: quantized to 4 bits, or sharded (ZeRO-3).
    rows = getattr(module, "in_features", getattr(module, "nx", None))  # nx: Conv1D of GPT-2
    columns = getattr(module, "out_features", getattr(module, "nf", None))
    if isinstance(rows, int) and isinstance(columns, int):
        return rows * columns, bool(re.search(r"experts\.\d+\.", name))
    shapes = [
        tuple(getattr(p, "ds_shape", p.shape))
        for parameter, p in module.named_parameters(recurse=False)
        if "bias" not in parameter
    ]
    matrices = [shape for shape in shapes if len(shape) > 1]
    kind = type(module).__name__
    is_expert = kind.endswith("Experts") and all(len(shape) == 3 for shape in matrices)
    if matrices and not (is_expert or kind.endswith("Router")):
        raise NotCountable(f"{name} ({kind}) holds weights of an unknown use")
    return sum(int(np.prod(shape)) for shape in matrices), is_expert and bool(matrices)


def _share_of_experts(config: Any) -> float | None:
    numbers = {n for name in EXPERT_COUNTS for n in layer_values(config, name) if n}
    used = set(layer_values(config, "num_experts_per_tok", "top_k_experts"))
    if not numbers or getattr(config, "enable_moe_block", True) is False:  # gemma4
        return None
    if len(numbers) > 1 or len(used) != 1:
        raise NotCountable("the config does not say how many experts a token meets in every layer")
    return used.pop() / numbers.pop()


def _per_pair(attention: Any) -> int:
    """Return the operations of one layer for a pair of query and key, in the forward."""
    key_dim = getattr(attention, "qk_head_dim", None) or attention.head_dim
    value_dim = getattr(attention, "v_head_dim", key_dim)  # latent attention
    names = ("o_proj", "c_proj", "dense", "out_proj")
    output = next((getattr(attention, n) for n in names if hasattr(attention, n)), None)
    width = getattr(output, "in_features", getattr(output, "nx", None))
    if not width or width % value_dim:
        raise NotCountable(f"attention of layer {attention.layer_idx} has unexpected heads")
    return 2 * width // value_dim * (key_dim + value_dim)


def _window(config: Any, layer: int) -> int | None:
    """Return the window of a layer in tokens, None without one."""
    of_layer = layer_config(config, layer)
    types = getattr(of_layer, "layer_types", None)
    kind = "sliding_attention" if types is None else types[layer]
    if kind not in ("full_attention", "sliding_attention"):
        raise NotCountable(f"layer {layer} is {kind!r}")
    return getattr(of_layer, "sliding_window", None) if kind == "sliding_attention" else None


# --- peaks of devices -----------------------------------------------------------------------------

# Dense tensor-core rates in TFLOP/s with float32 accumulation, at the boost clock and without
# sparsity, which is what PyTorch's matrix products use. A device that is not in the table has no
# peak, and thus no MFU: none is guessed from a similar name or for a slice of a device (MIG).
# Sources: NVIDIA's data sheet of each product (https://www.nvidia.com/en-us/data-center/...), or
# appendix A of the GA102 and Ada whitepapers for RTX cards. The first pattern that matches counts.
_DTYPES = ("bfloat16", "float16", "tf32", "float32")
_PEAKS: tuple[tuple[str, tuple[float | None, ...]], ...] = (
    (r"NVIDIA B200\b", (2250, 2250, None, None)),  # a DGX B200 has eight
    (r"NVIDIA H(200|100) NVL", (835, 835, 417, 60)),
    (r"NVIDIA H100 PCIe", (756, 756, 378, 51)),
    (r"NVIDIA (H200|H100 80GB HBM3)$", (989, 989, 494, 67)),
    (r"A100(-SXM4|-PCIE)-\d+GB$|A100 80GB PCIe$", (312, 312, 156, 19.5)),
    (r"NVIDIA L40S$", (362, 362, 183, 91.6)),
    (r"NVIDIA L40$", (181, 181, 90.5, 90.5)),
    (r"NVIDIA L4$", (121, 121, 60, 30.3)),
    (r"NVIDIA A10$", (125, 125, 62.5, 31.2)),
    (r"NVIDIA A40$", (149.7, 149.7, 74.8, 37.4)),
    (r"Tesla T4$", (None, 65, None, 8.1)),
    (r"Tesla V100S-PCIE", (None, 130, None, 16.4)),
    (r"Tesla V100-SXM2", (None, 125, None, 15.7)),
    (r"Tesla V100-PCIE", (None, 112, None, 14)),
    (r"GeForce RTX 4090$", (165.2, 165.2, 82.6, 82.6)),
    (r"GeForce RTX 3090$", (71, 71, 35.6, 35.6)),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak of a device in FLOP/s, None if it is not known.

    Args:
        device_name: name from `torch.cuda.get_device_name`.
        dtype: type in which matrix products are computed: ``"bfloat16"``, ``"float16"``,
            ``"tf32"`` or ``"float32"``.

    Example:
        >>> peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
        312000000000000.0
        >>> peak_flops("NVIDIA A10G", "bfloat16") is None
        True
    """
    found = (peaks for pattern, peaks in _PEAKS if re.search(pattern, device_name))
    peaks = None if "MIG" in device_name else next(found, None)
    tera = peaks[_DTYPES.index(dtype)] if peaks else None
    return None if tera is None else tera * 1e12
