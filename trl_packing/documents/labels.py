"""Labels and column names: `IGNORE_INDEX` on tokens that are not trained, the id on the others.

input_ids          5  6  7  8       a document; its first token is never a target
completion_mask    0  0  1  1       1 on the completion
labels          -100 -100 7  8      made from the mask
loss_weights       .  . 1.  .5      weight of each trained token in the loss; 1 by default
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

Document: TypeAlias = Mapping[str, Any]  # its columns by name
Batch: TypeAlias = Mapping[str, Sequence[Any]]  # columns of several rows, by name

IGNORE_INDEX = -100  # skipped by torch's cross-entropy and by transformers
TOKEN_COLUMNS = ("input_ids", "labels")  # of every document once it is prepared
MASK_COLUMNS = ("completion_mask", "assistant_masks")  # 1 on trained tokens, named by TRL
TOKEN_WEIGHTS = "loss_weights"  # a float for every token; counts if `labels` train the token
DOCUMENT_WEIGHT = "loss_weight"  # a number for every document, which multiplies those of its tokens
WEIGHT_COLUMNS = (TOKEN_WEIGHTS, DOCUMENT_WEIGHT)
IMAGE_COLUMNS = ("image", "images")  # names that a user's column of images may have
SEQ_LENGTHS = "seq_lengths"  # the lengths of the documents in a row, where rows are packed
TARGET_COUNTS = "target_counts"  # documents that train each token of a row with shared prefixes
SOURCE = "trl_packing_source"  # the name of the source of every document of a mixture
SOURCE_IDS = "source_ids"  # an integer for every document whose losses are told apart by source
IMAGE_IDS = "image_ids"  # for every token: 0 on text, n on the n-th image of the user's row
IMAGE_ROW = "image_row"  # for every document with images: the number of the user's row in the run
IMAGE_SIZES = "image_sizes"  # height and width of every image of a row, in documents that are shown

# For every document of a conversation: bits that say what was parsed or left out, and whether it
# is a turn (`data.counts`).
HANDLED = "trl_packing_handled"

# A row with shared prefixes: the places of its targets in the row, and two numbers for each of
# them: their weight, and the documents that train them. `SOURCE_IDS` then has a number for each.
SOURCE_PLACES, SOURCE_WEIGHTS = "source_places", "source_weights"


def token_columns(columns: Iterable[str]) -> list[str]:
    """Return `TOKEN_COLUMNS`, and those of `TOKEN_WEIGHTS` and `IMAGE_IDS` that `columns` has."""
    present = set(columns)
    return [*TOKEN_COLUMNS, *(name for name in (TOKEN_WEIGHTS, IMAGE_IDS) if name in present)]


def document_columns(columns: Iterable[str], named: Iterable[str] = ()) -> list[str]:
    """Return those of `columns` that hold one value for every document, settings `named` some."""
    kept = {DOCUMENT_WEIGHT, IMAGE_ROW, SOURCE, *named}
    return [column for column in columns if column in kept]


def document_labels(document: Document, input_ids: np.ndarray) -> np.ndarray:
    """Return the labels ``(T,)`` int64 of a document: its `labels`, or made from its masks and ids.

    Raises:
        ValueError: if `labels` or a mask has another length than `input_ids` ``(T,)``.

    Examples:
        >>> document_labels({"completion_mask": [0, 1, 1]}, np.array([5, 6, 7])).tolist()
        [-100, 6, 7]
    """
    labels = document.get("labels")
    if labels is not None:
        labels = np.asarray(labels, np.int64)
        check_one_each("labels", labels, len(input_ids))
        return labels
    labels = np.array(input_ids, np.int64)
    for name in MASK_COLUMNS:
        if (mask := document.get(name)) is not None:
            check_one_each(name, mask, len(input_ids))
            labels[np.asarray(mask) == 0] = IGNORE_INDEX
    return labels


def check_one_each(name: str, values: Sized, num_tokens: int) -> None:
    """Raise ValueError if a document has not one of the `values` for each token."""
    if len(values) != num_tokens:
        raise ValueError(f"{name} has {len(values)} entries but input_ids has {num_tokens}")


class SomeRows(str):
    """The name of a data set of which only some rows are prepared; `numbers` are theirs, by place.

    Examples:
        >>> some = SomeRows("train")
        >>> some.numbers = {0: 17}
        >>> row_name(0, some), row_name(0, "train")
        ('row 17 of the train dataset', 'row 0 of the train dataset')
    """

    numbers: Mapping[int, int] | None = None


def row_name(place: int, name: str, unit: str = "row") -> str:
    """Return the words by which messages name a row, or a document, of a data set."""
    numbers = getattr(name, "numbers", None)
    return f"{unit} {place if numbers is None else numbers[place]} of the {name} dataset"


def and_others(rows: Sized) -> str:
    """Return the number of bad `rows`, to end a sentence that names the first; "" for one row."""
    return f" ({len(rows):,} such rows)" * (len(rows) > 1)


def check_same_columns(batch: Batch, rows: Sequence[int], columns: Collection[str]) -> None:
    """Raise ValueError naming the first of `rows` of a stream without the `columns` of row 0.

    Values of `batch` are None where a row lacks a column of tokens or weights.
    """
    for column in (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS, DOCUMENT_WEIGHT):
        is_there = [value is not None for value in batch.get(column, [None] * len(rows))]
        wrong = np.flatnonzero(np.array(is_there) != (column in columns))
        if len(wrong):
            has = "no" if column in columns else "the column"
            which = f"row {rows[wrong[0]]} of the stream"
            raise ValueError(
                f"{which} has {has} {column!r}, unlike its first row{and_others(wrong)}"
            )


@contextmanager
def refused_beyond_int64(rows: Sequence[int]) -> Iterator[None]:
    """Raise ValueError, naming `rows` of a batch, for an OverflowError of NumPy or Arrow inside."""
    try:
        yield
    except OverflowError as error:
        which = f"rows {rows[0]} to {rows[-1]}"
        raise ValueError(f"{which}: a token id or label is beyond 64 bits") from error
