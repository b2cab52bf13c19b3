"""isolation.measure"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.install import use_native_attention
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS
from trl_packing.isolation.probes import SHORT, Probe
from trl_packing.models.introspection import requires
from trl_packing.models.state import restore_state
from trl_packing.packing.collator import PackedCollator

NOISE_FACTOR = 4.0

# Positions of B that are compared: its first ones, where a leak is strongest, and its last ones.
_POSITIONS = 32


class Stage(Enum):
    """What was running when an exception was raised in a check."""

    PACKED = "packed row"
    ALONE = "document alone"  # in an ordinary row
    COLLATOR = "collator"


@contextmanager
def _at(stage: Stage) -> Iterator[None]:
    """Note on an exception at which stage it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(f"isolation check: {stage.value}")
        raise


# --- measuring --------------------------------------------------------------------------------
class _Measured(NamedTuple):
    alone: list[Tensor]  # as the model runs without packing, in layouts that cannot matter
    packed: list[Tensor]
    contaminated: list[Tensor]


def _run(
    model: nn.Module, inner: nn.Module, probe: Probe, fused_head: bool, collate: PackedCollator
) -> _Measured:
    """Run every layout of a probe; each result is ``(positions of B, values)`` float32."""
    document = probe.document
    # Counted from the end, where B is: prompt-learning wrappers put tokens in front.
    rows = _compared_positions(len(document)) - len(document)

    def alone(ids: Tensor, **batch: Any) -> Tensor:
        # Some ropes remember the longest document that they have seen.
        with _at(Stage.ALONE), restore_state(inner), use_native_attention(inner):
            logits = _logits_at(model, inner, _ordinary_batch(inner, ids, **batch), rows)
        return _log_probs_and_entropy(logits, document[rows + 1]) if fused_head else logits

    def packed(*documents: np.ndarray) -> Tensor:
        with restore_state(inner):
            return _packed(*documents)

    def _packed(*documents: np.ndarray) -> Tensor:
        batch = _packed_batch(inner, collate, [{"input_ids": d} for d in documents])
        labels = batch.pop("labels")
        here = rows - (labels.shape[1] - sum(map(len, documents)))  # before a tail of padding
        if not fused_head:
            return _logits_at(model, inner, batch, here)
        chosen = torch.zeros_like(labels, dtype=torch.bool)
        chosen[:, here + 1] = True
        output = model(
            **batch, labels=labels.masked_fill(~chosen, IGNORE_INDEX), fused_lm_head=True
        )
        return torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()

    if fused_head:
        rows = rows[rows < -1]  # the last position of B predicts nothing
    ids = torch.from_numpy(document)[None]
    layouts = [alone(ids)]
    with rounded_otherwise(inner):
        layouts.append(alone(ids))
    if probe.name == SHORT:
        layouts.append(alone(ids.repeat(2, 1)))
        layouts.append(alone(ids, attention_mask=torch.ones_like(ids)))
    return _Measured(
        alone=layouts,
        packed=[packed(*before, document) for before in probe.before],
        contaminated=[
            packed(np.concatenate([*before, document])[-probe.room :])
            for before in probe.before[: 2 if probe.name == SHORT else 1]
        ],
    )


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Move every output of a module without children up or down by what summing it may round.

    Rounding grows with depth, and where it flips an expert's routing it is as large as a leak: the
    model itself shows how far another order of summation may take it.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or not output.is_floating_point():
            return None
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        up = torch.rand(output.shape, generator=generator, device=device) < 0.5
        # A row of another length is summed in another order: n float32 terms, then one rounding.
        terms = getattr(module, "in_features", 1)
        step = max(torch.finfo(output.dtype).eps / 2, terms**0.5 * torch.finfo(torch.float32).eps)
        return output * (1 - step + 2 * step * up).to(output.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(move).remove)
        yield


