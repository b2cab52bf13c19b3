"""The first epoch of a run, and the same documents under other settings, each really planned.

plan_run(run, ranks=8)
    .report               the report that `trl-packing plan` prints
    .what_if              documents of any length  →  the overflow policy at another max_length
    .ways                 documents that fit       →  padded | packed | documents_per_step
    .ranks                documents that fit       →  more ranks
    .sharing              documents that fit       →  prefix_sharing off | bin | group
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.fitting import count_whole, fit
from trl_packing.data.rules import Rules
from trl_packing.data.stages import WholeDocuments, fit_documents, shuffle
from trl_packing.documents.arrow import ArrowDocuments, stored_rows
from trl_packing.documents.labels import SEQ_LENGTHS, token_columns
from trl_packing.packing.bins import PackingPlan, find_strategy
from trl_packing.packing.epoch import padded_batch_size
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.report import PackingReport, report_of
from trl_packing.run.run import Run
from trl_packing.run.sampling import Sampling

MAX_LENGTHS = tuple(512 * 2**i for i in range(7))  # 512 … 32,768
RANKS = (1, 2, 4, 8, 16, 64)

# A smaller share of tokens that all documents could save together is not shown.
_LEAST_SHARED = 0.01


class PlannedEpoch:
    """The micro-batches of all ranks in the epoch of a sampler, in the order of training.

    `members` are the documents of each. `documents`, `tokens` and `costs` (tokens + c · Σ len²)
    are ``(micro-batches,)``; tokens are those that groups compute.
    """

    def __init__(self, sampler: PackedBatchSampler):
        self.drawn = sampler.drawn()
        self.members = sampler.micro_batches()
        self.documents = np.diff(self.drawn.ends, prepend=0)
        squares = sampler.lengths.astype(np.int64) ** 2
        squares = squares if sampler.groups is None else sampler.groups.squares
        self.tokens = sampler.tokens()
        self.costs = self.tokens + sampler.attention_cost * self.drawn.sums(squares)
        self.ranks, self.slots = sampler.num_ranks, sampler.slots
        self.steps = -(-len(self.members) // self.slots)

    def by_step(self, values: np.ndarray) -> np.ndarray:
        """Return sums of values of micro-batches over each step, ``(steps,)``."""
        return np.add.reduceat(values, np.arange(0, len(values), self.slots))

    def waiting(self) -> float:
        """Return the share of all ranks' time in which they wait for the costliest one."""
        together = self.costs.reshape(-1, self.ranks)
        return float(1 - together.sum() / (together.max(axis=1).sum() * self.ranks))


@dataclass(frozen=True)
class Variant:
    """The epoch of a run's documents under other settings.

    Attributes:
        tokens: real ones; with groups, those that their rows compute.
        computed: the same with padding.
        largest: tokens of a micro-batch, padding included.
        bins: None where nothing is packed into bins.
        counts: losses of the overflow policy.
        prefixes_per_step: mean number of groups in a step; None without groups.
    """

    name: str
    is_run: bool = False
    steps: int = 0
    documents_per_step: float = 0.0
    tokens: int = 0
    computed: int = 0
    largest: int = 0
    waiting: float = 0.0
    bins: int | None = None
    max_length: int | None = None
    counts: PreparationCounts = field(default_factory=PreparationCounts)
    prefixes_per_step: float | None = None

    @property
    def padding(self) -> float:
        """Share of padding in the computed tokens."""
        return 1 - self.tokens / self.computed

    @property
    def utilization(self) -> float | None:
        """Tokens / (bins × max_length); None without bins."""
        room = (self.bins or 0) * (self.max_length or 0)
        return self.counts.after.tokens / room if room else None

    @property
    def too_long(self) -> str:
        """Documents that are longer than max_length, and are therefore cut or dropped."""
        number = sum(stage.affected for stage in self.counts.stages if not stage.is_untrained)
        return f"{number:,} ({number / self.counts.before.documents:.1%})" if number else "0"

    @property
    def lost(self) -> str:
        """Tokens that are cut off or dropped."""
        lost = self.counts.before.tokens - self.counts.after.tokens
        return f"{lost:,} ({lost / self.counts.before.tokens:.1%})" if lost else "0"


