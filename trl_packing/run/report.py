"""`PackingReport`: the documents, bins and optimizer steps of an epoch, printed before the first.

documents, sampler, settings  →  report_of  →  PackingReport
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from trl_packing.data.counts import (
    Line,
    PreparationCounts,
    decimals,
    quantity,
    times,
    times_fewer,
)
from trl_packing.data.printable import escape_hidden
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS
from trl_packing.documents.weights import in_words
from trl_packing.isolation.guard import Checked
from trl_packing.packing.epoch import padded_batch_size
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.pages.page import REPORT, render, storable
from trl_packing.run.sampling import Sampling
from trl_packing.run.sources import Mixture, SourceShare

_MOST_BATCHES = 20_000  # looked at for the one with most patches
_STEPS_LOOKED_AT = 200  # for the largest micro-batch, in well under a second


# Of the tokens and documents that are looked at: about a tenth of a second.
_MOST_TOKENS, _MOST_DOCUMENTS, _FEWEST_BATCHES = 4_000_000, 50_000, 8

# Shares of the tokens: for a check of the model, and for another setting to be named.
_WORTH_SHARING, _WORTH_A_LINE = 0.005, 0.05


@dataclass(frozen=True)
class PrefixSavings:
    """Tokens of micro-batches: those of their documents, and those computed where these share."""

    sharing: str  # `prefix_sharing` of the run
    tokens: int = 0  # of the documents looked at; 0 if none were
    computed: int = 0  # of their rows with shared prefixes, without padding
    is_whole: bool = False  # all micro-batches of the epoch were looked at
    reason: str | None = None  # why the run does not share, though it was asked to
    per_step: float | None = None  # mean number of groups in an optimizer step

    @property
    def saved(self) -> float:
        """Return the share of the documents' tokens that is not computed."""
        return 1 - self.computed / self.tokens if self.tokens else 0.0

    @property
    def pays(self) -> bool:
        """Return whether sharing is worth its check; unknown savings may be."""
        return not self.tokens or self.saved >= _WORTH_SHARING

    @property
    def is_shared(self) -> bool:
        """Return whether the run shares prefixes, of which something is known."""
        return self.sharing != "off" and self.tokens > 0 and self.pays and not self.reason

    def __str__(self) -> str:
        """Return the line of the report; "" where there is nothing to say."""
        if self.reason and (not self.tokens or (self.pays and self.sharing != "off")):
            return f"not shared: {self.reason}"
        if not self.tokens:
            return ""
        fewer = "" if self.is_whole else "about "
        fewer += f"{times_fewer(self.tokens, self.computed)} tokens"
        if self.sharing == "off":
            is_much = self.saved >= _WORTH_A_LINE
            return f"prefix_sharing='bin' would compute {fewer}" if is_much else ""
        if not self.pays:
            return "nothing to share: documents begin differently, or labels are other tokens"
        prefixes = "" if self.per_step is None else f" · {self.per_step:,.1f} prefixes a step"
        return f"{fewer} computed{prefixes}"