def _ordinary_batch(model: nn.Module, ids: Tensor, **others: Any) -> dict[str, Any]:
    """Return a batch that knows nothing of packing: rows of `ids`, one document each."""
    batch = {"input_ids": ids, "use_cache": False, **others}
    if requires(model, "position_ids"):
        batch["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
    return _on(model, batch)


def _packed_batch(
    model: nn.Module, collate: PackedCollator, documents: list[dict[str, np.ndarray]]
) -> dict[str, Any]:
    with _at(Stage.COLLATOR):
        batch = collate(documents)
    batch.pop(TOKEN_WEIGHTS, None)  # for the loss, not for the model
    return _on(model, for_kernels(batch))


def _on(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _log_probs_and_entropy(logits: Tensor, targets: np.ndarray) -> Tensor:
    log_probs = logits.log_softmax(-1)
    at_target = log_probs.gather(-1, torch.from_numpy(targets).to(logits.device)[:, None])[:, 0]
    return torch.stack([at_target, -(log_probs.exp() * log_probs).sum(-1)], -1)


def _compared_positions(length: int) -> np.ndarray:
    positions = np.arange(length)
    if length <= 2 * _POSITIONS:
        return positions
    return np.concatenate([positions[:_POSITIONS], positions[-_POSITIONS:]])


def _logits_at(model: nn.Module, inner: Any, batch: dict[str, Any], rows: np.ndarray) -> Tensor:
    """Return the first row's logits at positions `rows` (negative), computing no others."""
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    kept = False

    def keep(_module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        nonlocal kept
        if inputs and torch.is_tensor(inputs[0]) and inputs[0].dim() == 3:
            kept = True
            return (inputs[0][:, rows], *inputs[1:])
        return None

    with ExitStack() as stack:
        if isinstance(head, nn.Module):
            stack.callback(head.register_forward_pre_hook(keep).remove)
        output = model(**batch)
    logits = output if torch.is_tensor(output) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return (logits if kept else logits[:, rows])[0].float()


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- where a leak shows, and what it does to the gradients ------------------------------------
def _first_leaking_layer(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> str:
    """Return the name of the first layer whose output for B differs beyond rounding, or ""."""
    ids = torch.from_numpy(probe.document)[None]
    ordinary = _ordinary_batch(inner, ids)
    with use_native_attention(inner):
        alone = _layer_outputs(model, inner, ordinary)
        with rounded_otherwise(inner):
            rounded = _layer_outputs(model, inner, ordinary)
    batch = _packed_batch(
        inner, collate, [{"input_ids": d} for d in (*probe.before[0], probe.document)]
    )
    size = len(probe.document)
    end = sum(map(len, probe.before[0])) + size
    tail = batch.pop("labels").shape[1] - end
    packed = _layer_outputs(model, inner, batch)
    for name, expected in alone.items():
        found = packed.get(name)
        if found is None or found.shape[1] < end:
            continue  # not run as one row
        # From the end: the virtual tokens of prompt tuning stand in front.
        at = found.shape[1] - tail - size
        difference = _distance(found[:, at : at + size], expected[:, -size:])
        if not difference <= NOISE_FACTOR * max(_distance(rounded[name], expected), 1e-6):
            return name
    return ""


def _layer_outputs(model: nn.Module, inner: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return what each of the model's layers puts out, ``(rows, T, hidden)`` float32, by name."""
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


def _gradient_difference(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> float:
    """Return how far the gradients of B's loss are apart, packed and alone, relatively."""
    before = [{"input_ids": d, "labels": np.full_like(d, IGNORE_INDEX)} for d in probe.before[0]]
    packed = _packed_batch(inner, collate, [*before, {"input_ids": probe.document}])
    alone = _ordinary_batch(inner, torch.from_numpy(probe.document)[None])
    with use_native_attention(inner):
        expected = _loss_gradients(model, inner, alone, alone["input_ids"])
    found = _loss_gradients(model, inner, packed, packed.pop("labels"))
    largest = max((float(g.abs().max()) for g in expected if g is not None), default=0.0)
    apart = [
        _distance(e, torch.zeros_like(e) if f is None else f)
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
        mean = nn.functional.cross_entropy(
            logits[0, :-1].float(), labels[0, 1:], ignore_index=IGNORE_INDEX
        )
    return list(torch.autograd.grad(mean, trained, allow_unused=True))
