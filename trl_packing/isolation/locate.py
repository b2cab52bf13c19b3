"""Details of a leak: the first layer that shows it, and its effect on the gradients."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.install import use_native_attention
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.measure import (
    NOISE_FACTOR,
    collate_packed,
    largest_difference,
    ordinary_batch,
    round_differently,
)
from trl_packing.isolation.probes import Probe
from trl_packing.loss.next_token import next_token_loss
from trl_packing.models.state import restore_state
from trl_packing.packing.collator import PackedCollator


def first_leaking_layer(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> str:
    """Return the name of the first layer whose output for B differs beyond rounding, or "".

    The arguments are those of `measure_probe`.
    """
    ids = torch.from_numpy(probe.document)[None]
    ordinary = ordinary_batch(inner, ids)
    with use_native_attention(inner):
        alone = _layer_outputs(model, inner, ordinary)
        with round_differently(inner):
            rounded = _layer_outputs(model, inner, ordinary)
    batch = collate_packed(
        inner, collate, [{"input_ids": d} for d in (*probe.before[0], probe.document)]
    )
    size = len(probe.document)
    end = sum(map(len, probe.before[0])) + size
    tail = batch.pop("labels").shape[1] - end
    packed = _layer_outputs(model, inner, batch)
    for name, expected in alone.items():
        found = packed.get(name)
        if found is None or found.shape[1] < end:
            continue  # the layer does not see the row as a whole
        # Counted from the end: prompt tuning prepends virtual tokens.
        at = found.shape[1] - tail - size
        difference = largest_difference(found[:, at : at + size], expected[:, -size:])
        if not difference <= NOISE_FACTOR * max(largest_difference(rounded[name], expected), 1e-6):
            return name
    return ""


def _layer_outputs(model: nn.Module, inner: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the output of each of the model's layers, ``(rows, T, hidden)`` float32, by name."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if torch.is_tensor(hidden) and hidden.dim() == 3:
                outputs[name] = hidden.float()

        return hook

    stacks = [(n, m) for n, m in inner.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    with ExitStack() as stack, restore_state(inner):
        for name, layers in stacks[:1]:
            for number, layer in enumerate(layers):
                handle = layer.register_forward_hook(keep(f"{name}.{number}"))
                stack.callback(handle.remove)
        model(**batch)
    return outputs


def gradient_difference(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> float:
    """Return the largest difference of B's gradients, packed and alone.

    It is relative to the largest gradient. The arguments are those of `measure_probe`.
    """
    before = [{"input_ids": d, "labels": np.full_like(d, IGNORE_INDEX)} for d in probe.before[0]]
    packed = collate_packed(inner, collate, [*before, {"input_ids": probe.document}])
    alone = ordinary_batch(inner, torch.from_numpy(probe.document)[None])
    with use_native_attention(inner):
        expected = _loss_gradients(model, inner, alone, alone["input_ids"])
    found = _loss_gradients(model, inner, packed, packed.pop("labels"))
    largest = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
    apart = [
        largest_difference(e, torch.zeros_like(e) if f is None else f)
        for e, f in zip(expected, found, strict=True)
        if e is not None
    ]
    return max(apart, default=0.0) / (largest or 1.0)


@torch.enable_grad()
def _loss_gradients(
    model: nn.Module, inner: nn.Module, batch: dict[str, Any], labels: Tensor
) -> list[Tensor | None]:
    trained = [p for p in inner.parameters() if p.requires_grad]
    with restore_state(inner):
        output = model(**batch)
        logits = output if torch.is_tensor(output) else output.logits
        loss = next_token_loss(logits, labels)
    return list(torch.autograd.grad(loss, trained, allow_unused=True))
