"""A preview of a run: its rows prepared exactly as the trainer prepares them, before it starts.

a row          →  documents, by the trainer's code  →  text with the trained tokens marked
all rows       →  documents and counts              →  what preparation loses
all documents  →  bins and optimizer steps          →  the report that the trainer would print
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, token_columns
from trl_packing.documents.weights import in_words
from trl_packing.formatting.printable import escape_hidden
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.preview.show import show_document
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.mixture import mixture_of
from trl_packing.training.run_report import order_in_words, plan_report, settings_in_steps
from trl_packing.training.sampling import Sampling


@dataclass(frozen=True)
class RowPreview:
    """One row of a data set as text: its documents, or the reason why none of it is trained.

    Attributes:
        row: its number.
        documents: each document as text, with its trained tokens marked.
        tokens: `input_ids`, `labels` and weights of each document.
        reason: why there is no document.
    """

    row: int
    documents: tuple[str, ...]
    tokens: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts to print: one for each document, or the reason."""
        return self.documents or (f"row {self.row} · not trained: {self.reason}",)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: the columns of its documents, and their text."""
        documents = [
            {"text": text, **{name: _as_list(column) for name, column in tokens.items()}}
            for text, tokens in zip(self.documents, self.tokens, strict=True)
        ]
        return {"row": self.row, "documents": documents, "reason": self.reason}


def _as_list(column: Any) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) else column


def preview_rows(
    run: PreviewedRun, rows: Sequence[int] | None = None, *, color: bool = False
) -> Iterator[RowPreview]:
    """Yield each of `rows` as the run would train it.

    Args:
        run: the run.
        rows: row numbers; None shows the first three.
        color: mark trained tokens by color, for a terminal.

    Raises:
        ValueError: a row does not exist. No row is yielded then.
    """
    number = len(run.dataset)
    rows = range(min(3, number)) if rows is None else rows
    for row in rows:
        if not 0 <= row < number:
            raise ValueError(f"row {row} is not among the {number:,} rows of the data set")
    for row in rows:
        documents, reason = run.documents_of_row(row)
        unit = "document" if run.preparation.row_format.makes_turns else "piece"
        pieces = [f", {unit} {i + 1} of {len(documents)}" for i in range(len(documents))]
        texts = [
            show_document(
                document,
                run.preparation.eos.tokenizer,
                color=color,
                name=f"row {row}{piece if len(documents) > 1 else ''}",
            )
            for document, piece in zip(documents, pieces, strict=True)
        ]
        yield RowPreview(row, tuple(texts), tuple(documents), escape_hidden(reason))


def preview_losses(run: PreviewedRun) -> str:
    """Return a sentence for each thing that preparing the whole data set loses."""
    _, counts = run.documents()
    lost = str(counts) if counts is not None else ""
    turns = str(counts.conversations) if counts is not None else ""
    rows = f"{len(run.dataset):,} rows" + f"\n{turns}" * bool(turns)
    return f"{rows}\n{lost or 'Nothing is lost.'}"


def preview_epoch(run: PreviewedRun, *, ranks: int = 1) -> PackingReport:
    """Return the report that the trainer would print before an epoch.

    Args:
        run: the run.
        ranks: data-parallel processes.

    Raises:
        ValueError: `ranks` is below 1, or preparation refuses the data.
    """
    prepared, counts = run.documents()
    documents, sampler = plan_of(run, prepared, ranks=ranks)
    return report_on(run, documents, sampler, counts)


def plan_of(
    run: PreviewedRun, prepared: Dataset, *, ranks: int = 1
) -> tuple[ArrowDocuments, PackedBatchSampler]:
    """Return the prepared documents of `run`, and the sampler of rank 0; as `preview_epoch`."""
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    columns = [*token_columns(prepared.column_names), SEQ_LENGTHS]
    documents = ArrowDocuments(prepared, [c for c in columns if c in prepared.column_names])
    return documents, sampler_of(run, documents, ranks=ranks)


def sampler_of(
    run: PreviewedRun, documents: ArrowDocuments, *, ranks: int = 1
) -> PackedBatchSampler:
    """Return the sampler of rank 0 that trains the prepared `documents` of `run`."""
    return sampling_of(run, ranks=ranks).for_training(documents)


def sampling_of(run: PreviewedRun, *, ranks: int = 1) -> Sampling:
    """Return what draws the micro-batches of `run`."""
    # An image belongs to one document.
    groups = PackingOptions.of(run.args).prefix_sharing == "group" and not run.images.packs
    return Sampling(
        run.args,
        run.args.packing,
        batch_size=run.args.per_device_train_batch_size,
        ranks=(ranks, 0),
        hidden_size=run.hidden_size,
        draws_groups=lambda training: groups,
        image_loads=run.images.loads,
    )


def report_on(
    run: PreviewedRun,
    documents: ArrowDocuments,
    sampler: PackedBatchSampler,
    counts: PreparationCounts | None,
) -> PackingReport:
    """Return the report on what `plan_of` returns."""
    options = PackingOptions.of(run.args)
    report = plan_report(
        documents,
        sampler,
        attention=None,
        loss=in_words(options.loss_weighting, documents.dataset.column_names),
        preparation=counts or PreparationCounts(),
        prefix_sharing=options.prefix_sharing,
        tokens_per_micro_batch=_static_tokens(run.args),
        given_in_steps=settings_in_steps(run.args),
        mixture=mixture_of(documents, run.args),
        order=order_in_words(run.args, sampler),
        packing=run.args.packing,
    )
    may_group = sampler.groups is None and find_strategy(run.args.packing_strategy).shuffles
    may_group &= sampler.draw is None
    if report.prefixes is None or sampler.rows or not may_group:
        return report
    groups = sampling_of(run).groups(documents)
    return replace(report, prefixes=report.prefixes.beside_groups(groups))


def _static_tokens(args: Any) -> int | None:
    """Return the tokens of every micro-batch with `static_shapes`, None without."""
    if not PackingOptions.of(args).static_shapes:
        return None
    multiple = args.pad_to_multiple_of or 1
    return -(-args.max_length * args.per_device_train_batch_size // multiple) * multiple
