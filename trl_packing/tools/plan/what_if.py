"""The same documents under other settings, each really planned: max_length, padding, ranks.

documents of any length  →  the run's overflow policy at another max_length  →  bins, steps
documents that fit       →  padded | packed | documents_per_step              →  steps, tokens
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.data.counting import count_without_cutting
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.preparation import Unfitted, shuffle_fitted
from trl_packing.data.rules import Preparation
from trl_packing.documents.arrow import ArrowDocuments, stored_rows
from trl_packing.documents.labels import token_columns
from trl_packing.packing.curriculum import LENGTH
from trl_packing.packing.document_order import document_order
from trl_packing.packing.draw import MixtureDraw
from trl_packing.packing.epoch import padded_batch_size
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.prefix_groups import PrefixGroups
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.tools.plan.planned_epoch import PlannedEpoch
from trl_packing.training.sampler_settings import SamplerSettings

MAX_LENGTHS = tuple(512 * 2**i for i in range(7))  # 512 … 32,768


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

    def with_groups(self, groups: PrefixGroups | None) -> "Setup":
        """Return the same setup for other groups."""
        return replace(self, groups=groups)

    def of_tokens_alone(self) -> "Setup":
        """Return the same setup for documents of which only the number of tokens is known."""
        return replace(self, groups=None, loads=None)

    def changed(self, *, ranks: int | None = None, **settings: Any) -> "Setup":
        """Return the same setup with other ranks or `args`."""
        args = copy.copy(self.args)
        for name, value in settings.items():
            setattr(args, name, value)
        return replace(self, args=args, ranks=ranks or self.ranks)

    def sampler(self, lengths: np.ndarray, *, rows: bool = False) -> PackedBatchSampler:
        """Return the sampler of rank 0 for documents, or packed rows, of these lengths."""
        args, loads = self.args, self.loads
        settings = SamplerSettings(
            args,
            args.packing,
            args.per_device_train_batch_size,
            self.ranks,
            hidden_size=self.hidden_size,
        )
        if loads is not None and loads.most_patches is None:
            loads = settings.limited_loads(loads, lengths, self.draw)
        return settings.sampler_of_lengths(
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


# --- max_length -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WhatIf:
    """A plan of the run's documents with another max_length.

    Attributes:
        max_length: None without a limit.
        refused: the reason why the run would not start; the other numbers are 0 then.
        counts: losses of the overflow policy.
        bins: None where nothing is packed into bins.
        utilization: tokens / (bins × max_length); None without bins.
        steps: optimizer steps of an epoch.
        documents_per_step: mean over them.
        largest: tokens of the largest micro-batch, padding included.
    """

    max_length: int | None
    refused: str = ""
    counts: PreparationCounts = field(default_factory=PreparationCounts)
    bins: int | None = None
    utilization: float | None = None
    steps: int = 0
    documents_per_step: float = 0.0
    largest: int = 0

    @property
    def num_cut(self) -> int:
        """Documents that are longer than max_length, and are therefore cut or dropped."""
        return sum(stage.affected for stage in self.counts.stages if "max_length" in stage.why)

    @property
    def lost(self) -> float:
        """Share of the tokens that is lost."""
        before = self.counts.before.tokens
        # Pieces that overlap have more tokens than their documents.
        return max(before - self.counts.after.tokens, 0) / before if before else 0.0


def other_max_lengths(
    whole: Unfitted, rules: Preparation, setup: Setup, max_lengths: Iterable[int | None]
) -> Iterator[WhatIf]:
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
            yield WhatIf(limit, refused=f"a document has {longest:,} tokens")
            continue
        lengths, counts = next(counted)
        yield _planned(lengths, counts, rules, setup.changed(max_length=limit))


def _planned(
    lengths: np.ndarray, counts: PreparationCounts, rules: Preparation, setup: Setup
) -> WhatIf:
    limit = setup.args.max_length
    if not counts.after.trained:
        return WhatIf(limit, refused="no trained token is left", counts=counts)
    shuffled = shuffle_fitted(Dataset.from_dict({"length": lengths}), rules)
    try:
        sampler = setup.sampler(lengths[stored_rows(shuffled)])
    except ValueError as error:
        return WhatIf(limit, refused=str(error), counts=counts)
    epoch = PlannedEpoch.from_sampler(sampler)
    bins = sampler.num_bins
    return WhatIf(
        limit,
        counts=counts,
        bins=bins,
        utilization=counts.after.tokens / (bins * limit) if bins and limit else None,
        steps=epoch.steps,
        documents_per_step=len(lengths) / epoch.steps,
        largest=int(setup.computed(epoch.tokens).max()),
    )


# --- padded, packed, documents_per_step -----------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to batch the documents of a run.

    Attributes:
        name: of the way.
        steps: optimizer steps of an epoch.
        documents_per_step: mean over them.
        tokens: real ones of an epoch; with groups, those that their rows compute.
        computed: the same with padding.
        is_run: the run takes this way.
    """

    name: str
    steps: int
    documents_per_step: float
    tokens: int
    computed: int
    is_run: bool = False

    @property
    def padding(self) -> float:
        """Share of padding in the computed tokens."""
        return 1 - self.tokens / self.computed


