"""Previews of a run: its rows as text, and the report and collator of its trainer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.attention.backends import NATIVE_ATTENTION
from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.printable import escape_hidden
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, token_columns
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.preview.show import show_document
from trl_packing.training.report import PackingReport, report_of
from trl_packing.training.sampling import Sampling


@dataclass(frozen=True)
class RowPreview:
    """One row of a data set as text: its documents, or the reason why none of it is trained."""

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
            {"text": text, **{k: np.asarray(x).tolist() for k, x in tokens.items()}}
            for text, tokens in zip(self.documents, self.tokens, strict=True)
        ]
        return {"row": self.row, "documents": documents, "reason": self.reason}


def preview_rows(
    run: PreviewedRun, rows: Sequence[int] | None = None, *, color: bool = False
) -> Iterator[RowPreview]:
    """Yield each of `rows` as the run would train it; None: of the first three.

    Raises:
        ValueError: a row does not exist. No row is yielded then.
    """
    number, tokenizer = run.num_rows, run.preparation.eos.tokenizer
    unit = "document" if run.preparation.row_format.makes_turns else "piece"
    rows = range(min(3, number)) if rows is None else rows
    for row in rows:
        if not 0 <= row < number:
            raise ValueError(f"row {row} is not among the {number:,} rows of the data set")
    for row in rows:
        documents, reason = run.documents_of_row(row)
        texts = []
        for i, document in enumerate(documents):
            piece = f", {unit} {i + 1} of {len(documents)}" if len(documents) > 1 else ""
            texts.append(show_document(document, tokenizer, color=color, name=f"row {row}{piece}"))
        yield RowPreview(row, tuple(texts), tuple(documents), escape_hidden(reason))


def preview_losses(run: PreviewedRun) -> str:
    """Return a sentence for each thing that preparing the whole data set loses."""
    _, counts = run.documents()
    counts = counts or PreparationCounts()
    lost = str(counts) or "Nothing is lost."
    return "\n".join(filter(None, [f"{run.num_rows:,} rows", counts.turns_in_words(), lost]))


def preview_epoch(run: PreviewedRun, *, ranks: int = 1) -> PackingReport:
    """Return the report that the trainer would print before an epoch on `ranks` processes."""
    sampling = run.sampling(ranks)
    prepared, counts = run.documents()
    documents = token_documents(prepared)
    return report_on(sampling, documents, sampling.for_training(documents), counts)


def token_documents(prepared: Dataset) -> ArrowDocuments:
    """Return the tokens, labels and boundaries of prepared documents."""
    columns = [*token_columns(prepared.column_names), SEQ_LENGTHS]
    return ArrowDocuments(prepared, [c for c in columns if c in prepared.column_names])


def report_on(
    sampling: Sampling,
    documents: ArrowDocuments,
    sampler: PackedBatchSampler,
    counts: PreparationCounts | None,
) -> PackingReport:
    """Return the report on the epoch of a sampler that `sampling` has made of these documents."""
    return report_of(
        sampling,
        documents,
        sampler,
        columns=documents.dataset.column_names,
        preparation=counts,
    )


def collator_of(run: PreviewedRun) -> PackedCollator:
    """Return the collator of a run, without the pixels of its images."""
    args, options = run.args, PackingOptions.of(run.args)
    given = run.call.data_collator
    multiple = args.pad_to_multiple_of or getattr(given, "pad_to_multiple_of", None)
    collator = PackedCollator(run.preparation.eos.tokenizer.pad_token_id, multiple)
    if isinstance(given, PackedCollator):
        collator = given
    if options.static_shapes:
        raise ValueError("static_shapes=True pads rows when training starts; leave it out")
    # As far as it is known without the model.
    is_ours = type(collator).__call__ is PackedCollator.__call__ and not run.images.packs
    may_share = options.prefix_sharing != "off" and options.attention not in NATIVE_ATTENTION
    return collator.replaced(
        loss_weighting=options.loss_weighting,
        tensors_only=True,
        shares_prefixes=may_share and is_ours,
    )
