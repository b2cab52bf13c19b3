"""The epoch of a run, and the same documents under other settings, each really planned.

documents of any length  →  the run's overflow policy at another max_length   →  Variant
documents that fit       →  padded | packed | documents_per_step | more ranks  →  Variant
documents that fit       →  prefix_sharing off | bin | group                   →  Variant

micro-batch     0    1  |  2    3  |  4        ranks × accumulation of them make a step
documents       5    4  |  6    5  |  2
tokens       1020 1019  | 998 1024 | 420
cost         1104 1150  |1050 1120 | 440       tokens + c · Σ len² + the cost of the vision tower,
                                               by which ranks are balanced
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.config import PackingOptions
from trl_packing.data.counting import count_without_cutting
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.preparation import Unfitted, shuffle_fitted
from trl_packing.data.rules import Preparation
from trl_packing.documents.arrow import ArrowDocuments, is_packed, stored_rows
from trl_packing.documents.labels import token_columns
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.draw import LENGTH, MixtureDraw, document_order
from trl_packing.packing.epoch import padded_batch_size
from trl_packing.packing.patch_bins import ImageLoads
from trl_packing.packing.prefix_groups import PrefixGroups, group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.sampling import Sampling

MAX_LENGTHS = tuple(512 * 2**i for i in range(7))  # 512 … 32,768
RANKS = (1, 2, 4, 8, 16, 64)

# A smaller share of tokens that all documents could save together is not shown.
_LEAST_SHARED = 0.01


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """The micro-batches of all ranks in the epoch of a sampler, in the order of training.

    Attributes:
        members: documents of each micro-batch.
        documents: their number, ``(micro-batches,)`` int64.
        tokens: of each micro-batch, ``(micro-batches,)`` int64; with groups of documents, those
            that it computes.
        costs: of each micro-batch in tokens, ``(micro-batches,)`` float64.
        ranks: data-parallel ranks.
        slots: micro-batches of a full step.
        patches: of each micro-batch, ``(micro-batches,)`` int64; None without images.
    """

    members: list[np.ndarray]
    documents: np.ndarray
    tokens: np.ndarray
    costs: np.ndarray
    ranks: int
    slots: int
    patches: np.ndarray | None = None

    @classmethod
    def from_sampler(cls, sampler: PackedBatchSampler) -> "PlannedEpoch":
        """Return the epoch that `sampler` would draw next."""
        members = [np.asarray(batch, np.int64) for batch in sampler.micro_batches()]
        documents = np.array([len(batch) for batch in members], np.int64)
        ends = np.cumsum(documents)
        drawn = np.concatenate(members)
        squares = (
            sampler.lengths[drawn].astype(np.int64) ** 2
            if sampler.groups is None
            else sampler.groups.squares[drawn]
        )

        def sums(values: np.ndarray) -> np.ndarray:
            running = np.concatenate([[0], np.cumsum(values)])
            return running[ends] - running[ends - documents]

        tokens = sampler.tokens_of(members)
        costs = tokens + sampler.attention_cost * sums(squares)
        patches, loads = None, sampler.loads
        if loads is not None:
            patches = sums(loads.patches[drawn])
        slots = sampler.num_ranks * sampler.accumulation
        return cls(members, documents, tokens, costs, sampler.num_ranks, slots, patches)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return -(-len(self.members) // self.slots)

    @cached_property
    def documents_by_step(self) -> np.ndarray:
        """Documents of each step, ``(steps,)`` int64."""
        return self._by_step(self.documents)

    @cached_property
    def tokens_by_step(self) -> np.ndarray:
        """Tokens of each step, ``(steps,)`` int64."""
        return self._by_step(self.tokens)

    def costs_by_rank(self) -> np.ndarray:
        """Return the cost of each rank's micro-batches, ``(ranks,)``."""
        return self.costs.reshape(-1, self.ranks).sum(axis=0)

    def waiting(self) -> float:
        """Return the share of all ranks' time in which they wait for the costliest one.

        The micro-batches that run at the same moment take as long as the costliest of them.
        """
        together = self.costs.reshape(-1, self.ranks)
        return float(1 - together.sum() / (together.max(axis=1).sum() * self.ranks))

    def _by_step(self, values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, np.arange(0, len(values), self.slots))


