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
from collections.abc import Iterator
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

# Names in transformers of the output matrix of attention, whose width verifies the heads.
_OUTPUTS = ("o_proj", "c_proj", "dense", "out_proj")


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
    _check_adapters(model)
    base = unwrap_peft(model)
    config = base.config
    if getattr(config, "vision_config", None) is not None:
        raise NotCountable("it has a vision tower, whose operations are not counted")
    if text_config(base) is not config or getattr(config, "is_encoder_decoder", False):
        raise NotCountable("the model is more than a decoder of text")
    head = next((n for n, m in base.named_modules() if m is base.get_output_embeddings()), None)
    if head is None:
        raise NotCountable("the model has no head that is a matrix")
    share = _share_of_experts(config)
    per_token = per_target = 0.0
    for name, weights, factor in _matrices(base, share):
        if name == head or name.startswith(f"{head}."):
            per_target += factor * weights
        else:
            per_token += factor * weights
    return ModelFlops(per_token, per_target, _attention(base))


def _check_adapters(model: Any) -> None:
    adapters = getattr(model, "peft_config", None) or {}
    kinds = {str(getattr(a.peft_type, "value", a.peft_type)) for a in adapters.values()}
    if len(adapters) > 1 or kinds - {"LORA"}:
        raise NotCountable(f"adapters of other kinds than one LoRA ({', '.join(sorted(kinds))})")


