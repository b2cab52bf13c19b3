"""The documents of each micro-batch of a run, planned from its settings and lengths alone.

    training      a plan for every epoch: bins, or documents grouped by cost
    evaluation    the same in the order of the data set; a rank may have no document left

No model is needed, so `trl-packing plan` draws the micro-batches of a run that has not started.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from datasets import Dataset

from trl_packing.attention.model_facts import config_of
from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS, TOKEN_COLUMNS
from trl_packing.packing.draw import numbers_of, order_seed, packing_seed, stages_of
from trl_packing.packing.prefix_groups import PrefixGroups, group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import ImageLoads, PackedBatchSampler, attention_cost
from trl_packing.run.run import Run
from trl_packing.run.sources import Mixture, mixture_of

# Settings on which the micro-batches of an epoch depend, beside those that a trainer changes.
_SETTINGS = (
    "gradient_accumulation_steps",
    "max_length",
    "packing_strategy",
    "dataloader_drop_last",
    "documents_per_step",
    "prefix_group_size",
    "curriculum",
    "max_patches",
    "overflow",
)


class PlannedEpochs(NamedTuple):
    """The sampler of a training set, at an epoch that is planned, and what it was made of."""

    sampler: PackedBatchSampler
    mixture: Mixture | None
    facts: dict[str, Any]


@dataclass(frozen=True, eq=False)
class Sampling:
    """Makes the samplers of one run.

    `planned` keeps the epochs of one training set until `for_training` hands them out, so that the
    report, the shapes of rows and the data loader plan them once. Copies with other ranks, batch
    sizes or seeds share them and the prefixes that were found.
    """

    run: Run
    batch_size: int  # of a training micro-batch, as `auto_find_batch_size` left it
    hidden_size: int | None  # of the model, for the cost of attention; None leaves it out
    # Whether groups of documents with common prefixes are drawn, in training or evaluation.
    draws_groups: Callable[[bool], bool]
    ranks: tuple[int, int] = (1, 0)  # number of data-parallel ranks, and this rank
    torch_seed: int | None = None  # of torch's generator when training starts; None: `args.seed`
    _planned: list[tuple[Any, PlannedEpochs]] = field(default_factory=list)  # one at most, and why
    _indexes: WeakKeyDictionary[Dataset, PrefixIndex] = field(default_factory=WeakKeyDictionary)

    @classmethod
    def before(cls, run: Run, ranks: int = 1) -> "Sampling":
        """Return what draws on rank 0 of `ranks`, as far as is known without a model."""
        # An image belongs to one document.
        groups = run.options.prefix_sharing == "group" and not run.images.packs
        return cls(
            run,
            run.args.per_device_train_batch_size,
            hidden_size_of(run),
            lambda training: groups,
            (ranks, 0),
        )

    def changed(self, *, ranks: int | None = None, **settings: Any) -> "Sampling":
        """Return the sampling of the same run with other ranks or settings."""
        return replace(
            self,
            run=self.run.with_settings(**settings),
            batch_size=settings.get("per_device_train_batch_size", self.batch_size),
            ranks=self.ranks if ranks is None else (ranks, 0),
            _planned=[],
        )

    @property
    def args(self) -> Any:
        """The settings of the run."""
        return self.run.args

    @property
    def options(self) -> PackingOptions:
        """The settings of this package."""
        return self.run.options

    @property
    def static_tokens(self) -> int | None:
        """Tokens of every micro-batch with static shapes, padding included; None without."""
        return self.run.tokens_of_bins(self.batch_size) if self.options.static_shapes else None

    def for_training(self, documents: ArrowDocuments) -> PackedBatchSampler:
        """Return the sampler of a training set, at its first epoch and not known to anybody else.

        Raises:
            ValueError: packed rows would have to be regrouped.
        """
        sampler = self.planned(documents).sampler
        self._planned.clear()  # another one is not moved to the epoch of this one
        return sampler

    def planned(self, documents: ArrowDocuments) -> PlannedEpochs:
        """Return the epochs of a training set, planned anew if something has changed since.

        Their sampler stays at the first epoch. Raises ValueError as `for_training`.
        """
        args = self.args
        options = self.options
        groups = self.draws_groups(True)
        planned_from = (
            documents.dataset,
            self.settings(None),
            (args.data_seed, args.max_steps, args.num_train_epochs, self._torch_seed),
            (asdict(options), groups),
        )
        if not self._planned or self._planned[0][0] != planned_from:
            mixture = mixture_of(documents, args)
            curriculum = options.curriculum
            facts: dict[str, Any] = {
                "rows": is_packed(documents),
                "groups": self.groups(documents) if groups else None,
                "draw": None if mixture is None else mixture.draw,
                "numbers": None if curriculum is None else numbers_of(documents, curriculum),
                "loads": self._limited_loads(documents),
            }
            sampler = self.sampler(documents.lengths(), **facts)
            self._planned[:] = [(planned_from, PlannedEpochs(sampler, mixture, facts))]
        return self._planned[0][1]

    @property
    def _torch_seed(self) -> int:
        return self.args.seed if self.torch_seed is None else self.torch_seed

    def for_evaluation(self, documents: ArrowDocuments) -> PackedBatchSampler:
        """Return the sampler of an evaluation set."""
        rows = is_packed(documents)
        size = self.args.eval_batch_size
        packs = self.run.eval_packing and not rows
        return PackedBatchSampler(
            documents.lengths(),
            bins_per_batch=size,
            documents_per_step=None if packs or rows else size * self.ranks[0],
            divide_by_cost=False,
            shuffle=False,
            groups=self.groups(documents) if packs and self.draws_groups(False) else None,
            loads=self._limited_loads(documents),
            rows=rows,
            **self._of_any_set(),
        )

    def sampler(
        self, lengths: np.ndarray, *, numbers: np.ndarray | None = None, **facts: Any
    ) -> PackedBatchSampler:
        """Return the sampler of a training set of which these `facts` are known.

        `lengths` are the tokens of every document, or row, and `numbers` those of a curriculum.
        """
        args = self.args
        per_step = self._documents_per_step(facts.get("rows", False))
        strategy = args.train_sampling_strategy
        draw = facts.get("draw")
        stages = None
        seed = packing_seed(args)
        if numbers is not None:
            stages = stages_of(
                numbers,
                lengths,
                capacity=args.max_length if per_step is None else None,
                descending=str(self.options.curriculum).startswith("-"),
                seed=seed,
            )
        if per_step is not None:  # the order of a padded run
            seed = order_seed(strategy, data_seed=args.data_seed, torch_seed=self._torch_seed)
        sampler = partial(
            PackedBatchSampler,
            lengths,
            bins_per_batch=self.batch_size,
            documents_per_step=per_step,
            # transformers divides by cost itself where it rebalances batches.
            divide_by_cost=bool(self.options.documents_per_step) or strategy == "batch_rebalance",
            accumulation=args.gradient_accumulation_steps,
            seed=seed,
            shuffle=strategy != "sequential",
            sampling=strategy,
            drop_last=args.dataloader_drop_last,
            stages=stages,
            **self._of_any_set(),
            **facts,
        )
        if draw is None or draw.is_same_every_epoch or args.max_steps <= 0:
            return sampler(epochs=math.ceil(args.num_train_epochs))
        # Steps of the first epoch; the others have no fewer.
        first = sampler()
        steps = -(-len(first) // args.gradient_accumulation_steps)
        epochs = -(-args.max_steps // steps)
        return first if epochs == 1 else sampler(epochs=epochs)

    def _of_any_set(self) -> dict[str, Any]:
        """Return arguments of samplers that training and evaluation share."""
        return {
            "capacity": self.args.max_length,
            "num_ranks": self.ranks[0],
            "rank": self.ranks[1],
            "strategy": self.args.packing_strategy,
            "attention_cost": attention_cost(self.hidden_size),
        }

    def _documents_per_step(self, rows: bool) -> int | None:
        """Return the documents of an optimizer step; None if micro-batches are bins or rows."""
        per_step = self.options.documents_per_step
        for name in ("documents_per_step", "max_tokens_in_memory"):
            value = getattr(self.options, name)
            if rows and value is not None:
                raise ValueError(
                    f"{name}={value} cannot regroup rows that were packed before; leave it out, or "
                    "pass the documents"
                )
        if per_step is None and not self.run.packing and not rows:
            return self.batch_size * self.args.gradient_accumulation_steps * self.ranks[0]
        return per_step

    def groups(self, documents: ArrowDocuments) -> PrefixGroups:
        """Return the groups of documents with common prefixes."""
        return group_documents(
            self.prefix_index(documents),
            documents.lengths(),
            self.args.max_length,
            self.options.prefix_group_size,
        )

    def prefix_index(self, documents: ArrowDocuments) -> PrefixIndex:
        """Return the common prefixes of a data set, found once.

        Raises:
            ValueError: its rows were packed before.
        """
        dataset = documents.dataset
        if SEQ_LENGTHS in dataset.column_names:
            raise ValueError(
                "prefix_sharing='group' cannot regroup rows that were packed before; set "
                "prefix_sharing='bin', or pass the documents"
            )
        if dataset not in self._indexes:
            columns = [name for name in TOKEN_COLUMNS if name in dataset.column_names]
            self._indexes[dataset] = PrefixIndex.of(ArrowDocuments(dataset, columns))
        return self._indexes[dataset]

    def _limited_loads(self, documents: ArrowDocuments) -> ImageLoads | None:
        """Return the loads of the images of a data set, with the limit of bins."""
        loads = self.run.images.loads(documents)
        most = self.options.max_patches
        if loads is None:
            return None
        if most is not None and loads.patches.max(initial=0) > most:
            at = int(np.argmax(loads.patches > most))
            raise ValueError(
                f"the images of document {at} have {loads.patches[at]} patches, but max_patches="
                f"{most}; raise max_patches, or make images smaller"
            )
        return replace(loads, most_patches=most)

    def settings(self, mixture: Mixture | None) -> dict[str, Any]:
        """Return the settings on which micro-batches of an epoch, and cut documents, depend."""
        args = self.args
        # A plain config of TRL lacks ours.
        settings = vars(args) | vars(self.options)
        return {
            **{name: settings[name] for name in _SETTINGS},
            "ranks": self.ranks[0],
            "per_device_train_batch_size": self.batch_size,
            "packing": self.run.packing,
            "mixture": None if mixture is None else mixture.settings(),
            "train_sampling_strategy": str(args.train_sampling_strategy),
            "seed": packing_seed(args),
        }


def hidden_size_of(run: Run) -> int | None:
    """Return the hidden size of the text model of a run; None if it is unknown."""
    if run.call.model is None:
        return None
    try:
        return getattr(config_of(run.call.model, run.args).get_text_config(), "hidden_size", None)
    except (OSError, ValueError):  # a folder with only a tokenizer
        return None


def ranks_of(args: Any, shared_by: int) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and this rank."""
    return args.world_size // shared_by, args.process_index // shared_by