def ways_to_batch(lengths: np.ndarray, setup: Setup) -> Sequence[Way]:
    """Return how padded batches, bins, and steps of a fixed number of documents compare.

    Args:
        lengths: tokens of the documents that fit, in the order of the data set.
        setup: of the run.
    """
    args = setup.args
    given = getattr(args, "documents_per_step", None)
    size = padded_batch_size(args.per_device_train_batch_size, packing=args.packing)
    padded = setup.changed(
        packing=False, documents_per_step=None, per_device_train_batch_size=size
    ).with_groups(None)
    sampler = padded.sampler(lengths)
    of_padded = sampler.documents_per_step
    assert of_padded is not None
    ways = [_padded(lengths, sampler, padded)]
    if args.max_length is not None:
        packed = setup.changed(packing=True, documents_per_step=None)
        ways.append(_way("packed into bins", packed, lengths, args.packing and given is None))
    name = f"documents_per_step={given or of_padded}"
    fixed = setup.changed(documents_per_step=given or of_padded, static_shapes=False)
    ways.append(_way(name, fixed, lengths, given is not None or not args.packing))
    return ways


def _way(name: str, setup: Setup, lengths: np.ndarray, is_run: bool) -> Way:
    epoch = PlannedEpoch.from_sampler(setup.sampler(lengths))
    documents, tokens = int(epoch.documents.sum()), int(epoch.tokens.sum())
    computed = int(setup.computed(epoch.tokens).sum())
    return Way(name, epoch.steps, documents / epoch.steps, tokens, computed, is_run)


def _padded(lengths: np.ndarray, sampler: PackedBatchSampler, setup: Setup) -> Way:
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
    return Way(
        f"padded in batches of {size}, {quantity(per_step, 'document')} a step",
        steps,
        len(drawn) / steps,
        int(drawn.sum()),
        computed,
    )


# --- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnRanks:
    """The plan of a run on a number of data-parallel ranks.

    Attributes:
        ranks: their number.
        steps: optimizer steps of an epoch.
        documents_per_step: mean over them.
        waiting: share of the ranks' time in which they wait for the costliest one.
    """

    ranks: int
    steps: int
    documents_per_step: float
    waiting: float


def on_ranks(
    lengths: np.ndarray, setup: Setup, numbers: Iterable[int], *, rows: bool = False
) -> Iterator[OnRanks]:
    """Yield the plan for each number of ranks that has a document for every rank."""
    for ranks in numbers:
        try:
            sampler = setup.changed(ranks=ranks).sampler(lengths, rows=rows)
        except ValueError:  # too few documents, or a fixed number of them for each step
            continue
        epoch = PlannedEpoch.from_sampler(sampler)
        documents = float(epoch.documents_by_step.mean())
        yield OnRanks(ranks, epoch.steps, documents, epoch.waiting())
