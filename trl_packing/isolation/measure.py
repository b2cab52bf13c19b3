"""The forwards that the isolation check compares: alone, packed and contaminated.

Results are logits of document B, or log-probabilities and entropies if the run uses the fused head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.install import use_native_attention
from trl_packing.attention.model_facts import requires
from trl_packing.attention.state import restore_state
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.isolation.probes import SHORT, Document, Probe, Row
from trl_packing.loss.next_token import score_targets
from trl_packing.packing.collator import PackedCollator

NOISE_FACTOR = 4.0


class Stage(Enum):
    """The part of a check in which an exception was raised."""

    PACKED = "packed row"
    ALONE = "document alone"  # in an ordinary row
    COLLATOR = "collator"
    NOT_FINITE = "not finite"  # outputs of the document alone: packing is not the cause


@contextmanager
def note_stage(stage: Stage) -> Iterator[None]:
    """Add the stage to the notes of an exception."""
    try:
        yield
    except Exception as error:
        error.add_note(f"isolation check: {stage.value}")
        raise


class Measurement(NamedTuple):
    """Results for B, ``(positions of B, values)`` float32 each, in layouts of three kinds."""

    alone: list[Tensor]  # without packing, in layouts that must not make a difference
    packed: list[Tensor]
    contaminated: list[Tensor]


def measure(
    model: nn.Module, inner: nn.Module, probe: Probe, fused_head: bool, collate: PackedCollator
) -> Measurement:
    """Run every layout of a probe.

    Args:
        model: the model as a training step calls it.
        inner: the model inside its wrappers.
        probe: the document, and its rows.
        fused_head: whether to score packed rows through TRL's fused LM head.
        collate: makes the packed rows.
    """
    ids = np.asarray(probe.document["input_ids"], np.int64)
    # The last position of B predicts nothing.
    kept = probe.at < len(ids) - 1 if fused_head else np.ones(len(probe.at), bool)
    at = probe.at[kept]

    def alone(rounded: bool = False, rows: int = 1, **others: Any) -> Tensor:
        batch = alone_batch(inner, collate, probe.document, rows, **others)
        # Some ropes remember the longest document they have seen.
        with note_stage(Stage.ALONE), restore_state(inner), use_native_attention(inner):
            outputs = logits_at(model, inner, batch, at - len(ids))
        if fused_head:
            outputs = score_logits(outputs, ids[at + 1], rounded)
        with note_stage(Stage.NOT_FINITE):
            if not bool(outputs.isfinite().all()):
                raise ValueError(
                    f"the logits of {type(inner).__name__} are not finite (NaN or infinity) for a "
                    "document alone, unpacked: it cannot be trained; check its weights, and the "
                    "dtype it is loaded in"
                )
        return outputs

    def in_row(row: Row) -> Tensor:
        return _outputs_in_row(model, inner, row.documents, row.at[kept], fused_head, collate)

    layouts = two_roundings(inner, alone)
    if probe.name == SHORT:
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        layouts += [alone(rows=2), alone(attention_mask=mask)]
    packed = [in_row(row) for row in probe.packed]
    return Measurement(layouts, packed, [in_row(row) for row in probe.contaminated])


def _outputs_in_row(
    model: nn.Module,
    inner: Any,
    documents: Sequence[Document],
    rows: np.ndarray,
    fused_head: bool,
    collate: PackedCollator,
) -> Tensor:
    """Return the outputs of a packed row at the positions `rows` ``(P,)``, float32."""
    with restore_state(inner):
        batch = collate_packed(inner, collate, documents)
        labels = batch.pop("labels")
        # From the end: prompt tuning prepends tokens, and padding may follow the documents.
        here = rows - labels.shape[1]
        if not fused_head:
            return logits_at(model, inner, batch, here)
        chosen = torch.zeros_like(labels, dtype=torch.bool)
        chosen[:, here + 1] = True
        output = model(
            **batch, labels=labels.masked_fill(~chosen, IGNORE_INDEX), fused_lm_head=True
        )
        return torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()


@contextmanager
def round_differently(model: nn.Module) -> Iterator[None]:
    """Move the outputs of modules without children up or down by a possible rounding error.

    Rounding errors grow with depth, and one that changes an expert's routing is as large as a leak.
    The model itself shows how large a difference another order of summation can make.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or not output.is_floating_point():
            return None
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        up = torch.rand(output.shape, generator=generator, device=device) < 0.5
        # Rows of another length are summed in another order: n float32 terms, then one rounding.
        terms = getattr(module, "in_features", 1)
        step = max(torch.finfo(output.dtype).eps / 2, terms**0.5 * torch.finfo(torch.float32).eps)
        return output * (1 - step + 2 * step * up).to(output.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(move).remove)
        yield


