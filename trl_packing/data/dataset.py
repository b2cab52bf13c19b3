"""What is wrong with a data set, said in one sentence before anything is computed on it.

A wrong data set names the row, the column and the way out here; a model would fail deep inside, or
train on something else.
"""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from trl.data_utils import is_conversational, maybe_convert_to_chatml

from trl_packing.data.model_limits import ModelLimits
from trl_packing.documents.arrow import TOKEN_COLUMNS, ArrowDocuments, weight_lists
from trl_packing.documents.bad_rows import and_others
from trl_packing.documents.labels import MASK_COLUMNS, SEQ_LENGTHS, TOKEN_WEIGHTS


def check_columns(
    dataset: datasets.Dataset | datasets.IterableDataset, name: str, text_field: str
) -> None:
    """Raise ValueError if `dataset` has no column to train on, or token columns do not match."""
    columns = dataset.column_names
    if columns is None:  # a stream whose columns are known only by reading it
        return
    known = {"input_ids", "messages", "conversations", "prompt", text_field}
    if not known & set(columns):
        raise ValueError(
            f"the {name} dataset has no column to train on: it has {columns}; expected "
            f"{text_field!r}, 'messages', 'prompt' and 'completion', or 'input_ids' (or pass "
            "formatting_func)"
        )
    whole = {"input_ids", "messages", "conversations"} & set(columns)
    if "prompt" in columns and "completion" not in columns and not whole:
        raise ValueError(
            f"the {name} dataset has a 'prompt' column but no 'completion' column: it has "
            f"{columns}; rename the column that holds the answers to 'completion'"
        )
    if isinstance(dataset, datasets.Dataset):
        if "input_ids" in columns:
            _check_no_missing(dataset, name, ["input_ids"])
            _check_token_columns(dataset, name)
            return
        if "completion" not in columns and whole:
            known -= {"prompt"}  # it repeats the beginning of the conversation (ultrachat_200k)
        _check_no_missing(dataset, name, sorted({*known, "completion"} & set(columns)))


def empty_completions(
    dataset: datasets.Dataset | datasets.IterableDataset, column: str, name: str
) -> str | None:
    """Return a sentence on the rows whose `column` is an empty text; None without any.

    None for a stream, too, whose rows are not known.
    """
    if isinstance(dataset, datasets.IterableDataset) or column not in dataset.column_names:
        return None
    values = dataset.data.column(column)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return None
    is_empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), False).to_numpy()
    rows = ArrowDocuments(dataset, ()).stored_rows(np.arange(len(dataset)))
    number = int(is_empty[rows].sum())
    if not number:
        return None
    return (
        f"{number:,} of {len(dataset):,} rows of the {name} dataset have an empty {column!r}: of "
        "these, only the end (EOS) is trained"
    )


def check_eos(
    dataset: datasets.Dataset | datasets.IterableDataset, tokenizer: Any, name: str
) -> None:
    """Raise ValueError if plain text is to end in an EOS token that `tokenizer` does not have."""
    if tokenizer.eos_token is not None:
        return
    example = next(iter(dataset))
    if "input_ids" not in example and not is_conversational(maybe_convert_to_chatml(example)):
        raise ValueError(
            f"the tokenizer has no eos_token, so documents of the {name} dataset would not end; "
            "set eos_token='...' in the config, or tokenizer.eos_token"
        )


