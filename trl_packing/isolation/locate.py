"""Details of a leak: the first layer that shows it, and its effect on the gradients."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.install import use_native_attention
from trl_packing.attention.state import restore_state
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.measure import (
    NOISE_FACTOR,
    alone_batch,
    collate_packed,
    largest_difference,
    round_differently,
)
from trl_packing.isolation.probes import Probe
from trl_packing.loss.next_token import next_token_loss
from trl_packing.packing.collator import PackedCollator


def first_leaking_layer(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> str:
    """Return the name of the first layer whose output for B differs beyond rounding, or "".

    It is looked for where B is the last document of a row of text. The arguments are those of
    `measure`.
    """
    documents = probe.packed[0].documents
    if documents[-1] is not probe.document or "images" in probe.document:
        return ""
    ordinary = alone_batch(inner, collate, probe.document)
    with use_native_attention(inner):
        alone = _layer_outputs(model, inner, ordinary)
        with round_differently(inner):
            rounded = _layer_outputs(model, inner, ordinary)
    batch = collate_packed(inner, collate, documents)
    size, end = (sum(len(d["input_ids"]) for d in row) for row in (documents[-1:], documents))
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
    model: nn.Module,
    inner: nn.Module,
    probe: Probe,
    collate: PackedCollator,
    apart: Iterable[nn.Parameter] = (),
) -> float:
    """Return the largest difference of the gradients of B's loss, packed and alone.

    It is relative to the largest gradient.

    Args:
        model: the model as a training step calls it.
        inner: the model inside its wrappers.
        probe: its first row is packed, in which B alone is trained.
        collate: makes the row.
        apart: parameters that are compared relative to the largest gradient among them.
    """
    alone = alone_batch(inner, collate, probe.document)
    row = [
        d if d is probe.document else {**d, "labels": np.full_like(d["input_ids"], IGNORE_INDEX)}
        for d in probe.packed[0].documents
    ]
    packed = collate_packed(inner, collate, row)
    with use_native_attention(inner):
        expected = _loss_gradients(model, inner, alone, alone["input_ids"])
    found = _loss_gradients(model, inner, packed, packed.pop("labels"))
    ids = set(map(id, apart))
    parts = [
        [name for name, p in inner.named_parameters() if (id(p) in ids) is side]
        for side in (False, True)
    ]
    return max(_relative_difference(expected, found, part) for part in parts)


def _relative_difference(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], names: Sequence[str]
) -> float:
    """Return the largest difference of some gradients, relative to the largest of them."""
    known = [name for name in names if name in expected or name in found]
    zero = torch.zeros((), device=next(iter({**expected, **found}.values())).device)
    apart = [largest_difference(expected.get(n, zero), found.get(n, zero)) for n in known]
    largest = max((float(expected[n].abs().max()) for n in known if n in expected), default=0.0)
    return max(apart, default=0.0) / (largest or 1.0)


@torch.enable_grad()
def _loss_gradients(
    model: nn.Module, inner: nn.Module, batch: dict[str, Any], labels: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the loss by parameter; those that it does not reach are left out."""
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    with restore_state(inner):
        output = model(**batch)
        logits = output if torch.is_tensor(output) else output.logits
        loss = next_token_loss(logits, labels)
        # Inside the block, whose end writes buffers that the backward may read.
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}
