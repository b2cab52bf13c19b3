"""Samplers: the documents of each micro-batch, planned from lengths for one rank.

training      a plan for every epoch: bins, or documents grouped by cost
evaluation    the same in the order of the data set; a rank may have no document left

With prefix_sharing="group", both draw groups of documents with a common prefix (prefix_groups.py),
if the model can share prefixes.
"""

import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from trl import SFTConfig, SFTTrainer

from trl_packing.config import PackingOptions
from trl_packing.data.overflow import Overflow
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.models.introspection import layer_values, text_config
from trl_packing.packing.curriculum import numbers_of, stages_of
from trl_packing.packing.document_order import order_seed, packing_seed
from trl_packing.packing.draw import MixtureDraw
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.patch_bins import patch_budget
from trl_packing.packing.prefix_groups import PrefixGroups, group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler, attention_cost
from trl_packing.training.mixture import Mixture, mixture_of

_MOST_KEPT = 8  # data sets whose index, or whose loads of images, are kept

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def training_sampler(
    documents: ArrowDocuments,
    args: SFTConfig,
    *,
    packing: bool,
    batch_size: int,
    ranks: int = 1,
    rank: int = 0,
    hidden_size: int | None = None,
    torch_seed: int | None = None,
    subset: np.ndarray | None = None,
    index: PrefixIndex | None = None,
    mixture: Mixture | None = None,
    loads: ImageLoads | None = None,
) -> PackedBatchSampler:
    """Return the sampler of one rank's training micro-batches.

    Args:
        documents: the training set.
        args: the settings of the run.
        packing: pack documents into bins.
        batch_size: `per_device_train_batch_size`, times the devices of this process.
        ranks: number of data-parallel ranks.
        rank: this one.
        hidden_size: the model's, for the cost of attention; None leaves that cost out.
        torch_seed: seed of torch's global generator when training starts; None for `args.seed`.
        subset: numbers of the documents to sample from; the sampler counts them from 0. None for
            all documents.
        index: of `documents`, if groups of documents with common prefixes are drawn.
        mixture: of `documents`; a subset is drawn once an epoch, in steps that are fair mixtures.
        loads: of the images of `documents`; None without images.

    Raises:
        ValueError: documents_per_step is set for rows that were packed before.
    """
    lengths, draw = documents.lengths(), None if mixture is None else mixture.draw
    if subset is not None:
        lengths, index = lengths[subset], index and index.subset(subset)
        loads, draw = loads and loads.subset(subset), None if draw is None else draw.rest(subset)
    return sampler_of_lengths(
        lengths,
        args,
        rows=is_packed(documents),
        packing=packing,
        batch_size=batch_size,
        ranks=ranks,
        rank=rank,
        hidden_size=hidden_size,
        torch_seed=torch_seed,
        allow_idle_ranks=subset is not None,
        groups=None if index is None else _groups(index, lengths, args),
        draw=draw,
        numbers=_numbers(documents, args, subset),
        loads=loads,
    )