@dataclass(frozen=True)
class Setup:
    """The settings on which a plan depends.

    Attributes:
        args: the settings of the run.
        ranks: data-parallel processes.
        hidden_size: the model's, which the balance of ranks depends on.
        groups: documents with common prefixes that share a bin; None for single documents.
        loads: of the images of the documents; None without images.
        draw: the documents that an epoch of a mixture draws; None draws every document once.
    """

    args: Any
    ranks: int = 1
    hidden_size: int | None = None
    groups: PrefixGroups | None = None
    loads: ImageLoads | None = None
    draw: MixtureDraw | None = None

    def changed(self, *, ranks: int | None = None, **settings: Any) -> "Setup":
        """Return the same setup with other ranks or `args`."""
        args = copy.copy(self.args)
        for name, value in settings.items():
            setattr(args, name, value)
        return replace(self, args=args, ranks=ranks or self.ranks)

    def sampler(self, lengths: np.ndarray, *, rows: bool = False) -> PackedBatchSampler:
        """Return the sampler of rank 0 for documents, or packed rows, of these lengths."""
        args, loads = self.args, self.loads
        settings = Sampling(
            args,
            args.packing,
            batch_size=args.per_device_train_batch_size,
            ranks=(self.ranks, 0),
            hidden_size=self.hidden_size,
        )
        return settings.sampler(
            lengths,
            rows=rows,
            groups=self.groups,
            draw=self.draw,
            numbers=lengths
            if getattr(args, "curriculum", None) in (LENGTH, f"-{LENGTH}")
            else None,
            loads=loads,
        )

    def computed(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens that micro-batches of `tokens` compute, with the padding of rows."""
        args, multiple = self.args, self.args.pad_to_multiple_of or 1
        if getattr(args, "static_shapes", False):
            multiple = _rounded(args.max_length * args.per_device_train_batch_size, multiple)
        return _rounded(np.maximum(tokens, 1), multiple)


def _rounded(number: Any, multiple: Any) -> Any:
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class Variant:
    """The epoch of a run's documents under other settings.

    Attributes:
        name: of the settings.
        steps: optimizer steps; 0 if the run would not start.
        documents_per_step: mean over them.
        tokens: real ones; with groups, those that their rows compute.
        computed: the same with padding.
        largest: of a micro-batch, padding included.
        waiting: share of the ranks' time in which they wait for the costliest one.
        bins: None where nothing is packed into bins.
        is_run: the run has these settings.
        refused: the reason why the run would not start.
        max_length: None without a limit.
        ranks: their number.
        counts: losses of the overflow policy.
        prefixes_per_step: mean number of groups in a step; None without groups.
    """

    name: str = ""
    steps: int = 0
    documents_per_step: float = 0.0
    tokens: int = 0
    computed: int = 0
    largest: int = 0
    waiting: float = 0.0
    bins: int | None = None
    is_run: bool = False
    refused: str = ""
    max_length: int | None = None
    ranks: int = 1
    counts: PreparationCounts = field(default_factory=PreparationCounts)
    prefixes_per_step: float | None = None

    @classmethod
    def of(
        cls, setup: Setup, lengths: np.ndarray, *, rows: bool = False, **known: Any
    ) -> "Variant":
        """Return the epoch of documents, or packed rows, of these lengths.

        Raises:
            ValueError: the run would not start.
        """
        sampler = setup.sampler(lengths, rows=rows)
        epoch = PlannedEpoch.from_sampler(sampler)
        computed = setup.computed(epoch.tokens)
        found = cls(
            steps=epoch.steps,
            documents_per_step=int(epoch.documents.sum()) / epoch.steps,
            tokens=int(epoch.tokens.sum()),
            computed=int(computed.sum()),
            largest=int(computed.max()),
            waiting=epoch.waiting(),
            bins=sampler.num_bins,
            max_length=setup.args.max_length,
            ranks=setup.ranks,
        )
        return replace(found, **known)

    @property
    def padding(self) -> float:
        """Share of padding in the computed tokens."""
        return 1 - self.tokens / self.computed

    @property
    def utilization(self) -> float | None:
        """Tokens / (bins × max_length); None without bins."""
        if not self.bins or not self.max_length:
            return None
        return self.counts.after.tokens / (self.bins * self.max_length)

    @property
    def num_cut(self) -> int:
        """Documents that are longer than max_length, and are therefore cut or dropped."""
        return sum(stage.affected for stage in self.counts.stages if "max_length" in stage.why)


def other_max_lengths(
    whole: Unfitted, rules: Preparation, setup: Setup, max_lengths: Iterable[int | None]
) -> Iterator[Variant]:
    """Yield the plan for each max_length.

    Args:
        whole: documents before the overflow policy.
        rules: by which they are prepared.
        setup: of the run.
        max_lengths: most tokens of a document, and of a bin.
    """
    columns = token_columns(whole.documents.column_names)
    documents = ArrowDocuments(whole.documents, columns)
    longest = int(documents.lengths().max(initial=0))
    policies = {limit: replace(whole.overflow, capacity=limit) for limit in max_lengths}
    fits = [
        policy
        for limit, policy in policies.items()
        if limit is None or policy.policy != "error" or longest <= limit
    ]
    counted = count_without_cutting(documents, fits, rules.eos.stop_ids)
    for limit, policy in policies.items():
        if policy not in fits:
            yield Variant(refused=f"a document has {longest:,} tokens", max_length=limit)
            continue
        lengths, counts = next(counted)
        yield _at_limit(lengths, counts, rules, setup.changed(max_length=limit))


def _at_limit(
    lengths: np.ndarray, counts: PreparationCounts, rules: Preparation, setup: Setup
) -> Variant:
    known = {"max_length": setup.args.max_length, "counts": counts}
    if not counts.after.trained:
        return Variant(refused="no trained token is left", **known)
    shuffled = shuffle_fitted(Dataset.from_dict({"length": lengths}), rules)
    try:
        found = Variant.of(setup, lengths[stored_rows(shuffled)], **known)
    except ValueError as error:
        return Variant(refused=str(error), **known)
    return replace(found, documents_per_step=len(lengths) / found.steps)


def ways_to_batch(lengths: np.ndarray, setup: Setup) -> Sequence[Variant]:
    """Return how padded batches, bins, and steps of a fixed number of documents compare.

    Args:
        lengths: tokens of the documents that fit, in the order of the data set.
        setup: of the run.
    """
    args = setup.args
    given = getattr(args, "documents_per_step", None)
    size = padded_batch_size(args.per_device_train_batch_size, packing=args.packing)
    padded = replace(
        setup.changed(packing=False, documents_per_step=None, per_device_train_batch_size=size),
        groups=None,
    )
    sampler = padded.sampler(lengths)
    ways = [_padded(lengths, sampler, padded)]
    if args.max_length is not None:
        packed = setup.changed(packing=True, documents_per_step=None)
        is_run = args.packing and given is None
        ways.append(Variant.of(packed, lengths, name="packed into bins", is_run=is_run))
    number = given or sampler.documents_per_step
    fixed = setup.changed(documents_per_step=number, static_shapes=False)
    is_run = given is not None or not args.packing
    name = f"documents_per_step={number}"
    return [*ways, Variant.of(fixed, lengths, name=name, is_run=is_run)]


def _padded(lengths: np.ndarray, sampler: PackedBatchSampler, setup: Setup) -> Variant:
    """Return the padded run of transformers: rows of a micro-batch are as long as the longest."""
    per_step, size = sampler.documents_per_step, setup.args.per_device_train_batch_size
    assert per_step is not None
    lengths = lengths if sampler.draw is None else lengths[sampler.draw.documents(0)]
    order = document_order(
        sampler.sampling,
        lengths,
        seed=sampler.seed,
        epoch=0,
        documents_per_rank=max(per_step // setup.ranks, 1),
    )[: sampler.num_used]
    drawn = lengths[order]
    starts = np.arange(0, len(drawn), size)
    longest = _rounded(np.maximum.reduceat(drawn, starts), setup.args.pad_to_multiple_of or 1)
    computed = int((longest * np.diff(np.append(starts, len(drawn)))).sum())
    steps = -(-len(drawn) // per_step)
    return Variant(
        f"padded in batches of {size}, {quantity(per_step, 'document')} a step",
        steps,
        len(drawn) / steps,
        int(drawn.sum()),
        computed,
    )


def on_ranks(
    lengths: np.ndarray, setup: Setup, numbers: Iterable[int], *, rows: bool = False
) -> Iterator[Variant]:
    """Yield the plan for each number of ranks that has a document for every rank."""
    for ranks in numbers:
        try:
            yield Variant.of(setup.changed(ranks=ranks), lengths, rows=rows)
        except ValueError:  # too few documents, or a fixed number of them for each step
            continue


def ways_to_share(documents: ArrowDocuments, setup: Setup) -> tuple[Variant, ...]:
    """Return the epoch with each value; nothing if documents have hardly a prefix in common.

    Nothing either for a mixture, which draws some documents several times.

    Args:
        documents: that fit.
        setup: of the run.
    """
    args, options = setup.args, PackingOptions.of(setup.args)
    if is_packed(documents) or options.static_shapes or setup.draw is not None:
        return ()
    index, lengths = PrefixIndex.of(documents), documents.lengths()
    in_one_row = index.computed_tokens(lengths, index.order, np.array([0, len(lengths)]))
    if in_one_row[0] > (1 - _LEAST_SHARED) * lengths.sum():
        return ()
    ways = [_shared("off", index, lengths, setup), _shared("bin", index, lengths, setup)]
    if find_strategy(args.packing_strategy).shuffles:
        groups = group_documents(index, lengths, args.max_length, options.prefix_group_size)
        ways.append(_shared("group", index, lengths, replace(setup, groups=groups)))
    return tuple(ways)


def _shared(name: str, index: PrefixIndex, lengths: np.ndarray, setup: Setup) -> Variant:
    sampler = (setup if name == "group" else replace(setup, groups=None)).sampler(lengths)
    epoch = PlannedEpoch.from_sampler(sampler)
    drawn, offsets = np.concatenate(epoch.members), np.cumsum([0, *epoch.documents])
    tokens = np.diff(np.concatenate([[0], np.cumsum(lengths[drawn])])[offsets])
    computed = tokens if name == "off" else index.computed_tokens(lengths, drawn, offsets)
    return Variant(
        name,
        epoch.steps,
        tokens=int(tokens.sum()),
        computed=int(computed.sum()),
        largest=int(computed.max()),
        is_run=name == PackingOptions.of(setup.args).prefix_sharing,
        prefixes_per_step=sampler.groups_per_step(),
    )