def two_roundings(model: nn.Module, run: Callable[[bool], Tensor]) -> list[Tensor]:
    """Return `run(False)`, and `run(True)` while the outputs of modules are rounded differently.

    Args:
        model: as in `round_differently`.
        run: takes whether it rounds its own scores differently, too (`score_logits`).
    """
    plain = run(False)
    with round_differently(model):
        return [plain, run(True)]


def ordinary_batch(model: nn.Module, ids: Tensor, **others: Any) -> dict[str, Any]:
    """Return a batch without packing: rows of `ids`, one document each."""
    batch = {"input_ids": ids, "use_cache": False, **others}
    if requires(model, "position_ids"):
        batch["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
    return _on(model, batch)


def alone_batch(
    model: nn.Module, collate: Any, document: Document, rows: int = 1, **others: Any
) -> dict[str, Any]:
    """Return the batch of a document without packing, as `rows` equal rows.

    With images, the model makes its positions itself.
    """
    ids = np.asarray(document["input_ids"], np.int64)
    if "images" in document:
        others |= collate.images.tensors([document], [ids])
        others.pop("position_ids", None)
        others["attention_mask"] = torch.ones(1, len(ids), dtype=torch.int64)
    return ordinary_batch(model, torch.from_numpy(ids)[None].repeat(rows, 1), **others)


def collate_packed(
    model: nn.Module, collate: PackedCollator, documents: Sequence[Document]
) -> dict[str, Any]:
    """Return a packed row of `documents` with its labels, on the device of `model`."""
    with note_stage(Stage.COLLATOR):
        batch = collate([dict(document) for document in documents])
    for name in (TOKEN_WEIGHTS, TARGET_COUNTS):  # the loss reads them, the model does not
        batch.pop(name, None)
    return _on(model, for_kernels(batch))


def _on(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def score_logits(logits: Tensor, targets: np.ndarray, rounded: bool) -> Tensor:
    """Return log-probability and entropy at each position, ``(N, 2)``.

    Args:
        logits: ``(N, vocabulary)`` float32.
        targets: token ids ``(N,)`` int64.
        rounded: move the results up or down, as if their sums over the vocabulary, of one float32
            term for each token, had run in another order. In a shallow model with a large
            vocabulary, no other rounding is as large.
    """
    log_probs, entropy, _ = score_targets(logits, torch.from_numpy(targets).to(logits.device))
    scores = torch.stack([log_probs, entropy], -1)
    if not rounded:
        return scores
    step = logits.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    up = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return scores + step * torch.where(up, 1.0, -1.0).to(scores.device)


def logits_at(model: nn.Module, inner: Any, batch: dict[str, Any], rows: np.ndarray) -> Tensor:
    """Return the first row's logits at positions `rows`, ``(len(rows), vocabulary)`` float32.

    Args:
        model: the model as a training step calls it.
        inner: the model inside its wrappers, whose LM head then scores no other positions.
        batch: the model's inputs.
        rows: negative positions, counted from the end of the row.
    """
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


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a − b|."""
    return float((a - b).abs().max())