def prefix_savings(
    documents: ArrowDocuments, sampler: PackedBatchSampler, sharing: str
) -> PrefixSavings:
    """Return what `sharing`, of the run, saves in the sampler's epoch of `documents`."""
    if sampler.rows:  # several documents each, which are not known here
        return PrefixSavings(sharing)
    total = len(sampler) * sampler.num_ranks  # micro-batches
    tokens = int(sampler.lengths.sum())
    most = min(_MOST_TOKENS * total // tokens, _MOST_DOCUMENTS * total // len(documents))
    batches = sampler.micro_batches(max(most, _FEWEST_BATCHES))
    looked_at = documents.__getitems__(np.concatenate(batches))
    lengths = np.array([len(document["input_ids"]) for document in looked_at])
    offsets = np.cumsum([0, *map(len, batches)])
    index = PrefixIndex.of_loaded(looked_at)
    return PrefixSavings(
        sharing,
        int(lengths.sum()),
        int(index.computed_tokens(lengths, np.arange(len(lengths)), offsets).sum()),
        is_whole=len(batches) == total,
        per_step=sampler.groups_per_step(),
    )


@dataclass(frozen=True)
class ImageCounts:
    """Images of the documents of an epoch."""

    images: int
    documents: int  # with an image
    tokens: int  # that come from images
    share: float  # of these in all tokens
    patches: int  # positions of the vision tower
    most_patches: int  # in a micro-batch

    @classmethod
    def of(cls, sampler: PackedBatchSampler) -> "ImageCounts | None":
        """Return the counts of the epoch that `sampler` draws next; None without images."""
        loads = sampler.loads
        if loads is None:
            return None
        batches = sampler.micro_batches(_MOST_BATCHES)
        # A mixture draws some documents repeatedly.
        values = (loads.images, loads.tokens, loads.patches, sampler.lengths)
        images, tokens, patches, lengths = map(sampler.at_places, values)
        return cls(
            images=int(images.sum()),
            documents=int((images > 0).sum()),
            tokens=int(tokens.sum()),
            share=float(tokens.sum() / lengths.sum()),
            patches=int(patches.sum()),
            most_patches=max(int(loads.patches[np.asarray(batch)].sum()) for batch in batches),
        )

    def __str__(self) -> str:
        return (
            f"{self.images:,} in {quantity(self.documents, 'document')} · {self.tokens:,} tokens "
            f"({self.share:.0%}) · {self.patches:,} patches, up to {self.most_patches:,} a "
            "micro-batch"
        )


@dataclass(frozen=True)
class DataReport:
    """The documents that an epoch draws, and what was lost before."""

    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    documents_in_data: int | None = None
    preparation: PreparationCounts = field(default_factory=PreparationCounts)
    sources: tuple[SourceShare, ...] = ()
    images: ImageCounts | None = None


@dataclass(frozen=True)
class EpochReport:
    """The micro-batches and optimizer steps of an epoch."""

    bins: int | None = None
    micro_batches_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    documents_per_step: float | None = None
    room: int | None = None
    tokens_computed: int | None = None
    order: str = ""
    prefixes: PrefixSavings | None = None
    longer_documents: int = 0


@dataclass(frozen=True)
class StepReport:
    """What an optimizer step is made of, as the settings say."""

    ranks: int = 1
    accumulation: int = 1
    micro_batch: str = ""
    capacity: int | None = None
    tokens_per_micro_batch: int | None = None
    padded_documents_per_step: int | None = None
    given_in_steps: dict[str, int] = field(default_factory=dict)
    loss: str | None = None
    ranks_of_row: int = 1
    tokens_per_forward: int | None = None
    has_chunks: bool = False


@dataclass(frozen=True, repr=False)
class PackingReport(DataReport, EpochReport, StepReport):
    """The documents, bins and optimizer steps of the first epoch of a run.

    Counts are None where a data set has no length (a stream), `bins` where nothing is packed.

    Attributes:
        ranks: data-parallel processes, or groups of processes that share their rows.
        accumulation: micro-batches that a rank accumulates in an optimizer step.
        micro_batch: its size in words.
        capacity: most tokens of a bin.
        micro_batches_per_epoch: of all ranks.
        documents_per_step: mean over the optimizer steps of the epoch.
        padded_documents_per_step: of a padded run with the same settings.
        tokens_per_micro_batch: padding included; None unless static shapes hold it constant.
        given_in_steps: settings that count optimizer steps, by name.
        room: tokens that fit into a micro-batch; without bins, those of the largest at first.
        precision: why it is not TRL's default, in words; None where it is, or the user chose it.
        checked: what was checked on the model, with the evidence.
        prefixes: tokens that documents share, and what the run makes of it; None if unknown.
        tokens_computed: in all bins, where these hold groups of documents; else None.
        sources: of the training set, and how often the epoch draws them; empty if not known.
        documents_in_data: of the data set, where the epoch draws a mixture of them; else None.
        order: of the documents of an epoch, in words; "" if they are drawn at random.
        ranks_of_row: processes that share each row.
        tokens_per_forward: most of a forward; micro-batches with more have several. None: any.
        longer_documents: documents of the training set with more of them.
        has_chunks: these run in chunks; else each is a forward of its own.
    """

    attention: str | None = None
    precision: str | None = None
    checked: Checked = field(default_factory=Checked)

    @property
    def utilization(self) -> float | None:
        """Real tokens / (bins × capacity); None without bins or without capacity."""
        if self.tokens is None or not self.bins or not self.capacity:
            return None
        return (self.tokens_computed or self.tokens) / (self.bins * self.capacity)

    @property
    def padded_steps(self) -> int | None:
        """Optimizer steps an epoch of a padded run with the same settings; None for packed rows."""
        if self.documents is None or self.padded_documents_per_step is None:
            return None
        return -(-self.documents // self.padded_documents_per_step)

    def to_json(self) -> str:
        """Return the report as one line of JSON. Numbers that are not finite become strings."""
        return json.dumps(storable(asdict(self) | {"utilization": self.utilization}))

    def __repr__(self) -> str:
        return as_text(self.lines())

    def _repr_html_(self) -> str:
        return render(REPORT, report=self.lines())

    def lines(self) -> list[Line]:
        """Return the lines of the report."""
        lines = [
            Line("turns", self.preparation.turns_in_words()),
            Line("documents", self._documents()),
            *_source_lines(self.sources),
            Line("images", str(self.images or "")),
            *self._rows(),
            Line("prefixes", str(self.prefixes or "")),
            *self._epoch(),
            Line("order", self.order),
            *self._padded(),
            Line("loss", self.loss or ""),
            Line("attention", self.attention or ""),
            Line("precision", self.precision or ""),
            Line("checked", str(self.checked)),
            *self.preparation.lines(),
        ]
        return [line for line in lines if line.text]

    def _documents(self) -> str:
        if self.documents is None or not self.tokens or self.trained_tokens is None:
            read = self.preparation.before
            if not read.documents:
                return "a stream: counted as it is read"
            return f"a stream: read so far {quantity(read.documents, 'document')} · {read}"
        drawn = "" if self.documents_in_data is None else f" drawn of {self.documents_in_data:,}"
        return (
            f"{self.documents:,}{drawn} · {self.tokens:,} tokens · {self.trained_tokens:,} trained"
            f" ({self.trained_tokens / self.tokens:.0%})"
        )

    def _rows(self) -> list[Line]:
        rows = [Line("micro-batch", self.micro_batch)]
        constant = self.tokens_per_micro_batch or 0
        if self.utilization is not None:
            bins = f"{quantity(self.bins or 0, 'bin')} of {self.capacity:,} tokens"
            rows = [Line("packed into", f"{bins} · {self.utilization:.2%} filled")]
        elif self.bins is not None:
            rows = [Line("packed into", f"{self.bins:,} rows")]
        if self.ranks_of_row > 1:
            rows.append(Line("divided", f"each row over {self.ranks_of_row} ranks"))
        if self.tokens_per_forward is not None:
            forwards = f"at most {self.tokens_per_forward:,} tokens each"
            if self.longer_documents:
                ways = "in chunks" if self.has_chunks else "each a forward of its own"
                forwards += f" · {quantity(self.longer_documents, 'longer document')}: {ways}"
            rows.append(Line("forwards", forwards))
        if constant:
            rows.append(Line("shapes", f"every micro-batch has {constant:,} tokens"))
        return rows

    def _epoch(self) -> list[Line]:
        steps = self.steps_per_epoch
        batches = self.micro_batches_per_epoch
        if steps is None or batches is None:
            return []
        most = None if self.tokens_per_micro_batch else self.room
        epoch = f"{quantity(steps, 'optimizer step')} · {quantity(batches, 'micro-batch')}"
        epoch += f" · up to {most:,} tokens a micro-batch" if most else ""
        documents = f"{self.documents_per_step:,.1f}".removesuffix(".0")
        ranks = quantity(self.ranks, "rank")
        if self.ranks_of_row > 1:
            ranks = f"{quantity(self.ranks, 'group')} of {self.ranks_of_row} ranks"
        step = (
            f"{documents} document{'s' * (documents != '1')} · "
            f"{(self.trained_tokens or 0) / steps:,.0f} trained tokens · "
            f"{ranks} × {self.accumulation} accumulated × {self.micro_batch}"
        )
        return [Line("an epoch", epoch), Line("a step", step)]

    def _padded(self) -> list[Line]:
        """Return the steps of a padded run, how to keep them, and a warning for few steps."""
        steps = self.steps_per_epoch
        padded = self.padded_steps
        lines = []
        size = self.padded_documents_per_step
        if steps and padded and size and steps != padded:
            keeps = f"{quantity(size, 'document')} each (documents_per_step={size} keeps that)"
            lines.append(Line("if padded", f"{quantity(padded, 'step')} an epoch, {keeps}"))
            # A packed step may hold many padded ones.
            in_epochs = (
                f"{name}={value} is {decimals(value / steps)} epoch{'s' * (value != steps)} here, "
                f"{decimals(value / padded)} if padded"
                for name, value in self.given_in_steps.items()
            )
            lines.append(Line("", "; ".join(in_epochs)))
        if steps and steps < 20:  # fewer learn little, whatever their size
            few = f"warning: {quantity(steps, 'optimizer step')} an epoch"
            more = "a smaller documents_per_step or gradient_accumulation_steps makes more"
            read = self.preparation.before.documents
            kept = self.preparation.after.documents
            if read > 2 * kept:
                more = f"{read - kept:,} of {read:,} documents were dropped, for the reasons below"
            lines.append(Line("", f"{few}; {more}", is_warning=True))
        return lines


def _source_lines(sources: Sequence[SourceShare]) -> list[Line]:
    """Return the lines on several sources; none on a single one drawn once."""
    if len(sources) < 2 and all(source.drawn == source.documents for source in sources):
        return []
    total = max(sum(source.tokens for source in sources), 1)
    lines = [
        f"{source.name}: {times(source.epochs)} {quantity(source.documents, 'document')} · "
        f"{source.tokens:,} tokens ({source.tokens / total:.1%}) · {source.trained:,} trained"
        for source in sources
    ]
    return [Line("sources" if not i else "", line) for i, line in enumerate(lines)]


_TITLE = " trl_packing "
_LABEL = 13  # columns of a label and the space behind it


def as_text(lines: Sequence[Line]) -> str:
    """Return `lines` between two rules; long ones continue under their text."""
    columns = min(max(shutil.get_terminal_size((100, 24)).columns, 50), 100)
    wrapped = []
    options: Any = {"subsequent_indent": " " * _LABEL, "break_on_hyphens": False}
    for label, text, _ in lines:
        wrapped += textwrap.wrap(f"{label:<{_LABEL}}{escape_hidden(text)}", columns, **options)
    width = max(map(len, [*wrapped, _TITLE]))
    return "\n".join([f"{_TITLE:─^{width}}", *wrapped, "─" * width])


def report_of(
    sampling: Sampling,
    documents: ArrowDocuments | None,
    sampler: Any = None,
    *,
    columns: Sequence[str] | None,
    mixture: Mixture | None = None,
    preparation: PreparationCounts | None = None,
) -> PackingReport:
    """Return the report on the first epoch of a run.

    Args:
        sampling: settings and ranks of the run.
        documents: the training set; None for a stream, whose documents are counted as it is read.
        sampler: of one rank; of a user's, only the documents are counted.
        columns: of the training set, with its weights; None where a user's function is the loss.
        mixture: of the training set.
        preparation: what was kept and lost when documents were prepared.

    Raises:
        ValueError: documents_per_step is set for a stream.
    """
    per_step = sampling.options.documents_per_step
    if documents is None and per_step is not None:
        named = f"documents_per_step={per_step}"
        raise ValueError(f"{named} needs to know the documents of a stream; leave it out")
    ours = sampler if isinstance(sampler, PackedBatchSampler) else None
    by_bins = sampling.run.packing if documents is None else ours is not None
    data = _data_report(documents, ours, mixture, preparation or PreparationCounts())
    step = _step_report(sampling, ours, columns, by_bins=by_bins)
    epoch = EpochReport()
    if documents is not None and ours is not None:
        epoch = _epoch_report(sampling, documents, ours, data.documents or 0)
    return PackingReport(**vars(data), **vars(epoch), **vars(step))


def _data_report(
    documents: ArrowDocuments | None,
    sampler: PackedBatchSampler | None,
    mixture: Mixture | None,
    preparation: PreparationCounts,
) -> DataReport:
    """Return the report on the documents of a training set; None is a stream."""
    if documents is None:
        return DataReport(preparation=preparation)
    lengths = documents.lengths()
    trained = documents.num_trained()
    number = documents.num_documents
    in_data = None
    if sampler is not None and sampler.draw is not None:
        drawn = sampler.draw.documents(0)
        lengths = lengths[drawn]
        trained = trained[drawn]
        number = len(drawn)
        in_data = len(documents)
    return DataReport(
        number,
        int(lengths.sum()),
        int(trained.sum()),
        documents_in_data=in_data,
        preparation=preparation,
        sources=mixture.shares(documents) if mixture and sampler is not None else (),
        images=ImageCounts.of(sampler) if sampler is not None else None,
    )


def _epoch_report(
    sampling: Sampling,
    documents: ArrowDocuments,
    sampler: PackedBatchSampler,
    number: int,
) -> EpochReport:
    """Return the report on the first epoch of a sampler, which draws `number` documents."""
    options = sampling.options
    plan = sampler.plan()
    steps = -(-len(sampler) // sampling.args.gradient_accumulation_steps)
    room = sampler.tokens_per_batch
    if plan is None:
        room = int(sampler.tokens()[: _STEPS_LOOKED_AT * sampler.slots].max())
    prefixes = computed = None
    # Equal ids of images may stand for other images. Static shapes and divided rows do not share.
    shares = not sampling.static_tokens and sampling.options.sequence_parallel_size == 1
    if shares and IMAGE_IDS not in documents.columns:
        prefixes = prefix_savings(documents, sampler, options.prefix_sharing)
    if sampler.groups is not None and plan is not None:
        computed = int(plan.tokens.sum())
    order = ""
    if sampler.stages is not None:
        first = "largest" if str(options.curriculum).startswith("-") else "smallest"
        stages = quantity(len(np.unique(sampler.stages)), "stage")
        by = str(options.curriculum).removeprefix("-")
        order = f"by {by}, {first} first · {stages}, each random"
    most, longer = sampling.options.tokens_per_forward, 0
    if most is not None:
        longer = int((sampler.lengths > most).sum())
    return EpochReport(
        bins=sampler.num_bins,
        micro_batches_per_epoch=len(sampler) * sampler.num_ranks,
        steps_per_epoch=steps,
        documents_per_step=number / (steps or 1),
        room=room,
        tokens_computed=computed,
        order=order,
        prefixes=prefixes,
        longer_documents=longer,
    )


def _step_report(
    sampling: Sampling,
    sampler: PackedBatchSampler | None,
    columns: Sequence[str] | None,
    *,
    by_bins: bool,
) -> StepReport:
    """Return the report on a step of `sampler`, whose micro-batches are bins or documents."""
    args, ranks = sampling.args, sampling.ranks[0]
    documents = ranks * args.gradient_accumulation_steps  # of a step, if one a micro-batch
    size = float(sampling.batch_size)
    padded = None
    given = {}
    if sampler is not None:
        if sampler.documents_per_step is not None:
            by_bins = False
            size = sampler.documents_per_step / documents
        if not sampler.rows:
            batch = padded_batch_size(sampling.batch_size, packing=sampling.run.packing)
            padded = batch * documents
        for name in ("max_steps", "warmup_steps"):
            steps = getattr(args, name)
            if steps and steps >= 1:  # below 1 they are shares of the run
                given[name] = int(steps)
    return StepReport(
        ranks=ranks,
        accumulation=args.gradient_accumulation_steps,
        micro_batch=f"{size:g} {'bin' if by_bins else 'document'}{'s' * (size != 1)}",
        capacity=args.max_length,
        tokens_per_micro_batch=sampling.static_tokens,
        padded_documents_per_step=padded,
        given_in_steps=given,
        loss=None if columns is None else in_words(sampling.options.loss_weighting, [*columns]),
        ranks_of_row=sampling.options.sequence_parallel_size,
        tokens_per_forward=sampling.options.tokens_per_forward,
        has_chunks=sampling.options.max_tokens_in_memory is not None,
    )
