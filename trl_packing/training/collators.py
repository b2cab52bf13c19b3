"""Collators of a run: packed rows, and padded rows where logits are requested.

training, evaluation          one flat row of documents          PackedCollator
training with a budget        the same, and parts of it          DividedCollator
evaluation that asks logits   a padded row for each document     TRL's, with weights
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from accelerate.logging import get_logger

from trl_packing.attention.backends import PADDED
from trl_packing.attention.ranks import gather_objects
from trl_packing.documents.host_row import PackedBatch, host_row
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.packing.bins import pack
from trl_packing.packing.collator import PackedCollator, StaticShapes, WeightedPaddedCollator
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.run import Run

logger = get_logger(__name__)


@dataclass(eq=False)
class RunCollators:
    """Makes the collators of a run.

    Attributes:
        packed: makes the rows of training.
        padded: TRL's collator.
    """

    run: Run
    guard: IsolationGuard
    packed: PackedCollator
    padded: Any
    _shares_in_evaluation: bool = False

    @classmethod
    def of(cls, run: Run, guard: IsolationGuard, given: PackedCollator, padded: Any) -> Self:
        """Return the collators of a run whose rows a user's collator makes, or a default one.

        Raises:
            ValueError: the collator has another `loss_weighting` than the config, shares prefixes
                although the config does not, or makes rows that cannot be divided.
        """
        weighting = run.options.loss_weighting
        shares = given.shares_prefixes and run.options.prefix_sharing == "off"
        if shares or given.loss_weighting not in ("token", weighting):
            raise ValueError(
                f"the data_collator has loss_weighting={given.loss_weighting!r} and shares_prefixes"
                f"={given.shares_prefixes}; set loss_weighting and prefix_sharing in the config"
            )
        # No prefixes are shared until `PrefixSharing` has decided.
        packed = given.replaced(loss_weighting=weighting, tensors_only=True, shares_prefixes=False)
        made = cls(run, guard, packed, padded)
        size = run.options.sequence_parallel_size
        packed.share = (run.args.process_index % size, size)
        if size > 1:
            packed.pad_to_multiple_of = math.lcm(packed.pad_to_multiple_of or 1, size)
        for name, default in (("sequence_parallel_size", 1), ("max_tokens_in_memory", None)):
            value = getattr(run.options, name)
            if value != default and not made.makes_rows_unchanged:
                raise ValueError(
                    f"{name}={value} divides rows as PackedCollator makes them, and "
                    f"{type(packed).__name__} changes them; leave one of the two out"
                )
        return made

    def for_evaluation(self, *, padded: bool) -> Any:
        """Return the collator of an evaluation; `padded`: of one row for each document."""
        if padded:
            if self.packed.images is not None:
                raise ValueError(
                    "a run that packs images has no padded rows, whose logits compute_metrics and "
                    "predict() get; set prediction_loss_only=True, or use TRL's SFTTrainer"
                )
            return WeightedPaddedCollator(self.padded, self.run.options.loss_weighting)
        if self.packed.static_shapes is None:
            return self.packed.replaced(shares_prefixes=self._shares_in_evaluation)
        shapes = self._shapes(self.run.args.eval_batch_size) if self.run.eval_packing else None
        return self.packed.replaced(static_shapes=shapes)

    def for_probes(self) -> PackedCollator:
        """Return the collator of the isolation check: probes fill one bin or two."""
        shapes = self.packed.static_shapes and self._shapes(1)
        # `PrefixSharing` has a check of its own.
        return self.packed.replaced(static_shapes=shapes, shares_prefixes=False)

    @property
    def makes_rows_unchanged(self) -> bool:
        """Whether no class of a user changes the rows."""
        return type(self.packed).__call__ is PackedCollator.__call__

    def share_prefixes(self, shares: bool, *, training: bool) -> None:
        """Share prefixes in rows of training, else of evaluation: a check is for one of them."""
        if not training:
            self._shares_in_evaluation = shares
        if training or not self.makes_rows_unchanged:
            # In place, because the data loader already holds the collator.
            self.packed.shares_prefixes = shares

    def hold_shapes(self, bins: int, sampler: PackedBatchSampler | None) -> None:
        """Give every training micro-batch of `bins` bins one shape, if the config asks for it.

        `sampler` knows their documents; None of a stream, and of rows that were packed before.
        """
        if not self.run.options.static_shapes:
            return
        # In place, as the trainer and its data loader hold the collator.
        self.packed.static_shapes = self._shapes(bins, sampler)
        self.drop_shapes_of_padded_rows()

    def _shapes(self, bins: int, sampler: PackedBatchSampler | None = None) -> StaticShapes:
        """Return the one shape of all micro-batches of `bins` bins, which `sampler` may know."""
        longest = self.run.args.max_length
        most = None
        if sampler is not None:
            longest = int(sampler.lengths.max())
            most = max(map(len, sampler.micro_batches()))
        num_tokens = self.run.tokens_of_bins(bins)
        return StaticShapes.for_model(self.guard.base_model, num_tokens, longest, most)

    def drop_shapes_of_padded_rows(self) -> None:
        """Hold no shape where the attention in use pads rows: their shapes follow the documents."""
        if self.packed.static_shapes is not None and self.guard.attention.backend in PADDED:
            logger.warning_once(
                f"static_shapes=True does nothing here: {type(self.guard.base_model).__name__} "
                f"runs by {self.guard.attention}"
            )
            self.packed.static_shapes = None


Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any]]


@dataclass(frozen=True)
class DividedCollator:
    """Make packed rows, and the parts of a row that has more than `max_tokens`.

        a micro-batch      [ a a a a | b b | c c c | d ]          10 tokens
        a budget of 6      [ a a a a | b b ] [ c c c | d ]        two forwards, one share of a step

    Ranks run equally many parts, because some gather weights in every forward: a rank with fewer
    adds rows with a masked token. The loss of a part is divided by the tokens of the step, so parts
    change no loss. A document with more tokens is a part of its own. verl calls this dynamic batch
    size.
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
