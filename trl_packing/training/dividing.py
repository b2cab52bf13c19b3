"""A budget of tokens for micro-batches: one with more runs in parts, within the same step.

    a micro-batch      [ a a a a | b b | c c c | d ]          10 tokens
    a budget of 6      [ a a a a | b b ] [ c c c | d ]        two forwards, one share of the step

Ranks run equally many parts, because some gather weights in every forward: a rank with fewer adds
rows with a masked token. The loss of a part is divided by the tokens of the step, so parts change
no loss. verl calls this dynamic batch size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate import Accelerator

from trl_packing.attention.ranks import gather_objects
from trl_packing.documents.host_row import PackedBatch, host_row
from trl_packing.packing.bins import pack

Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class DividedCollator:
    """Make packed rows, and the parts of a row that has more than `max_tokens`.

    A document with more of them is a part of its own.
    """

    collate: Collator
    max_tokens: int

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return the row of `documents`; its `parts` are rows of some of them each."""
        whole = self.collate(documents)
        lengths = np.array([len(document["input_ids"]) for document in documents], np.int64)
        if len(documents) < 2 or lengths.sum() <= self.max_tokens:
            return whole
        parts = []
        for part in pack(np.minimum(lengths, self.max_tokens), self.max_tokens):
            row = self.collate([documents[i] for i in part])
            parts.append(PackedBatch(row, host_row(row)))
        return PackedBatch(whole, host_row(whole), parts)

    def divide_alike(self, batches: Sequence[PackedBatch], device: Any) -> None:
        """Give each micro-batch of a step as many parts as it has on the rank with most of them."""
        counts = [max(len(batch.parts), 1) for batch in batches]
        most = np.max(gather_objects(counts), axis=0)
        for batch, count, wanted in zip(batches, counts, most.tolist(), strict=True):
            if wanted > count:
                masked = PackedBatch(self.collate([])).to(device)
                batch.parts = [*(batch.parts or [batch]), *[masked] * (wanted - count)]


def parts_of(batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a micro-batch, which run one after another."""
    return list(getattr(batch, "parts", ())) or [batch]


@contextmanager
def without_sync(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Let a backward add to the gradients of this rank alone: another one of its step follows."""
    state = accelerator.gradient_state
    if not state.sync_gradients:  # the caller does so already
        yield
        return
    state._set_sync_gradients(False)  # where DeepSpeed would take an optimizer step
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)
