"""What a run would train, seen before it starts: rows prepared as the trainer does, and printed.

row of a data set  →  documents, by the very code of the trainer  →  text, trained tokens marked
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from transformers import HfArgumentParser
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from trl_packing.arrow_documents import ArrowDocuments
from trl_packing.config import PackedSFTConfig
from trl_packing.plan import plan_report, training_sampler
from trl_packing.prepare import Preparation
from trl_packing.render import show_document
from trl_packing.report import PackingReport, PreparationCounts
from trl_packing.token_columns import token_columns_of
from trl_packing.weighting import in_words

LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}

# What a machine without a GPU can be told to use; none of it matters here.
_FIXED = ("--output_dir", "unused", "--use_cpu", "--bf16", "false", "--report_to", "none")


def load_rows(
    data: str, split: str = "train", *, config: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """Return the rows of a .json, .jsonl or .parquet file, a folder of them, or a hub id.

    split: "train[:1000]" works too. config: of a data set on the hub, where it has several.
    cache_dir: where `datasets` keeps what it has read; None: where it always does.

    Raises ValueError for a file that does not exist.
    """
    loader = LOADERS.get(Path(data).suffix)
    if loader is None:
        return load_dataset(data, config, split=split, cache_dir=cache_dir)
    if not Path(data).is_file():
        raise ValueError(f"{data} does not exist")
    return load_dataset(loader, data_files=data, split=split, cache_dir=cache_dir)


def inspect(
    dataset: Dataset,
    tokenizer: Any,
    settings: Sequence[str] = (),
    *,
    rows: Sequence[int] = (0, 1, 2),
    prepares_all: bool = False,
    color: bool = False,
) -> Iterator[str]:
    """Yield each of `rows` as text with its trained tokens marked, and why it would be dropped.

    settings: options of `PackedSFTConfig` as a command line has them, ["--train_on", "assistant"].
    prepares_all: yield too what preparing the whole data set loses.

    Raises ValueError for rows that are not there, and for settings that cannot be.
    """
    args = _config(settings)
    preparation = _preparation(args, tokenizer, dataset[0])
    for row in rows:
        if not 0 <= row < len(dataset):
            raise ValueError(f"row {row} is not among the {len(dataset):,} rows of the data set")
        yield from _documents_of(row, dataset, preparation, color)
    if prepares_all:
        _, counts = preparation.documents(dataset, None, "whole")
        lost = str(counts) if counts is not None else ""
        yield f"{len(dataset):,} rows\n{lost or 'Nothing is lost.'}"


def _documents_of(
    row: int, dataset: Dataset, preparation: Preparation, color: bool
) -> Iterator[str]:
    try:
        documents, _ = preparation.documents(dataset.select([row]), None, "inspected")
    except ValueError as error:
        yield f"row {row} · not trained: {error}"
        return
    for number, document in enumerate(documents):
        piece = f", piece {number + 1} of {len(documents)}" if len(documents) > 1 else ""
        yield show_document(document, preparation.tokenizer, color=color, name=f"row {row}{piece}")


def plan(
    dataset: Dataset,
    tokenizer: Any,
    settings: Sequence[str] = (),
    *,
    ranks: int = 1,
    hidden_size: int | None = None,
) -> PackingReport:
    """Return what an epoch of a run on `ranks` ranks would be made of; settings as in `inspect`.

    hidden_size: the model's, for the balance of ranks.
    """
    args = _config(settings)
    preparation = _preparation(args, tokenizer, dataset[0])
    prepared, counts = preparation.documents(dataset, None, "train")
    columns = [*token_columns_of(prepared.column_names), "seq_lengths"]
    documents = ArrowDocuments(prepared, [c for c in columns if c in prepared.column_names])
    sampler = training_sampler(
        documents,
        args,
        packing=args.packing,
        batch_size=args.per_device_train_batch_size,
        ranks=ranks,
        hidden_size=hidden_size,
    )
    return plan_report(
        documents,
        sampler,
        attention=None,
        loss=in_words(args.loss_weighting, prepared.column_names),
        preparation=counts or PreparationCounts(),
    )


def _config(settings: Sequence[str]) -> PackedSFTConfig:
    parser = HfArgumentParser((PackedSFTConfig,))
    (args,) = parser.parse_args_into_dataclasses(args=[*_FIXED, *settings])
    return args


def _preparation(args: PackedSFTConfig, tokenizer: Any, first: dict[str, Any]) -> Preparation:
    template = None
    if args.assistant_only_loss and not has_generation_markers(tokenizer.chat_template):
        template = get_training_chat_template(tokenizer)  # as TRL's trainer does
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in first and "completion" in first
    return Preparation(
        args,
        tokenizer,
        tokenizer,
        packing=args.packing,
        chat_template=template,
        completion_only=completion_only,
        generation_config=None,
        by_trl=_refuse,
    )


def _refuse(dataset: Any, formatting_func: Any, name: str) -> Any:
    raise ValueError("TRL's own code prepares data for this tokenizer; it cannot be shown here")