def variant_of(
    sampling: Sampling,
    lengths: np.ndarray,
    facts: Any,
    name: str,
    *,
    is_run: bool,
    shared: PrefixIndex | None = None,
) -> Variant:
    """Return the epoch of documents of these lengths, with the `facts` of `Sampling.facts`.

    `shared` are the prefixes that documents share within a row; None if they do not.
    """
    sampler = sampling.sampler(lengths, **facts)
    epoch = PlannedEpoch(sampler)
    tokens = epoch.tokens
    if shared is not None:
        ends = np.append(0, epoch.drawn.ends)
        tokens = shared.computed_tokens(lengths, epoch.drawn.documents, ends)
    computed = computed_tokens(sampling, tokens)
    return Variant(
        name,
        is_run,
        steps=epoch.steps,
        documents_per_step=int(epoch.documents.sum()) / epoch.steps,
        tokens=int(epoch.tokens.sum()),
        computed=int(computed.sum()),
        largest=int(computed.max()),
        waiting=epoch.waiting(),
        bins=sampler.num_bins,
        max_length=sampling.args.max_length,
        prefixes_per_step=sampler.groups_per_step(),
    )


def computed_tokens(sampling: Sampling, tokens: np.ndarray) -> np.ndarray:
    """Return the tokens that micro-batches of `tokens` compute, with the padding of rows."""
    multiple = sampling.static_tokens or sampling.args.pad_to_multiple_of or 1
    return -(-np.maximum(tokens, 1) // multiple) * multiple


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The first epoch of a run, and the same documents under other settings.

    Attributes:
        documents: prepared, in the order of the data set.
        bins: None where nothing is packed into bins.
        whole: documents of any length; None if the rows stay as they are.
        what_if: other values of max_length; none where more than lengths decides bins.
        sharing: none where documents share nothing.
    """

    run: Run
    report: PackingReport
    documents: ArrowDocuments
    epoch: PlannedEpoch
    bins: PackingPlan | None
    whole: WholeDocuments | None
    what_if: tuple[Variant, ...]
    ways: tuple[Variant, ...]
    ranks: tuple[Variant, ...]
    sharing: tuple[Variant, ...]

    @property
    def grouped(self) -> bool:
        """Whether bins or steps hold groups of documents with a common prefix."""
        return self.report.prefixes is not None and self.report.prefixes.per_step is not None

    def lengths_before(self) -> np.ndarray:
        """Return the tokens of each document before any was cut, ``(documents,)``."""
        if self.whole is not None:
            return token_documents(self.whole.documents).lengths()
        if SEQ_LENGTHS not in self.documents.columns:
            return self.documents.lengths()
        return np.concatenate([row[SEQ_LENGTHS] for row in self.documents])


def plan_run(run: Run, *, ranks: int = 1) -> RunPlan:
    """Return the plan of the first epoch of `run` on `ranks` data-parallel processes."""
    sampling = Sampling.before(run, ranks)
    whole = run.whole_documents()
    prepared, counts = run.documents() if whole is None else fit_documents(whole, run.rules)
    report, documents = _first_epoch(sampling, prepared, counts)
    sampler, _, facts = sampling.planned(documents)
    lengths = documents.lengths()
    own = run.args.max_length
    what_if: Iterable[Variant] = ()
    # Documents that are cut elsewhere have other numbers, patches and common prefixes.
    others = facts["draw"], facts["groups"], facts["numbers"], sampling.options.max_patches
    if whole is not None and all(other is None for other in others):
        limits = sorted({*MAX_LENGTHS, own} - {None}) + [None] * (own is None)
        what_if = other_max_lengths(whole, run.rules, sampling, limits)
    on_ranks = []
    for number in sorted({*RANKS, ranks}):
        with suppress(ValueError):  # documents that do not fill a micro-batch of every rank
            other = sampling.changed(ranks=number)
            is_run = number == ranks
            if number <= len(lengths):
                on_ranks.append(variant_of(other, lengths, facts, f"{number:,}", is_run=is_run))
    return RunPlan(
        run=run,
        report=report,
        documents=documents,
        epoch=PlannedEpoch(sampler),
        bins=None if sampler.rows else sampler.plan(),
        whole=whole,
        what_if=tuple(what_if),
        ways=() if sampler.rows else ways_to_batch(lengths, sampling, facts),
        ranks=tuple(on_ranks),
        sharing=_ways_to_share(documents, sampling, facts),
    )


def other_max_lengths(
    whole: WholeDocuments, rules: Rules, sampling: Sampling, max_lengths: Iterable[int | None]
) -> Iterator[Variant]:
    """Yield the plan for each max_length that the run does not refuse."""
    documents = token_documents(whole.documents)
    longest = int(documents.lengths().max(initial=0))
    before = count_whole(documents, rules.eos.stop_ids)
    for limit in max_lengths:
        if rules.overflow.policy == "error" and limit is not None and longest > limit:
            continue  # the run would be refused
        policy = replace(rules.overflow, capacity=limit)
        pieces, counts = fit(documents, policy, rules.eos.stop_ids, before)
        numbered = Dataset.from_dict({"length": pieces.sizes})
        lengths = pieces.sizes[stored_rows(shuffle(numbered, rules, fitted=True))]
        other = sampling.changed(max_length=limit)
        is_run = limit == sampling.args.max_length
        name = "no limit" if limit is None else f"{limit:,}"
        with suppress(ValueError):  # no document is left
            yield replace(variant_of(other, lengths, {}, name, is_run=is_run), counts=counts)


def ways_to_batch(lengths: np.ndarray, sampling: Sampling, facts: Any) -> tuple[Variant, ...]:
    """Return how padded batches, bins, and steps of a fixed number of documents compare."""
    args = sampling.args
    given = sampling.options.documents_per_step
    size = padded_batch_size(args.per_device_train_batch_size, packing=args.packing)
    settings = {"documents_per_step": None, "per_device_train_batch_size": size}
    padded = sampling.changed(packing=False, **settings)
    sampler = padded.sampler(lengths, **facts | {"groups": None, "numbers": None})
    ways = [_padded(sampler, size, args.pad_to_multiple_of or 1)]
    if args.max_length is not None:
        packed = sampling.changed(packing=True, documents_per_step=None)
        is_run = args.packing and given is None
        ways.append(variant_of(packed, lengths, facts, "packed into bins", is_run=is_run))
    number = given or sampler.documents_per_step
    fixed = sampling.changed(documents_per_step=number, static_shapes=False)
    is_run = given is not None or not args.packing
    name = f"documents_per_step={number}"
    apart = facts | {"groups": None}
    return (*ways, variant_of(fixed, lengths, apart, name, is_run=is_run))


def _padded(sampler: PackedBatchSampler, size: int, multiple: int) -> Variant:
    """Return the padded run of transformers: rows of a micro-batch are as long as the longest."""
    per_step = sampler.documents_per_step or 1
    lengths = sampler.lengths[sampler.drawn().documents]
    starts = np.arange(0, len(lengths), size)
    steps = -(-len(lengths) // per_step)
    longest = -(-np.maximum.reduceat(lengths, starts) // multiple) * multiple
    return Variant(
        name=f"padded in batches of {size}, {quantity(per_step, 'document')} a step",
        steps=steps,
        documents_per_step=len(lengths) / steps,
        tokens=int(lengths.sum()),
        computed=int((longest * np.diff(starts, append=len(lengths))).sum()),
    )


def _ways_to_share(
    documents: ArrowDocuments, sampling: Sampling, facts: Any
) -> tuple[Variant, ...]:
    """Return the epoch with each value; nothing if documents have hardly a prefix in common."""
    # A mixture draws some documents several times; equal tokens of images may stand for others.
    known = facts["rows"], facts["draw"], facts["loads"]
    if sampling.options.static_shapes or known != (False, None, None):
        return ()
    index = sampling.prefix_index(documents)
    lengths = documents.lengths()
    in_one_row = index.computed_tokens(lengths, index.order, np.array([0, len(lengths)]))
    if in_one_row[0] > (1 - _LEAST_SHARED) * lengths.sum():
        return ()
    ways: dict[str, Any] = {"off": (None, None), "bin": (None, index)}
    is_fixed = sampling.options.documents_per_step or not sampling.args.packing
    if find_strategy(sampling.args.packing_strategy).shuffles and not is_fixed:
        ways["group"] = (sampling.groups(documents), index)
    own = sampling.options.prefix_sharing
    return tuple(
        variant_of(
            sampling, lengths, facts | {"groups": groups}, name, is_run=name == own, shared=shared
        )
        for name, (groups, shared) in ways.items()
    )


def preview_epoch(run: Run, *, ranks: int = 1) -> PackingReport:
    """Return the report that the trainer would print before an epoch on `ranks` processes."""
    return _first_epoch(Sampling.before(run, ranks), *run.documents())[0]


def _first_epoch(
    sampling: Sampling, prepared: Dataset, counts: PreparationCounts | None
) -> tuple[PackingReport, ArrowDocuments]:
    """Return the report on an epoch of prepared documents, and what it reads of them."""
    documents = token_documents(prepared)
    sampler, mixture, _ = sampling.planned(documents)
    columns = prepared.column_names
    found = {"columns": columns, "mixture": mixture, "preparation": counts}
    return report_of(sampling, documents, sampler, **found), documents


def token_documents(prepared: Dataset) -> ArrowDocuments:
    """Return the tokens, labels and boundaries of prepared documents."""
    columns = [*token_columns(prepared.column_names), SEQ_LENGTHS]
    return ArrowDocuments(prepared, [c for c in columns if c in prepared.column_names])
