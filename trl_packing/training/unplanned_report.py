"""Reports on runs whose bins are not planned: documents of a user's sampler, and streams."""

from typing import Any

from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.training.epoch_report import PackingReport


def size_in_words(number: float, what: str) -> str:
    """Return the size of a micro-batch: "1 bin", "2.5 documents"."""
    return f"{number:g} {what}{'s' * (number != 1)}"


def report_of_any_sampler(
    documents: ArrowDocuments,
    args: SFTConfig,
    *,
    micro_batches: int | None,
    batch_size: int,
    ranks: int,
    attention: str,
    loss: str | None,
    preparation: PreparationCounts,
) -> PackingReport:
    """Return the report on documents that a user's sampler draws one by one.

    Args:
        documents: the training set.
        args: the settings of the run.
        micro_batches: of an epoch of one rank; None where the number is not known yet.
        batch_size: documents of a micro-batch.
        ranks: number of data-parallel ranks.
        attention: what keeps documents apart, in words.
        loss: the weighting of the loss, in words.
        preparation: what was kept and lost when documents were prepared.
    """
    accumulation = args.gradient_accumulation_steps
    return PackingReport(
        ranks=ranks,
        accumulation=accumulation,
        micro_batch=size_in_words(batch_size, "document"),
        attention=attention,
        capacity=args.max_length,
        documents=documents.num_documents,
        tokens=int(documents.lengths().sum()),
        trained_tokens=int(documents.num_trained().sum()),
        micro_batches_per_epoch=None if micro_batches is None else micro_batches * ranks,
        steps_per_epoch=None if micro_batches is None else -(-micro_batches // accumulation),
        documents_per_step=batch_size * accumulation * ranks,
        loss=loss,
        preparation=preparation,
    )


def micro_batch_of_stream(packing: bool, batch_size: int) -> str:
    """Return the size of a stream's micro-batch in words."""
    return size_in_words(batch_size, "bin" if packing else "document")


def without_plan(
    args: Any,
    *,
    ranks: int,
    micro_batch: str,
    attention: str,
    loss: str | None,
    tokens_per_micro_batch: int | None = None,
) -> PackingReport:
    """Return the report on a stream, whose documents are counted only as it is read.

    Raises:
        ValueError: documents_per_step is set.
    """
    per_step = PackingOptions.of(args).documents_per_step
    if per_step is not None:
        raise ValueError(
            f"documents_per_step={per_step} needs to know the documents, but a stream is packed as "
            "it is read; leave it out, or load the data set without streaming"
        )
    return PackingReport(
        ranks=ranks,
        accumulation=args.gradient_accumulation_steps,
        micro_batch=micro_batch,
        attention=attention,
        loss=loss,
        capacity=args.max_length,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