def _in_order(base: nn.Module) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield name, module and number of passes: forward, gradients of input and of weights."""
    gradient_flows = False
    for name, module in base.named_modules():
        is_trained = any(p.requires_grad for p in module.parameters(recurse=False))
        yield name, module, 1 + is_trained + gradient_flows
        gradient_flows |= is_trained


def _matrices(base: nn.Module, share: float | None) -> Iterator[tuple[str, float, int]]:
    """Yield the name, weights per token and operations per weight of every matrix."""
    has_experts = False
    for name, module, passes in _in_order(base):
        if ".original_module" in f".{name}" or isinstance(module, nn.Embedding):
            continue
        weights, is_expert = _weights(name, module)
        if is_expert and share is None:
            raise NotCountable(f"the config does not say how many experts {name} uses of a token")
        has_experts |= is_expert
        if weights:
            yield name, weights * (share if is_expert and share else 1.0), 2 * passes
    if share is not None and not has_experts:
        raise NotCountable("the config names experts, but the model has no weights of that form")


def _weights(name: str, module: Any) -> tuple[int, bool]:
    """Return the number of weights in the matrices of one module, and whether it holds experts."""
    # The shape of the parameter may differ: quantized to 4 bits, or sharded (ZeRO-3).
    shape = getattr(module, "in_features", None), getattr(module, "out_features", None)
    if type(module).__name__ == "Conv1D":  # transformers' of GPT-2
        shape = module.nx, module.nf
    if isinstance(shape[0], int) and isinstance(shape[1], int):
        if hasattr(module, "base_layer"):  # PEFT's wrapper of the matrix
            return 0, False
        return shape[0] * shape[1], bool(re.search(r"experts\.\d+\.", name))
    shapes = [
        tuple(getattr(p, "ds_shape", p.shape))
        for parameter, p in module.named_parameters(recurse=False)
        if "bias" not in parameter
    ]
    matrices = [s for s in shapes if len(s) > 1]
    is_expert = type(module).__name__.endswith("Experts")
    is_router = type(module).__name__.endswith("Router")
    known = all(len(s) == 3 for s in matrices) if is_expert else is_router
    if matrices and not known:
        raise NotCountable(f"{name} ({type(module).__name__}) holds weights of an unknown use")
    return sum(int(np.prod(s)) for s in matrices), is_expert and bool(matrices)


def _share_of_experts(config: Any) -> float | None:
    numbers = {n for name in EXPERT_COUNTS for n in layer_values(config, name) if n}
    used = set(layer_values(config, "num_experts_per_tok", "top_k_experts"))
    if not numbers or getattr(config, "enable_moe_block", True) is False:  # gemma4
        return None
    if len(numbers) > 1 or len(used) != 1:
        raise NotCountable("the config does not say how many experts a token meets in every layer")
    return used.pop() / numbers.pop()


def _attention(base: Any) -> dict[int | None, float]:
    """Return the operations of attention per pair, by window."""
    config = base.config
    layers = getattr(config, "num_hidden_layers", None)
    per_pair: dict[int | None, float] = {}
    num_found = 0
    for _, found, passes in _in_order(base):
        module: Any = found
        if not hasattr(module, "layer_idx"):
            continue
        number = module.layer_idx
        if hasattr(module, "qk_head_dim") and hasattr(module, "v_head_dim"):  # latent attention
            key_dim, value_dim = module.qk_head_dim, module.v_head_dim
        elif hasattr(module, "head_dim"):
            key_dim = value_dim = module.head_dim
        else:
            continue
        num_found += 1
        output = next((getattr(module, n) for n in _OUTPUTS if hasattr(module, n)), None)
        width = getattr(output, "in_features", getattr(output, "nx", None))
        # The module knows its heads (laguna), or the config of its layer.
        of_config = getattr(layer_config(config, number), "num_attention_heads", None)
        known = (getattr(module, "num_heads", None), of_config)
        heads = next((n for n in known if isinstance(n, int)), None)
        if not heads or width != heads * value_dim:
            raise NotCountable(f"attention of layer {number} has unexpected heads")
        # Both products of attention multiply two activations, and both of these need a gradient.
        trains = passes > 1 or any(p.requires_grad for p in module.parameters())
        window = _window(layer_config(config, number), number)
        flops = (3 if trains else 1) * 2 * heads * (key_dim + value_dim)
        per_pair[window] = per_pair.get(window, 0.0) + flops
    if num_found != layers:
        raise NotCountable(f"{num_found} of {layers} layers have attention of a known form")
    return per_pair


def _window(config: Any, layer: int) -> int | None:
    """Return the window of `layer` in tokens, None without one; `config` is that of the layer."""
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if types is None:
        return window
    if types[layer] not in ("full_attention", "sliding_attention"):
        raise NotCountable(f"layer {layer} is {types[layer]!r}")
    return window if types[layer] == "sliding_attention" else None


# --- peaks of devices -----------------------------------------------------------------------------

# Dense tensor-core rates with float32 accumulation, at the boost clock and without sparsity, which
# is what PyTorch's matrix products use. A device that is not in the table has no peak, and thus no
# MFU: no peak is guessed from a similar name or for a slice of a device (MIG).

TERA = 10**12

# (pattern of the device's name, {dtype: TFLOP/s}). Sources: NVIDIA's data sheet of each product, or
# appendix A of the GA102 and Ada whitepapers for RTX cards. The first pattern that matches counts.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    # https://www.nvidia.com/en-us/data-center/dgx-b200 (a DGX has eight)
    (r"NVIDIA B200\b", {"bfloat16": 2250, "float16": 2250}),
    # https://www.nvidia.com/en-us/data-center/h200; the NVL column is the card's
    (r"NVIDIA H200 NVL", {"bfloat16": 835, "float16": 835, "tf32": 417, "float32": 60}),
    (r"NVIDIA H200$", {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/h100
    (r"NVIDIA H100 NVL", {"bfloat16": 835, "float16": 835, "tf32": 417, "float32": 60}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756, "float16": 756, "tf32": 378, "float32": 51}),
    (r"NVIDIA H100 80GB HBM3$", {"bfloat16": 989, "float16": 989, "tf32": 494, "float32": 67}),
    # https://www.nvidia.com/en-us/data-center/a100; SXM and PCIe, 40 and 80 GB
    (
        r"A100(-SXM4|-PCIE)-\d+GB$|A100 80GB PCIe$",
        {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5},
    ),
    # https://www.nvidia.com/en-us/data-center/l40s, l40, l4
    (r"NVIDIA L40S$", {"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6}),
    (r"NVIDIA L40$", {"bfloat16": 181, "float16": 181, "tf32": 90.5, "float32": 90.5}),
    (r"NVIDIA L4$", {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3}),
    # https://www.nvidia.com/en-us/data-center/products/a10-gpu, a40
    (r"NVIDIA A10$", {"bfloat16": 125, "float16": 125, "tf32": 62.5, "float32": 31.2}),
    (r"NVIDIA A40$", {"bfloat16": 149.7, "float16": 149.7, "tf32": 74.8, "float32": 37.4}),
    # https://www.nvidia.com/en-us/data-center/tesla-t4, v100; neither has bfloat16 tensor cores
    (r"Tesla T4$", {"float16": 65, "float32": 8.1}),
    (r"Tesla V100S-PCIE", {"float16": 130, "float32": 16.4}),
    (r"Tesla V100-SXM2", {"float16": 125, "float32": 15.7}),
    (r"Tesla V100-PCIE", {"float16": 112, "float32": 14}),
    (r"GeForce RTX 4090$", {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6}),
    (r"GeForce RTX 3090$", {"bfloat16": 71, "float16": 71, "tf32": 35.6, "float32": 35.6}),
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
    if "MIG" in device_name:
        return None
    for pattern, peaks in _PEAKS:
        if re.search(pattern, device_name):
            tera = peaks.get(dtype)
            return None if tera is None else float(tera * TERA)
    return None
