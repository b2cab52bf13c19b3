"""Runs the documents of a packed call as rows of padded batches: exact on any model, but slower.

For models that cannot keep documents apart in one row (recurrent ones, ALiBi, prompt tuning). The
caller sees a packed batch; inside, documents of similar length share a padded forward, of at most
as many cells as the row has tokens, and at most one in eight of them padding:

    flat row   [a a a a a | b b | c c c c]     one batch, one loss, one backward
    forwards   [a a a a a]  [b b]
               [c c c c .]
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from trl_packing.attention import neftune
from trl_packing.attention.calls import (
    Call,
    Forward,
    other_rows,
    tokens_of,
    wrap_packed_calls,
)
from trl_packing.attention.model_facts import (
    checkpointed_layers,
    invokes_adapter,
    requires,
    temporarily,
    unwrap_peft,
    without_checkpointing,
)
from trl_packing.attention.ranks import all_reduce_max, is_alone, is_sharded
from trl_packing.documents.host_row import (
    BOUNDARIES,
    cache_values,
    host_boundaries,
    is_trained,
    to_device,
)
from trl_packing.documents.labels import IGNORE_INDEX

NAME = "padded"
EQUAL_LENGTHS = "equal_lengths"  # the same without padding

_MOST_PADDING = 1 / 8


def pad_packed_calls(model: nn.Module, backend: str, thresholds: Sequence[int] = ()) -> None:
    """Run packed calls of `model`, whole or a backbone, by forwards of `group_documents`."""
    keeps_position_ids = requires(model, "position_ids")

    def run_padded(module: nn.Module, forward: Forward, kwargs: Call) -> Any:
        boundaries = host_boundaries(kwargs["cu_seq_lens_q"])
        batch = {k: v for k, v in kwargs.items() if k not in BOUNDARIES}
        if keeps_position_ids:
            batch["position_ids"] = kwargs["position_ids"]
        device = tokens_of(kwargs).device
        groups = group_documents(boundaries, thresholds, backend == EQUAL_LENGTHS)
        rows = [rows_of(group, np.array(boundaries), device) for group in groups]
        # Sharded models gather weights in each forward, so all ranks must run equally many.
        is_together = not is_alone() and is_sharded(module)
        most = all_reduce_max(len(rows), device) if is_together else len(rows)
        none = np.empty(0, np.int64)
        idle = Rows(rows[-1].token, torch.zeros_like(rows[-1].is_real), none, none)
        rows += [idle] * (most - len(rows))

        def run(row: Rows) -> Any:
            _forget_longer_documents(module)
            with temporarily(neftune, row_lengths=row.is_real.sum(1)):
                return forward(**_row_batch(batch, row, boundaries[-1]))

        if invokes_adapter(module):
            run = functools.partial(_run_checkpointed_whole, module, run)
        outputs = [run(row) for row in rows]
        return _joined(outputs, rows, _weights(unwrap_peft(module), batch, rows))

    wrap_packed_calls(model, run_padded, attention=backend)


def _run_checkpointed_whole(module: nn.Module, run: Callable[[Any], Any], row: Any) -> Any:
    """Return `run(row)` with one checkpoint in place of those of layers, which aLoRA forbids."""

    def run_without() -> Any:
        # The backward runs it again, when the packed call has ended.
        with without_checkpointing(module), other_rows():
            return run(row)

    if checkpointed_layers(module) and module.training and torch.is_grad_enabled():
        return checkpoint(run_without, use_reentrant=False)
    return run_without()


def group_documents(
    boundaries: Sequence[int], thresholds: Sequence[int] = (), equal_lengths: bool = False
) -> Iterator[list[int]]:
    """Yield the document indices of each padded forward, the longest document first.

    `boundaries` are ``(N + 1,)``. Documents on both sides of one of `thresholds`, in tokens, never
    share a forward, and with `equal_lengths` only documents of one length do.

    Examples:
        >>> list(group_documents([0, 8, 10, 18, 25]))
        [[0, 2, 3], [1]]
    """
    lengths = [end - start for start, end in pairwise(boundaries)]
    group: list[int] = []
    tokens = 0
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        length = lengths[document]
        if not length:  # empty documents, which pad cu_seqlens
            break
        if group:
            longest = lengths[group[0]]
            cells = longest * (len(group) + 1)
            apart = any(length <= t < longest for t in thresholds)
            padding = cells - tokens - length
            wasteful = padding > _MOST_PADDING * cells or cells > boundaries[-1]
            if apart or wasteful or (equal_lengths and padding):
                yield group
                group = []
                tokens = 0
        group.append(document)
        tokens += length
    yield group


def _forget_longer_documents(model: nn.Module) -> None:
    """Reset dynamic NTK to its original frequencies; it keeps those of the longest row so far."""
    for module in model.modules():
        if getattr(module, "max_seq_len_cached", 0) <= getattr(module, "original_max_seq_len", 0):
            continue
        for name, original in [*vars(module).items(), *module.named_buffers(recurse=False)]:
            if name.endswith("original_inv_freq") and torch.is_tensor(original):
                current = name.replace("original_inv_freq", "inv_freq")
                device = getattr(module, current).device
                module.register_buffer(current, original.to(device).clone(), persistent=False)
                cached = name.replace("original_inv_freq", "max_seq_len_cached")
                setattr(module, cached, module.original_max_seq_len)


class Rows(NamedTuple):
    """Cells ``(rows, longest)`` of a padded forward, and their tokens in the packed row.

    `token` is the token of each cell; padding repeats the last of its row. `real` are the flat
    indices of cells that are not padding, and `real_tokens` their tokens, on the CPU.
    """

    token: Tensor
    is_real: Tensor
    real: np.ndarray
    real_tokens: np.ndarray


def rows_of(group: list[int], boundaries: np.ndarray, device: torch.device | None) -> Rows:
    """Return the documents of a group as rows, the longest first, their tensors on `device`."""
    starts = boundaries[:-1][group, None]
    ends = boundaries[1:][group, None]
    token = starts + np.arange((ends - starts).max())
    is_real = token < ends
    token = np.minimum(token, ends - 1)
    real = np.flatnonzero(is_real)
    return Rows(to_device(token, device), to_device(is_real, device), real, token.ravel()[real])


def _row_batch(batch: Call, rows: Rows, num_tokens: int) -> Call:
    made = {
        name: value[0][rows.token]
        if torch.is_tensor(value) and value.shape[:2] == (1, num_tokens)
        else value
        for name, value in batch.items()
    }
    if made.get("labels") is not None:
        made["labels"] = made["labels"].masked_fill(~rows.is_real, IGNORE_INDEX)
        cache_values(made["labels"], _is_trained(batch["labels"], rows))
    if 0 < len(rows.real) < rows.token.numel():  # a forward without documents hides no cell
        made["attention_mask"] = rows.is_real.long()
    return made


def _is_trained(labels: Tensor, row: Rows) -> np.ndarray:
    """Return True on cells that are trained targets, ``(rows, longest)`` bool."""
    found = np.zeros(row.token.shape, bool)
    found.ravel()[row.real] = is_trained(labels)[0][row.real_tokens]
    return found


def _joined(outputs: list[Any], rows: list[Rows], weights: list[float]) -> Any:
    """Return the outputs of all forwards as one, with values in the order of the packed row."""
    first = outputs[0]
    if torch.is_tensor(first) and first.dim() == 0:
        # A sum of losses, of which those of forwards of weight 0 may not be finite.
        losses = [loss * weight for loss, weight in zip(outputs, weights, strict=True) if weight]
        return torch.stack(losses).sum() if losses else first * 0
    if torch.is_tensor(first):
        return _joined_tensor(outputs, rows)
    if isinstance(first, tuple):
        return tuple(_joined(list(parts), rows, weights) for parts in zip(*outputs, strict=True))
    if not is_dataclass(first):  # no caches and states of single forwards
        return first if isinstance(first, (bool, int, str)) else None
    if len(outputs) > 1 and getattr(first, "aux_loss", None) is not None:
        raise NotImplementedError(
            "the balance of experts is not the mean over padded forwards; router_aux_loss_coef=0.0"
        )
    joined = {}
    for field in fields(first):
        values = [getattr(output, field.name) for output in outputs]
        joined[field.name] = _joined(values, rows, weights)
    make = first.__class__
    return make(**joined)


def _joined_tensor(parts: list[Tensor], rows: list[Rows]) -> Tensor | None:
    shapes = [row.token.shape for row in rows]
    if shapes[0].numel() == 1:  # a masked token alone, and idle forwards
        return parts[0]
    # Router logits have rows and tokens in one dimension.
    is_flat = any(len(p) == n * longest != n for p, (n, longest) in zip(parts, shapes, strict=True))
    if is_flat:
        parts = [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]
    values = []
    is_scores = False
    for part, row, (n, longest) in zip(parts, rows, shapes, strict=True):
        if part.dim() < 2 or len(part) != n:
            return None  # a state or a cache, not values of tokens
        if part.dim() == 2 and part.shape[1] != longest:
            # Scores of next tokens, as of a fused head: none for the first token of a document.
            is_scores = True
            part = pad(part[:, part.shape[1] - longest + 1 :], (1, 0))
        if part.shape[1] < longest:
            return None
        # Slices from the end: virtual tokens come first.
        part = part[:, part.shape[1] - longest :].flatten(0, 1)
        values.append(part[to_device(row.real, part.device)])
    order = np.argsort(np.concatenate([row.real_tokens for row in rows]))
    joined = torch.cat(values)[to_device(order, parts[0].device)]
    if is_flat:
        return joined
    return joined[None, 1:] if is_scores else joined[None]


def _weights(model: Any, batch: Call, rows: list[Rows]) -> list[float]:
    """Return the weight of each forward's loss in that of the packed row."""
    labels = batch.get("labels")
    counts = [
        len(row.real) if labels is None else int(_is_trained(labels, row)[:, 1:].sum())
        for row in rows
    ]
    total = max(sum(counts), 1)
    if batch.get("num_items_in_batch") is not None and getattr(model, "accepts_loss_kwargs", True):
        return [float(count > 0) for count in counts]  # losses are sums by one divisor, not means
    return [count / total for count in counts]
