"""Tokenized documents → documents that fit, every loss counted.

    documents           input_ids, labels, any length       (TRL renders and tokenizes)
        │  check        masks as long as ids, integers, ...
        │  pieces       which [start, stop) of which row survives the overflow policy
        │  drop         pieces without a trained token
        ▼
    documents           each ≤ capacity, each with something to train

A policy only decides on (row, start, stop) triples, from lengths alone; `_gather` then cuts all of
a batch at once. A piece is a document from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from trl.data_utils import is_conversational, maybe_convert_to_chatml

from trl_packing.arrow_documents import ArrowDocuments, count_after_first, integer_lists
from trl_packing.labels import IGNORE_INDEX, MASK_COLUMNS
from trl_packing.report import PreparationCounts

TOKEN_COLUMNS = ("input_ids", "labels")


@dataclass(frozen=True)
class Overflow:
    """What happens to documents longer than `capacity` tokens (None: nothing is too long).

    `policy` is one of `config.OVERFLOWS`, ``"truncate_start"`` (TRL's truncation_mode="keep_end")
    or ``"wrapped"`` (documents laid end to end and cut at every multiple of `capacity`).
    """

    policy: str
    capacity: int | None


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
    if "prompt" in columns and not {"completion", "input_ids", "messages"} & set(columns):
        raise ValueError(
            f"the {name} dataset has a 'prompt' column but no 'completion' column: it has "
            f"{columns}; rename the column that holds the answers to 'completion'"
        )
    if isinstance(dataset, datasets.Dataset):
        _check_no_missing(dataset, name, [c for c in (*known, "completion") if c in columns])
        if "input_ids" in columns:
            _check_token_columns(dataset, name)


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
    rows: datasets.Dataset | datasets.IterableDataset, capacity: int | None, name: str
) -> None:
    """Raise ValueError if packed rows are longer than `capacity` or misstate their lengths."""
    if isinstance(rows, datasets.IterableDataset):
        return
    documents = ArrowDocuments(rows, ["input_ids", "seq_lengths"])
    lengths, stated = documents.lengths(), documents.sums("seq_lengths")
    if (lengths != stated).any():
        row = int(np.argmax(lengths != stated))
        raise ValueError(
            f"row {row} of the {name} dataset holds {lengths[row]} input_ids but its seq_lengths "
            f"sum to {stated[row]}; they must name every token"
        )
    if capacity is not None and lengths.max() > capacity:
        row = int(lengths.argmax())
        raise ValueError(
            f"row {row} of the {name} dataset is packed (it has seq_lengths) and holds "
            f"{lengths[row]} tokens, but max_length is {capacity}; raise max_length to that length"
        )


def check_token_ids(documents: ArrowDocuments, vocabulary: int, name: str) -> None:
    """Raise ValueError for an id outside ``[0, vocabulary)``; a model would fail deep inside."""
    low, high = documents.bounds("input_ids")
    if low >= 0 and high < vocabulary:
        return
    for row, document in enumerate(documents):  # the table may hold rows that were left out
        outside = (document["input_ids"] < 0) | (document["input_ids"] >= vocabulary)
        if outside.any():
            raise ValueError(
                f"document {row} of the {name} dataset has token id "
                f"{document['input_ids'][outside][0]}, but the model's vocabulary has {vocabulary} "
                "ids; was it tokenized with another tokenizer?"
            )


def _check_no_missing(dataset: datasets.Dataset, name: str, columns: list[str]) -> None:
    stored = ArrowDocuments(dataset, columns).stored_rows(np.arange(len(dataset)))
    for column in columns:
        values = dataset.data.column(column)
        if values.null_count:
            missing = values.is_null().to_numpy()[stored]
            if missing.any():
                raise ValueError(
                    f"row {int(np.argmax(missing))} of the {name} dataset has no {column!r} (it is "
                    "null); remove such rows"
                )


def _check_token_columns(dataset: datasets.Dataset, name: str) -> None:
    present = [c for c in (*TOKEN_COLUMNS, *MASK_COLUMNS) if c in dataset.column_names]
    documents = ArrowDocuments(dataset, present)
    expected = documents.lengths("input_ids")
    for column in present[1:]:
        wrong = np.flatnonzero(documents.lengths(column) != expected)
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"document {row} of the {name} dataset has {expected[row]} input_ids but "
                f"{documents.lengths(column)[row]} entries in {column!r}; give one per token"
            )


def fit_documents(
    dataset: datasets.Dataset,
    overflow: Overflow,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[datasets.Dataset, PreparationCounts]:
    """Return `dataset` with every document within capacity and something to train in each.

    `dataset` has `input_ids` and `labels`; other columns are kept (and repeated for pieces).
    Raises ValueError if a document is too long under ``"error"``, or if nothing is left.
    """
    documents = ArrowDocuments(dataset, TOKEN_COLUMNS)
    lengths, trained = documents.lengths(), documents.num_trained()
    too_long = np.zeros(len(lengths), bool)
    if overflow.capacity is not None:
        too_long = lengths > overflow.capacity
    if overflow.policy == "error" and too_long.any():
        row = int(np.argmax(too_long))
        raise _too_long(f"document {row} of the {name} dataset", lengths[row], overflow.capacity)
    rewrites = overflow.policy == "wrapped" or (overflow.policy != "drop" and too_long.any())
    if rewrites:
        # `map` caches by the function and its arguments, so a second run reads the result.
        batch_size = len(dataset) if overflow.policy == "wrapped" else 1000
        fitted = dataset.with_format("arrow").map(
            fit_table,
            fn_kwargs={"overflow": overflow},
            batched=True,
            batch_size=batch_size,
            num_proc=None if overflow.policy == "wrapped" else num_proc,
            desc=f"Fitting {name} dataset to max_length",
        )
        fitted = fitted.with_format(None)
    else:
        kept = np.flatnonzero((trained > 0) & ~too_long)
        fitted = dataset if len(kept) == len(dataset) else dataset.select(kept)
    return fitted, _counts(fitted, overflow, lengths, trained, too_long, name)


def _too_long(which: str, length: int, capacity: int | None) -> ValueError:
    return ValueError(
        f"{which} has {length} tokens but max_length is {capacity}; raise max_length or set "
        "overflow='truncate', 'split' or 'drop'"
    )


def fit_table(table: pa.Table, overflow: Overflow) -> pa.Table:
    """Apply `overflow` to a table of documents and drop pieces without a trained token."""
    tokens = {
        name: integer_lists(name, table.column(name).combine_chunks()) for name in TOKEN_COLUMNS
    }
    lengths, num_labels = (np.diff(tokens[name][1]) for name in TOKEN_COLUMNS)
    if (lengths != num_labels).any():
        row = int(np.argmax(lengths != num_labels))
        raise ValueError(
            f"a document has {lengths[row]} input_ids but {num_labels[row]} labels; "
            "give one label or mask entry per token"
        )
    rows, starts, stops = _pieces(lengths, overflow, _prompt_lengths(*tokens["labels"]))
    pieces = {
        name: _gather(*tokens[name], rows, starts, stops).cast(_list_type(table.schema.field(name)))
        for name in TOKEN_COLUMNS
    }
    kept = pa.array(
        np.flatnonzero(
            count_after_first(*integer_lists("labels", pieces["labels"]), IGNORE_INDEX) > 0
        )
    )
    columns = [
        (pieces[name] if name in pieces else table.column(name).take(pa.array(rows))).take(kept)
        for name in table.column_names
    ]
    return pa.table(columns, names=table.column_names)


def _prompt_lengths(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return how many tokens of each document come before its first trained one."""
    trained = np.append(np.flatnonzero(labels != IGNORE_INDEX), len(labels))
    first = trained[np.searchsorted(trained, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]


def _pieces(
    lengths: np.ndarray, overflow: Overflow, prompts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the surviving pieces as arrays: source row, first token, token after the last."""
    rows, capacity = np.arange(len(lengths)), overflow.capacity
    zeros = np.zeros_like(lengths)
    if capacity is None:
        return rows, zeros, lengths
    if overflow.policy == "drop":
        kept = rows[lengths <= capacity]
        return kept, zeros[kept], lengths[kept]
    if overflow.policy == "error":
        if lengths.max(initial=0) > capacity:
            raise _too_long("a document of the stream", lengths.max(), capacity)
        return rows, zeros, lengths
    if overflow.policy == "truncate":
        return rows, zeros, np.minimum(lengths, capacity)
    if overflow.policy == "truncate_start":
        return rows, np.maximum(lengths - capacity, 0), lengths
    if overflow.policy == "truncate_prompt":
        # The last token of the prompt stays: a document's first token is never a target.
        excess = np.maximum(lengths - capacity, 0)
        starts = np.minimum(excess, np.maximum(prompts - 1, 0))
        return rows, starts, np.minimum(starts + capacity, lengths)
    # split cuts each document at multiples of capacity, wrapped the documents laid end to end.
    first = (
        np.concatenate([[0], np.cumsum(lengths)[:-1]]) if overflow.policy == "wrapped" else zeros
    )
    first_cut, last_cut = first // capacity, (first + np.maximum(lengths, 1) - 1) // capacity
    per_row = last_cut - first_cut + 1
    piece_rows = np.repeat(rows, per_row)
    nth = np.arange(len(piece_rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    boundary = (first_cut[piece_rows] + nth) * capacity - first[piece_rows]
    starts = np.maximum(boundary, 0)
    return piece_rows, starts, np.minimum(boundary + capacity, lengths[piece_rows])


def _gather(
    values: np.ndarray, offsets: np.ndarray, rows: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> pa.Array:
    """Return the list array of tokens [start, stop) of each row."""
    sizes = stops - starts
    ends = np.concatenate([[0], np.cumsum(sizes)])
    first = offsets[rows].astype(np.int64) + starts
    taken = values[np.arange(ends[-1]) + np.repeat(first - ends[:-1], sizes)]
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(taken))


def _list_type(field: pa.Field) -> pa.DataType:
    """Return the type of a column of pieces: the column's own, unless it fixes their length."""
    if pa.types.is_null(field.type.value_type):  # a batch of empty documents of a stream
        return pa.list_(pa.int64())
    fixed = pa.types.is_fixed_size_list(field.type)
    return pa.list_(field.type.value_type) if fixed else field.type


def _counts(
    fitted: datasets.Dataset,
    overflow: Overflow,
    lengths: np.ndarray,
    trained: np.ndarray,
    too_long: np.ndarray,
    name: str,
) -> PreparationCounts:
    after = ArrowDocuments(fitted, TOKEN_COLUMNS)
    if not len(after):
        raise ValueError(
            f"no document of the {name} dataset has a trained token left "
            f"({len(lengths)} read, {int(too_long.sum())} longer than max_length="
            f"{overflow.capacity}, overflow={overflow.policy!r}); raise max_length, or check the "
            "completion or assistant masks"
        )
    return PreparationCounts(
        documents_in=len(lengths),
        documents_out=len(after),
        tokens_in=int(lengths.sum()),
        tokens_out=int(after.lengths().sum()),
        trained_in=int(trained.sum()),
        trained_out=int(after.num_trained().sum()),
        overlong=int(too_long.sum()),
        empty=int((lengths == 0).sum()),
        untrained=int(_lost_documents(fitted, overflow, trained, too_long)),
        policy=overflow.policy,
        capacity=overflow.capacity,
    )


def _lost_documents(
    fitted: datasets.Dataset, overflow: Overflow, trained: np.ndarray, too_long: np.ndarray
) -> int:
    """Return how many documents went for lack of a trained token, before or after cutting."""
    if overflow.policy in ("split", "wrapped"):
        return int((trained == 0).sum())
    dropped = int(too_long.sum()) if overflow.policy == "drop" else 0
    return len(trained) - dropped - len(fitted)


def fit_stream(dataset: datasets.IterableDataset, overflow: Overflow) -> datasets.IterableDataset:
    """Return `dataset` with `overflow` applied as it is read; only token columns are kept.

    Reading it raises ValueError for what `fit_documents` refuses, except that a stream may turn out
    to be empty.
    """

    def fit(batch: dict[str, Sequence[Any]]) -> dict[str, list[Any]]:
        table = pa.table({name: pa.array(batch[name]) for name in TOKEN_COLUMNS})
        return fit_table(table, overflow).to_pydict()

    columns = dataset.column_names or list(next(iter(dataset), {}))
    return dataset.with_format(None).map(  # plain lists, whatever format the user has set
        fit, batched=True, remove_columns=[c for c in columns if c not in TOKEN_COLUMNS]
    )