def sampler_of_lengths(
    lengths: np.ndarray,
    args: SFTConfig,
    *,
    rows: bool,
    packing: bool,
    batch_size: int,
    ranks: int = 1,
    rank: int = 0,
    hidden_size: int | None = None,
    torch_seed: int | None = None,
    allow_idle_ranks: bool = False,
    groups: PrefixGroups | None = None,
    draw: MixtureDraw | None = None,
    numbers: np.ndarray | None = None,
    loads: ImageLoads | None = None,
) -> PackedBatchSampler:
    """Return the same sampler, made from the lengths of documents ``(documents,)`` alone.

    Args:
        lengths: tokens of every document, or of every row.
        args: the settings of the run.
        rows: the rows were packed before.
        packing: pack documents into bins.
        batch_size: as for `training_sampler`, like the others.
        ranks: number of data-parallel ranks.
        rank: this one.
        hidden_size: the model's.
        torch_seed: seed of torch's global generator when training starts.
        allow_idle_ranks: fewer documents than ranks are no error.
        groups: of documents with common prefixes; None draws single documents.
        draw: the documents that each epoch of a mixture draws; None draws every document once.
        numbers: those of a curriculum; None draws from all documents at any time.
        loads: of the images of the documents, as `limited_loads` returns them; None without images.

    Raises:
        ValueError: documents_per_step is set for rows that were packed before.
    """
    accumulation, options = args.gradient_accumulation_steps, PackingOptions.of(args)
    per_step = options.documents_per_step
    if rows and per_step is not None:
        raise ValueError(
            f"documents_per_step={per_step} cannot regroup rows that were packed before (they have "
            "seq_lengths); leave it out, or pass the documents"
        )
    if per_step is None and not packing and not rows:
        per_step = batch_size * accumulation * ranks
    sampling = args.train_sampling_strategy
    seed, stages = packing_seed(args), None
    if numbers is not None:
        stages = stages_of(
            numbers,
            lengths,
            capacity=args.max_length if per_step is None else None,
            descending=options.curriculum_order == "descending",
            seed=seed,
        )
    if per_step is not None:
        torch_seed = args.seed if torch_seed is None else torch_seed
        seed = order_seed(sampling, data_seed=args.data_seed, torch_seed=torch_seed)
    sampler = partial(
        PackedBatchSampler,
        lengths,
        args.max_length,
        bins_per_batch=batch_size,
        documents_per_step=per_step,
        rows=rows,
        num_ranks=ranks,
        rank=rank,
        accumulation=accumulation,
        strategy=args.packing_strategy,
        seed=seed,
        shuffle=sampling != "sequential",
        sampling=sampling,
        attention_cost=attention_cost(hidden_size),
        drop_last=args.dataloader_drop_last,
        allow_idle_ranks=allow_idle_ranks,
        groups=groups,
        draw=draw,
        stages=stages,
        loads=loads,
    )
    if draw is None or draw.is_same_every_epoch or args.max_steps <= 0:
        return sampler(epochs=math.ceil(args.num_train_epochs))
    steps = -(-len(sampler()) // accumulation)  # of the first epoch; the others have no fewer
    return sampler(epochs=-(-args.max_steps // steps))


def _numbers(
    documents: ArrowDocuments, args: SFTConfig, subset: np.ndarray | None
) -> np.ndarray | None:
    """Return the numbers of a curriculum, of all documents or a `subset`; None without one."""
    curriculum = PackingOptions.of(args).curriculum
    if curriculum is None:
        return None
    numbers = numbers_of(documents, curriculum)
    return numbers if subset is None else numbers[subset]


def limited_loads(
    loads: ImageLoads,
    lengths: np.ndarray,
    args: SFTConfig,
    *,
    packing: bool,
    draw: MixtureDraw | None = None,
) -> ImageLoads:
    """Return the loads of images with the limit of bins that the settings name or imply.

    Args:
        loads: of documents.
        lengths: tokens of these documents, ``(documents,)``.
        args: the settings of the run.
        packing: pack documents into bins.
        draw: the documents that each epoch of a mixture draws, of which the limit follows.

    Raises:
        ValueError: a document has more patches than `max_patches`.
    """
    options, capacity = PackingOptions.of(args), args.max_length
    if not packing or capacity is None or options.documents_per_step is not None:
        return loads
    most, patches = options.max_patches, loads.patches
    if most is None:
        if draw is not None:
            drawn = draw.documents(0)
            lengths, patches = lengths[drawn], patches[drawn]
        return loads.limited(patch_budget(lengths, patches, capacity, args.packing_strategy))
    if patches.max(initial=0) > most:
        at = int(np.argmax(patches > most))
        raise ValueError(
            f"the images of document {at} have {patches[at]} patches, but max_patches={most}; "
            "raise max_patches, or let the processor make images smaller"
        )
    return loads.limited(most)


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


def _groups(index: PrefixIndex, lengths: np.ndarray, args: SFTConfig) -> PrefixGroups:
    size = PackingOptions.of(args).prefix_group_size
    return group_documents(index, lengths, args.max_length, size)


def plan_settings(
    args: SFTConfig,
    *,
    packing: bool,
    batch_size: int,
    ranks: int,
    groups: bool = False,
    mixture: Mixture | None = None,
) -> dict[str, Any]:
    """Return the settings on which the micro-batches of an epoch depend.

    Settings by which documents are cut are among them.

    Args:
        args: the settings of the run.
        packing: pack documents into bins.
        batch_size: as for `training_sampler`.
        ranks: number of data-parallel ranks.
        groups: draw groups of documents with common prefixes.
        mixture: of the training set; None if its sources are not known.
    """
    options = PackingOptions.of(args)
    return {
        "ranks": ranks,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_length": args.max_length,
        "overflow": Overflow.from_args(args, packing).policy,
        "packing": packing,
        "packing_strategy": args.packing_strategy,
        "documents_per_step": options.documents_per_step,
        # None where nothing is grouped, as in the checkpoints of earlier versions.
        "prefix_group_size": options.prefix_group_size if groups else None,
        "mixture": None if mixture is None else mixture.settings(),
        "overlap_tokens": Overflow.from_args(args, packing).overlap,
        "curriculum": options.curriculum,
        "curriculum_order": options.curriculum and options.curriculum_order,
        "max_patches": options.max_patches,
        "train_sampling_strategy": str(args.train_sampling_strategy),
        "dataloader_drop_last": args.dataloader_drop_last,
        "seed": packing_seed(args),
    }


class Sampling:
    """Makes the samplers of one run.

    Args:
        trainer: its model, arguments and ranks are read.

    Attributes:
        packing: pack training documents into bins.
        eval_packing: the same for evaluation.
        torch_seed: seed of torch's global generator when training starts.
        mixture: of the training set that was sampled last; None if its sources are not known.
        draws_groups: returns whether groups of documents with common prefixes are drawn, in
            training or evaluation.
        image_loads: returns the loads of the images of documents; None without images.
    """

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer
        self.packing = False
        self.eval_packing = False
        self.torch_seed: int | None = None
        self.mixture: Mixture | None = None
        self.draws_groups: Callable[[bool], bool] = lambda training: False
        self.image_loads: Callable[[ArrowDocuments], ImageLoads | None] = lambda documents: None
        self._indexes: dict[int, tuple[ArrowDocuments, PrefixIndex]] = {}
        self._loads: dict[tuple[int, bool, bool], tuple[ArrowDocuments, ImageLoads | None]] = {}

    @property
    def ranks(self) -> tuple[int, int]:
        """Number of data-parallel ranks, and this rank."""
        # Tensor-parallel ranks must see the same batch.
        trainer = self.trainer
        shared = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
        return trainer.args.world_size // shared, trainer.args.process_index // shared

    @property
    def batch_size(self) -> int:
        """Bins or documents of a training micro-batch, as `auto_find_batch_size` has left it."""
        return self.trainer._train_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of an optimizer step of one rank."""
        return self.trainer.args.gradient_accumulation_steps

    @property
    def hidden_size(self) -> int | None:
        """The largest hidden size of the model's layers; None if it names none."""
        sizes = layer_values(text_config(self.trainer.model), "hidden_size")
        return max(sizes, default=None)

    def agree_on_seed(self) -> None:
        """Take rank 0's seed for the order of documents, which accelerate draws from torch's."""
        args = self.trainer.args
        seed = args.seed if self.trainer.model_init is not None else torch.initial_seed()
        self.torch_seed = broadcast_object_list([seed])[0]

    def for_training(
        self, documents: ArrowDocuments, subset: np.ndarray | None = None
    ) -> PackedBatchSampler:
        """Return the sampler of `documents`, or of a `subset` of them by number."""
        ranks, rank = self.ranks
        self.mixture = mixture = mixture_of(documents, self.trainer.args)
        return training_sampler(
            documents,
            self.trainer.args,
            packing=self.packing,
            batch_size=self.batch_size,
            ranks=ranks,
            rank=rank,
            hidden_size=self.hidden_size,
            torch_seed=self.torch_seed,
            subset=subset,
            index=self._index(documents) if self.draws_groups(True) else None,
            mixture=mixture,
            loads=self._limited_loads(documents, self.packing, mixture.draw if mixture else None),
        )

    def for_evaluation(self, documents: ArrowDocuments) -> PackedBatchSampler:
        """Return the sampler of an evaluation set."""
        args, size, (ranks, rank) = self.trainer.args, self.trainer.args.eval_batch_size, self.ranks
        rows, lengths = is_packed(documents), documents.lengths()
        groups = None
        if self.draws_groups(False) and not rows:
            groups = _groups(self._index(documents), lengths, args)
        return PackedBatchSampler(
            lengths,
            args.max_length,
            bins_per_batch=size,
            documents_per_step=None if self.eval_packing or rows else size * ranks,
            rows=rows,
            num_ranks=ranks,
            rank=rank,
            strategy=args.packing_strategy,
            shuffle=False,
            attention_cost=attention_cost(self.hidden_size),
            allow_idle_ranks=True,
            groups=groups,
            loads=self._limited_loads(documents, self.eval_packing),
        )

    def _limited_loads(
        self, documents: ArrowDocuments, packing: bool, draw: MixtureDraw | None = None
    ) -> ImageLoads | None:
        """Return the loads of the images of a data set, made once."""

        def make() -> ImageLoads | None:
            loads, args = self.image_loads(documents), self.trainer.args
            if loads is None:
                return None
            return limited_loads(loads, documents.lengths(), args, packing=packing, draw=draw)

        key = id(documents.dataset), packing, draw is not None
        return _made_once(self._loads, key, documents, make)

    def _index(self, documents: ArrowDocuments) -> PrefixIndex:
        """Return the index of a data set, made once."""
        make = partial(prefix_index, documents)
        return _made_once(self._indexes, id(documents.dataset), documents, make)

    def settings(self) -> dict[str, Any]:
        """Return the settings on which the micro-batches of an epoch depend."""
        return plan_settings(
            self.trainer.args,
            packing=self.packing,
            batch_size=self.batch_size,
            ranks=self.ranks[0],
            groups=self.draws_groups(True),
            mixture=self.mixture,
        )


def _made_once(
    made: dict[Key, tuple[ArrowDocuments, Value]],
    key: Key,
    documents: ArrowDocuments,
    make: Callable[[], Value],
) -> Value:
    """Return what `make` returns, from `made` if it is there, which holds a few data sets.

    The documents are held beside it, because the key has their `id`.
    """
    if key not in made:
        if len(made) == _MOST_KEPT:
            del made[next(iter(made))]
        made[key] = documents, make()
    return made[key][1]