def check_rows(
    rows: datasets.Dataset | datasets.IterableDataset,
    capacity: int | None,
    name: str,
    *,
    append_eos: bool = False,
) -> None:
    """Raise ValueError if packed rows are longer than `capacity` or misstate their lengths.

    Nor can their documents grow: `append_eos` is refused.
    """
    if append_eos:
        raise ValueError(
            f"append_eos=True, but the rows of the {name} dataset are packed already (they have "
            "seq_lengths), and their documents cannot grow; end the documents in EOS before they "
            "are packed, or leave append_eos=False"
        )
    if isinstance(rows, datasets.IterableDataset):
        return
    documents = ArrowDocuments(rows, ["input_ids", SEQ_LENGTHS])
    wrong = documents.rows_where(SEQ_LENGTHS, lambda lengths: lengths < 0)
    if len(wrong):
        stated = documents[int(wrong[0])][SEQ_LENGTHS].tolist()
        raise ValueError(
            f"row {wrong[0]} of the {name} dataset has the seq_lengths {stated}; no length can be "
            f"negative{and_others(wrong)}"
        )
    lengths, sums = documents.lengths(), documents.sums(SEQ_LENGTHS)
    wrong = np.flatnonzero(lengths != sums)
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"row {row} of the {name} dataset holds {lengths[row]} input_ids but its seq_lengths "
            f"sum to {sums[row]}; they must name every token{and_others(wrong)}"
        )
    if capacity is not None and lengths.max() > capacity:
        row = int(lengths.argmax())
        raise ValueError(
            f"row {row} of the {name} dataset is packed (it has seq_lengths) and holds "
            f"{lengths[row]} tokens, but max_length is {capacity}; raise max_length to that length"
        )


def _check_no_missing(dataset: datasets.Dataset, name: str, columns: list[str]) -> None:
    stored = ArrowDocuments(dataset, columns).stored_rows(np.arange(len(dataset)))
    for column in columns:
        values = dataset.data.column(column)
        if values.null_count:
            missing = values.is_null().to_numpy()[stored]
            rows = np.flatnonzero(missing)
            if len(rows):
                raise ValueError(
                    f"row {rows[0]} of the {name} dataset has no {column!r} (it is null); remove "
                    f"such rows{and_others(rows)}"
                )


def _check_token_columns(dataset: datasets.Dataset, name: str) -> None:
    present = [c for c in (*TOKEN_COLUMNS, *MASK_COLUMNS) if c in dataset.column_names]
    documents = ArrowDocuments(dataset, present)
    ModelLimits().check_documents(documents, f"of the {name} dataset")  # no id is negative
    entries = {column: documents.lengths(column) for column in present}
    if TOKEN_WEIGHTS in dataset.column_names:
        chunks = dataset.data.column(TOKEN_WEIGHTS).chunks
        stored = [np.diff(weight_lists(TOKEN_WEIGHTS, chunk)[1]) for chunk in chunks]
        rows = documents.stored_rows(np.arange(len(documents)))
        entries[TOKEN_WEIGHTS] = np.concatenate([*stored, np.zeros(0, np.int64)])[rows]
    expected = entries["input_ids"]
    for column, number in entries.items():
        wrong = np.flatnonzero(number != expected)
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"document {row} of the {name} dataset has {expected[row]} input_ids but "
                f"{number[row]} entries in {column!r}; give one per token{and_others(wrong)}"
            )


def check_not_empty(dataset: Dataset | IterableDataset, name: str) -> None:
    """Raise ValueError if `dataset` has no rows."""
    is_map_style = isinstance(dataset, Dataset)
    if (len(dataset) == 0) if is_map_style else (next(iter(dataset), None) is None):
        raise ValueError(f"the {name} dataset is empty: it has no rows; check how it was loaded")


LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    data: str, split: str = "train", *, config: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """Return the rows of a .json, .jsonl or .parquet file, a folder of them, or a hub id.

    split: "train[:1000]" works too. config: of a data set on the hub, where it has several.
    cache_dir: where `datasets` keeps what it has read; None: where it always does.

    Raises ValueError for a file that does not exist or cannot be read.
    """
    loader, files = LOADERS.get(Path(data).suffix), {}
    if loader is not None:
        if not Path(data).is_file():
            raise ValueError(f"{data} does not exist")
        files, config = {"data_files": data}, None
    try:
        return load_dataset(loader or data, config, split=split, cache_dir=cache_dir, **files)
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = "it is empty" if isinstance(cause, StopIteration) else cause
        raise ValueError(f"{data} cannot be read: {reason}") from error
