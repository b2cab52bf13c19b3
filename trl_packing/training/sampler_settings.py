"""Settings → the sampler of one rank's micro-batches, planned from lengths.

    training      a plan for every epoch: bins, or documents grouped by cost
    evaluation    the same in the order of the data set; a rank may have no document left

With prefix_sharing="group", both draw groups of documents with a common prefix (prefix_groups.py).
No trainer is needed, so `trl-packing plan` makes the samplers of a run that has not started.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.overflow import Overflow
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.packing.curriculum import numbers_of, stages_of
from trl_packing.packing.document_order import order_seed, packing_seed
from trl_packing.packing.draw import MixtureDraw
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.prefix_groups import PrefixGroups, group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler, attention_cost
from trl_packing.training.mixture import Mixture


@dataclass(frozen=True)
class SamplerSettings:
    """Settings and ranks of a run, from which its samplers are made.

    Attributes:
        args: the settings of the run.
        packing: pack documents into bins.
        batch_size: bins or documents of a micro-batch: `per_device_train_batch_size`, times the
            devices of this process.
        ranks: number of data-parallel ranks.
        rank: this one.
        hidden_size: the model's, for the cost of attention; None leaves that cost out.
        torch_seed: seed of torch's global generator when training starts; None for `args.seed`.
    """

    args: SFTConfig
    packing: bool
    batch_size: int
    ranks: int = 1
    rank: int = 0
    hidden_size: int | None = None
    torch_seed: int | None = None

    @property
    def options(self) -> PackingOptions:
        """The settings of this package."""
        return PackingOptions.of(self.args)

    def training_sampler(
        self,
        documents: ArrowDocuments,
        *,
        index: PrefixIndex | None = None,
        mixture: Mixture | None = None,
        loads: ImageLoads | None = None,
    ) -> PackedBatchSampler:
        """Return the sampler of the training set.

        Args:
            documents: the training set.
            index: of `documents`, if groups of documents with common prefixes are drawn.
            mixture: of `documents`.
            loads: of the images of `documents`; None without images.

        Raises:
            ValueError: documents_per_step is set for rows that were packed before.
        """
        lengths, curriculum = documents.lengths(), self.options.curriculum
        numbers = None if curriculum is None else numbers_of(documents, curriculum)
        return self.sampler_of_lengths(
            lengths,
            rows=is_packed(documents),
            groups=None if index is None else self._groups(index, lengths),
            draw=None if mixture is None else mixture.draw,
            numbers=numbers,
            loads=loads,
        )

    def sampler_of_lengths(
        self,
        lengths: np.ndarray,
        *,
        rows: bool = False,
        allow_idle_ranks: bool = False,
        groups: PrefixGroups | None = None,
        draw: MixtureDraw | None = None,
        numbers: np.ndarray | None = None,
        loads: ImageLoads | None = None,
    ) -> PackedBatchSampler:
        """Return the same sampler, made from lengths alone.

        Args:
            lengths: tokens of every document, or of every row, ``(documents,)``.
            rows: the rows were packed before.
            allow_idle_ranks: fewer documents than ranks are no error.
            groups: of documents with common prefixes; None draws single documents.
            draw: the documents that each epoch of a mixture draws; None draws every document once.
            numbers: those of a curriculum; None draws from all documents at any time.
            loads: of the images of the documents, as `limited_loads` returns them; None without
                images.

        Raises:
            ValueError: documents_per_step is set for rows that were packed before.
        """
        args, per_step = self.args, self._documents_per_step(rows)
        sampling = args.train_sampling_strategy
        sampler = partial(
            PackedBatchSampler,
            lengths,
            args.max_length,
            bins_per_batch=self.batch_size,
            documents_per_step=per_step,
            # transformers divides by cost itself where it rebalances batches.
            divide_by_cost=bool(self.options.documents_per_step) or sampling == "batch_rebalance",
            rows=rows,
            num_ranks=self.ranks,
            rank=self.rank,
            accumulation=args.gradient_accumulation_steps,
            strategy=args.packing_strategy,
            seed=packing_seed(args) if per_step is None else self._order_seed(),
            shuffle=sampling != "sequential",
            sampling=sampling,
            attention_cost=attention_cost(self.hidden_size),
            drop_last=args.dataloader_drop_last,
            allow_idle_ranks=allow_idle_ranks,
            groups=groups,
            draw=draw,
            stages=None if numbers is None else self._stages(numbers, lengths, per_step is None),
            loads=loads,
        )
        if draw is None or draw.is_same_every_epoch or args.max_steps <= 0:
            return sampler(epochs=math.ceil(args.num_train_epochs))
        # Steps of the first epoch; the others have no fewer.
        steps = -(-len(sampler()) // args.gradient_accumulation_steps)
        return sampler(epochs=-(-args.max_steps // steps))

    def evaluation_sampler(
        self,
        documents: ArrowDocuments,
        *,
        index: PrefixIndex | None = None,
        loads: ImageLoads | None = None,
    ) -> PackedBatchSampler:
        """Return the sampler of an evaluation set.

        Args:
            documents: the evaluation set.
            index: as for `training_sampler`.
            loads: likewise.
        """
        rows, lengths = is_packed(documents), documents.lengths()
        return PackedBatchSampler(
            lengths,
            self.args.max_length,
            bins_per_batch=self.batch_size,
            documents_per_step=None if self.packing or rows else self.batch_size * self.ranks,
            divide_by_cost=False,
            rows=rows,
            num_ranks=self.ranks,
            rank=self.rank,
            strategy=self.args.packing_strategy,
            shuffle=False,
            attention_cost=attention_cost(self.hidden_size),
            allow_idle_ranks=True,
            groups=None if index is None else self._groups(index, lengths),
            loads=loads,
        )

    def limited_loads(self, loads: ImageLoads) -> ImageLoads:
        """Return the loads of images with the limit of bins that the settings name.

        Raises:
            ValueError: a document has more patches than `max_patches`.
        """
        most, patches = self.options.max_patches, loads.patches
        if most is not None and patches.max(initial=0) > most:
            at = int(np.argmax(patches > most))
            raise ValueError(
                f"the images of document {at} have {patches[at]} patches, but max_patches={most}; "
                "raise max_patches, or let the processor make images smaller"
            )
        return loads.limited(most)

    def of_plan(self, *, groups: bool = False, mixture: Mixture | None = None) -> dict[str, Any]:
        """Return the settings on which the micro-batches of an epoch depend.

        Settings by which documents are cut are among them.

        Args:
            groups: draw groups of documents with common prefixes.
            mixture: of the training set; None if its sources are not known.
        """
        args, options = self.args, self.options
        overflow = Overflow.from_args(args, self.packing)
        return {
            "ranks": self.ranks,
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "max_length": args.max_length,
            "overflow": overflow.policy,
            "packing": self.packing,
            "packing_strategy": args.packing_strategy,
            "documents_per_step": options.documents_per_step,
            # None where nothing is grouped, as in the checkpoints of earlier versions.
            "prefix_group_size": options.prefix_group_size if groups else None,
            "mixture": None if mixture is None else mixture.settings(),
            "overlap_tokens": overflow.overlap,
            "curriculum": options.curriculum,
            "max_patches": options.max_patches,
            "train_sampling_strategy": str(args.train_sampling_strategy),
            "dataloader_drop_last": args.dataloader_drop_last,
            "seed": packing_seed(args),
        }

    def _documents_per_step(self, rows: bool) -> int | None:
        """Return the documents of an optimizer step; None if micro-batches are bins or rows."""
        per_step = self.options.documents_per_step
        if rows and per_step is not None:
            raise ValueError(
                f"documents_per_step={per_step} cannot regroup rows that were packed before (they "
                "have seq_lengths); leave it out, or pass the documents"
            )
        if per_step is None and not self.packing and not rows:
            return self.batch_size * self.args.gradient_accumulation_steps * self.ranks
        return per_step

    def _order_seed(self) -> int:
        """Return the seed with which a padded run draws the order of its documents."""
        args = self.args
        torch_seed = args.seed if self.torch_seed is None else self.torch_seed
        return order_seed(
            args.train_sampling_strategy, data_seed=args.data_seed, torch_seed=torch_seed
        )

    def _stages(self, numbers: np.ndarray, lengths: np.ndarray, has_bins: bool) -> np.ndarray:
        """Return the stage of each document in a curriculum, ``(documents,)``."""
        return stages_of(
            numbers,
            lengths,
            capacity=self.args.max_length if has_bins else None,
            descending=str(self.options.curriculum).startswith("-"),
            seed=packing_seed(self.args),
        )

    def _groups(self, index: PrefixIndex, lengths: np.ndarray) -> PrefixGroups:
        size = self.options.prefix_group_size
        return group_documents(index, lengths, self.args.max_length, size)


def prefix_index(documents: ArrowDocuments) -> PrefixIndex:
    """Return the index of `documents`, of which groups are made.

    Raises:
        ValueError: the rows were packed before.
    """
    if is_packed(documents):
        raise ValueError(
            "prefix_sharing='group' cannot regroup rows that were packed before (they have "
            f"{SEQ_LENGTHS}); set prefix_sharing='bin', or pass the documents"
        )
    return PrefixIndex.of(documents)
