"""Make the `PackingReport` of a run from its documents, sampler and settings.

documents, settings, ranks  →  PackedBatchSampler  →  PackingReport
"""

from dataclasses import replace
from typing import Any

import numpy as np
from datasets import IterableDataset
from trl import SFTTrainer

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.stream import columns_kept
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS
from trl_packing.documents.weights import in_words
from trl_packing.packing.draw import LENGTH, column_of
from trl_packing.packing.epoch import padded_batch_size
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.collators import RunCollators
from trl_packing.training.columns import columns_of, documents_of
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.image_counts import ImageCounts
from trl_packing.training.mixture import Mixture
from trl_packing.training.prefix_sharing import PrefixSavings, PrefixSharing, prefix_savings
from trl_packing.training.throughput import Counts
from trl_packing.training.unplanned_report import (
    micro_batch_of_stream,
    report_of_any_sampler,
    size_in_words,
    without_plan,
)

# Steps read to find the largest micro-batch: enough for a good guess, in well under a second.
_STEPS_LOOKED_AT = 200

_DEFAULT_SAVE_STEPS = 500  # of transformers; no user has asked for it


def plan_report(
    documents: ArrowDocuments,
    sampler: PackedBatchSampler,
    *,
    attention: str | None,
    loss: str | None,
    preparation: PreparationCounts,
    prefix_sharing: str,
    tokens_per_micro_batch: int | None = None,
    given_in_steps: dict[str, int] | None = None,
    mixture: Mixture | None = None,
    order: str = "",
    packing: bool = True,
) -> PackingReport:
    """Return the report on the first epoch of `sampler`.

    Args:
        documents: the training set.
        sampler: of one rank.
        attention: what keeps documents apart, in words.
        loss: the weighting of the loss, in words.
        preparation: what was kept and lost when documents were prepared.
        prefix_sharing: of the run.
        tokens_per_micro_batch: padding included; None if micro-batches differ.
        given_in_steps: as `settings_in_steps` returns it.
        mixture: of the training set; None if its sources are not known.
        order: of the documents, as `order_in_words` returns it.
        packing: the run packs documents into bins.
    """
    plan = sampler.plan()
    ranks, accumulation, size = sampler.num_ranks, sampler.accumulation, sampler.bins_per_batch
    steps = -(-len(sampler) // accumulation)
    lengths, trained = documents.lengths(), documents.num_trained()
    drawn = slice(None) if sampler.draw is None else sampler.draw.documents(0)
    number = documents.num_documents if sampler.draw is None else sampler.num_drawn
    of_padded = padded_batch_size(size, packing=packing) * accumulation * ranks
    return PackingReport(
        ranks=ranks,
        accumulation=accumulation,
        micro_batch=_micro_batch_words(sampler),
        attention=attention,
        capacity=sampler.capacity,
        documents=number,
        tokens=int(lengths[drawn].sum()),
        trained_tokens=int(trained[drawn].sum()),
        bins=sampler.num_bins,
        micro_batches_per_epoch=len(sampler) * ranks,
        steps_per_epoch=steps,
        documents_per_step=number / steps,
        padded_documents_per_step=None if sampler.rows else of_padded,
        largest_micro_batch=_largest_micro_batch(sampler),
        loss=loss,
        tokens_per_micro_batch=tokens_per_micro_batch,
        preparation=preparation,
        given_in_steps=given_in_steps or {},
        room=sampler.tokens_per_batch,
        tokens_computed=None if sampler.groups is None or plan is None else int(plan.tokens.sum()),
        sources=() if mixture is None else mixture.shares(lengths, trained),
        documents_in_data=None if sampler.draw is None else len(documents),
        order=order,
        images=ImageCounts.of(sampler),
        prefixes=None
        if tokens_per_micro_batch or IMAGE_IDS in documents.columns  # equal ids, other images
        else prefix_savings(documents, sampler, prefix_sharing),
    )


def settings_in_steps(args: Any) -> dict[str, int]:
    """Return the settings of `args` that a user has given as a number of optimizer steps."""
    given = {"max_steps": args.max_steps, "warmup_steps": args.warmup_steps}
    if args.eval_strategy == "steps":
        given["eval_steps"] = args.eval_steps
    if args.save_strategy == "steps" and args.save_steps != _DEFAULT_SAVE_STEPS:
        given["save_steps"] = args.save_steps
    # Below 1 they are shares of the run.
    return {name: int(value) for name, value in given.items() if value and value >= 1}


def order_in_words(args: Any, sampler: PackedBatchSampler) -> str:
    """Return the order of a curriculum; "" if documents are drawn at random."""
    options = PackingOptions.of(args)
    if sampler.stages is None:
        return ""
    curriculum = str(options.curriculum)
    name, ends = column_of(curriculum), ("smallest", "shortest")
    if curriculum.startswith("-"):
        ends = ("largest", "longest")
    stages = len(np.unique(sampler.stages))
    return f"by {name}, {ends[name == LENGTH]} first · {quantity(stages, 'stage')}, each random"


def _micro_batch_words(sampler: PackedBatchSampler) -> str:
    if sampler.documents_per_step is None:
        return size_in_words(sampler.bins_per_batch, "bin")
    per_batch = sampler.documents_per_step / (sampler.num_ranks * sampler.accumulation)
    return size_in_words(per_batch, "document")


def _largest_micro_batch(sampler: PackedBatchSampler) -> int | None:
    """Return the tokens of the largest micro-batch of documents in the first 200 steps.

    None for bins, whose room is known.
    """
    if sampler.documents_per_step is None:
        return None
    batches = sampler.micro_batches()[: _STEPS_LOOKED_AT * sampler.drawn().slots]
    return int(sampler.tokens_of(batches).max())


class RunReport:
    """Keeps the report of a run up to date.

    Args:
        trainer: its training set and arguments are read.
        collators: know the shape of micro-batches, and the attention in use.
        preparation: counts of each prepared data set, by its name.
        sharing: knows why rows do not share prefixes.
        samples_bins: whether training draws bins, and not the documents of a user's sampler.
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        collators: RunCollators,
        preparation: dict[str, PreparationCounts],
        sharing: PrefixSharing,
        *,
        samples_bins: bool,
    ):
        self.trainer = trainer
        self.guard = collators.guard
        self.collators = collators
        self.sampling = collators.sampling
        self.preparation = preparation
        self.sharing = sharing
        self.samples_bins = samples_bins
        self._planned: PackingReport | None = None
        self._batch_size = self.sampling.batch_size  # for which the epoch is planned

    @property
    def current(self) -> PackingReport | None:
        """The report, with the attention, its check and the shapes in use; None on TRL's path."""
        return self._planned and replace(
            self._planned,
            attention=str(self.guard.attention),
            checked=self.guard.checked,
            tokens_per_micro_batch=self.collators.tokens_per_micro_batch,
            prefixes=self._prefixes(self._planned.prefixes),
        )

    def _prefixes(self, planned: PrefixSavings | None) -> PrefixSavings | None:
        """Return the planned savings, and the reason if the run does not share."""
        mode = self.sharing.mode
        if mode == "off":
            return planned if planned and str(planned) and not self.sharing.reason else None
        return replace(planned or PrefixSavings(mode), reason=self.sharing.reason)

    @property
    def sharing_pays(self) -> bool:
        """Return whether the training set has common prefixes, as far as is known."""
        planned = None if self._planned is None else self._planned.prefixes
        return planned is None or planned.pays

    @property
    def plans_groups(self) -> bool:
        """Return whether the planned epoch holds groups of documents with a common prefix."""
        planned = None if self._planned is None else self._planned.prefixes
        return planned is not None and planned.per_step is not None

    def plan(self, sampler: Any = None, micro_batches: int | None = None) -> None:
        """Plan the first epoch anew.

        Args:
            sampler: of the data loader, if a subclass makes it: the subclass may need attributes
                that its constructor sets after ours.
            micro_batches: of an epoch of one rank, if known.
        """
        self._batch_size = self.sampling.batch_size
        self._planned = self._plan(sampler, micro_batches)

    def follow_batch_size(self) -> None:
        """Plan the epoch anew if `auto_find_batch_size` has changed the size of micro-batches."""
        if self._planned is not None and self._batch_size != self.sampling.batch_size:
            self.plan()

    def count_stream(self, counts: PreparationCounts, trained: Counts | None) -> None:
        """Add the counts of a stream that was read, and of what was trained of it."""
        if self._planned is None:
            return
        prefixes = self._planned.prefixes
        if trained is not None and trained.tokens:
            computed = trained.tokens - trained.shared
            prefixes = PrefixSavings(self.sharing.mode, trained.tokens, computed, is_whole=True)
        self._planned = replace(self._planned, preparation=counts, prefixes=prefixes)

    def forget(self) -> None:
        """Leave out the report: the run takes TRL's path."""
        self._planned = None

    def _plan(self, sampler: Any, micro_batches: int | None) -> PackingReport:
        args, dataset = self.trainer.args, self.trainer.train_dataset
        ranks, attention = self.sampling.ranks[0], str(self.guard.attention)
        tokens = self.collators.tokens_per_micro_batch
        if isinstance(dataset, IterableDataset):
            return without_plan(
                args,
                ranks=ranks,
                micro_batch=micro_batch_of_stream(self.sampling.packing, self.sampling.batch_size),
                attention=attention,
                loss=self._loss(columns_kept(dataset)),
                tokens_per_micro_batch=tokens,
            )
        documents = documents_of(dataset, self.trainer.compute_loss_func)
        loss = self._loss(columns_of(dataset))
        preparation = self.preparation.get("train", PreparationCounts())
        self.guard.limits.check(dataset, "train")
        if sampler is None and self.samples_bins:
            sampler = self.sampling.for_training(documents)
        if not isinstance(sampler, PackedBatchSampler):
            return report_of_any_sampler(
                documents,
                args,
                micro_batches=micro_batches,
                batch_size=self.sampling.batch_size,
                ranks=ranks,
                attention=attention,
                loss=loss,
                preparation=preparation,
            )
        return plan_report(
            documents,
            sampler,
            attention=attention,
            loss=loss,
            preparation=preparation,
            prefix_sharing=self.sharing.mode,
            tokens_per_micro_batch=tokens,
            given_in_steps=settings_in_steps(args),
            mixture=self.sampling.mixture,
            order=order_in_words(args, sampler),
            packing=self.sampling.packing,
        )

    def _loss(self, columns: list[str]) -> str | None:
        """Return the weighting of the loss in words; None if a user's function computes it."""
        if self.trainer.compute_loss_func is not None:
            return None
        return in_words(PackingOptions.of(self.trainer.args).loss_weighting, columns)
