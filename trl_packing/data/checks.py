"""Checks of a data set that run before anything is computed on it.

An error names the row, the column and the remedy here; a model would fail deep inside, or train on
something else.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset
from trl.data_utils import is_conversational, maybe_convert_to_chatml

from trl_packing.data.model_limits import NO_LIMITS
from trl_packing.data.rules import AnyDataset, Preparation, UserRows
from trl_packing.documents.arrow import ArrowDocuments, stored_rows
from trl_packing.documents.bad_rows import and_others
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
)
from trl_packing.documents.weights import document_weights_from_rows
from trl_packing.formatting.messages import has_flags
from trl_packing.formatting.row_format import form_of, name_of_messages


def check_is_dataset(dataset: Any, name: str) -> None:
    """Raise TypeError for an object without columns, such as a list of rows."""
    if not hasattr(dataset, "column_names"):
        raise TypeError(
            f"the {name} dataset is a {type(dataset).__name__}; pass a Dataset or an "
            "IterableDataset (datasets.Dataset.from_list makes one of rows), or a dictionary of "
            "them"
        )


def check_not_empty(dataset: AnyDataset, name: str) -> None:
    """Raise ValueError if `dataset` has no rows."""
    is_map_style = isinstance(dataset, Dataset)
    if (len(dataset) == 0) if is_map_style else (next(iter(dataset), None) is None):
        raise ValueError(f"the {name} dataset is empty: it has no rows; check how it was loaded")


def check_is_one_set(dataset: Any, reason: str) -> None:
    """Raise ValueError if a training set is a dictionary, which only packed runs train.

    Args:
        dataset: as the user passed it.
        reason: why the run takes TRL's path.
    """
    if isinstance(dataset, dict):
        raise ValueError(
            f"train_dataset is a dictionary, which only packed runs train, but {reason}; pass "
            "one data set, or leave that out"
        )


def check(rows: UserRows, rules: Preparation) -> None:
    """Raise ValueError for anything that `rows` and the settings alone rule out."""
    dataset, name, eos = rows.dataset, rows.name, rules.eos
    check_weights_have_tokens(rows.columns, name)
    if rows.formatting_func is None and rules.options.prompt_template is None:
        check_columns(dataset, name, rules.args.dataset_text_field)
    if isinstance(dataset, Dataset) and DOCUMENT_WEIGHT in rows.columns:
        document_weights_from_rows(dataset, f"the {name} dataset")
    if not rows.are_tokenized and rules.needs_trl:
        _check_options_of_trl(rows, rules)
        check_eos(dataset, eos.tokenizer, name)
    if rows.are_tokenized:
        _check_one_source_of_labels(rows, rules)
    elif SEQ_LENGTHS in rows.columns and isinstance(dataset, Dataset) and not rules.packing:
        raise ValueError(
            f"the {name} dataset has {SEQ_LENGTHS!r}, which describes packed rows, but no "
            f"'input_ids'; drop the column: dataset.remove_columns({SEQ_LENGTHS!r})"
        )
    if rows.are_packed:
        check_packed_rows(dataset, rules.args.max_length, name, append_eos=eos.appends)
    elif eos.appends:
        _ = eos.eos_id  # raises without one


def _check_options_of_trl(rows: UserRows, rules: Preparation) -> None:
    """Raise ValueError for settings, and flags of messages, that TRL's preparation ignores."""
    names = ("train_on", "response_template", "prompt_template")
    given = {name: getattr(rules.options, name) for name in names}
    ignored = [f"{name}={value!r}" for name, value in given.items() if value is not None]
    if rules.row_format.flags_decide and has_flags(rows.dataset, next(iter(rows.dataset))):
        ignored.append("'train' or 'weight' of messages")
    if ignored:
        raise ValueError(
            f"{ignored[0]} cannot be used on the {rows.name} dataset: "
            f"{type(rules.processing_class).__name__} renders or tokenizes in a way of its "
            "own, so TRL's code prepares it; leave it out, or pass a plain tokenizer"
        )


def _check_one_source_of_labels(rows: UserRows, rules: Preparation) -> None:
    template = None if rules.labeler is not None else rules.options.response_template
    present = [column for column in ("labels", *MASK_COLUMNS) if column in rows.columns]
    if template is not None and present:
        raise ValueError(
            f"the {rows.name} dataset has {present[0]!r} and response_template={template!r} is "
            "set: both say what is trained; remove one"
        )


def check_columns(dataset: AnyDataset, name: str, text_field: str) -> None:
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
    if isinstance(dataset, Dataset):
        if "input_ids" in columns:
            _check_no_missing(dataset, name, ["input_ids"])
            _check_token_columns(dataset, name)
            return
        rows = dataset.select_columns(sorted({*known, "completion"} & {*columns}))
        _check_no_missing(dataset, name, _columns_read(rows, text_field))


def _columns_read(rows: Dataset, text_field: str) -> list[str]:
    """Return the columns that rows of the form of the first are made of; all if it has none."""
    first = rows.with_format(None)[0]
    try:
        form = form_of(first, text_field)
    except ValueError:
        return rows.column_names
    if form.startswith("prompt"):
        return [name for name in ("prompt", "completion") if name in rows.column_names]
    return [text_field] if form == "text" else [name_of_messages(first) or "messages"]


def empty_completions(dataset: AnyDataset, column: str, name: str) -> str | None:
    """Return a sentence on the rows whose `column` is an empty text.

    None if there are none, and for a stream, whose rows are not known.
    """
    if isinstance(dataset, IterableDataset) or column not in dataset.column_names:
        return None
    values = dataset.data.column(column)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return None
    is_empty = pc.fill_null(pc.equal(pc.binary_length(values), 0), False).to_numpy()
    number = int(is_empty[stored_rows(dataset)].sum())
    if not number:
        return None
    return (
        f"{number:,} of {len(dataset):,} rows of the {name} dataset have an empty {column!r}: of "
        "these, only the end (EOS) is trained"
    )


def check_weights_have_tokens(columns: Iterable[str], name: str) -> None:
    """Raise ValueError if rows that are not tokenized have one weight per token."""
    if TOKEN_WEIGHTS in columns and "input_ids" not in columns:
        raise ValueError(
            f"the {name} dataset has {TOKEN_WEIGHTS!r}, one weight per token, but no 'input_ids'; "
            f"give each document one number, {DOCUMENT_WEIGHT!r}, or each message a 'weight', or "
            "pass tokenized rows"
        )


def check_eos(dataset: AnyDataset, tokenizer: Any, name: str) -> None:
    """Raise ValueError if rows are plain text and `tokenizer` has no EOS token to end them."""
    if tokenizer.eos_token is not None:
        return
    example = next(iter(dataset))
    if "input_ids" not in example and not is_conversational(maybe_convert_to_chatml(example)):
        raise ValueError(
            f"the tokenizer has no eos_token, so documents of the {name} dataset would not end; "
            "set eos_token='...' in the config, or tokenizer.eos_token"
        )


def check_packed_rows(
    rows: AnyDataset,
    capacity: int | None,
    name: str,
    *,
    append_eos: bool = False,
) -> None:
    """Raise ValueError if packed rows are longer than `capacity` or misstate their lengths.

    `append_eos` is refused, because documents of packed rows cannot grow.
    """
    if append_eos:
        raise ValueError(
            f"append_eos=True, but the rows of the {name} dataset are packed already (they have "
            "seq_lengths), and their documents cannot grow; end the documents in EOS before they "
            "are packed, or leave append_eos=False"
        )
    if isinstance(rows, IterableDataset):
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


def _check_no_missing(dataset: Dataset, name: str, columns: list[str]) -> None:
    for column in columns:
        values = dataset.data.column(column)
        if values.null_count:
            rows = np.flatnonzero(values.is_null().to_numpy()[stored_rows(dataset)])
            if len(rows):
                raise ValueError(
                    f"row {rows[0]} of the {name} dataset has no {column!r} (it is null); remove "
                    f"such rows{and_others(rows)}"
                )


def _check_token_columns(dataset: Dataset, name: str) -> None:
    columns = (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS)
    documents = ArrowDocuments(dataset, [c for c in columns if c in dataset.column_names])
    NO_LIMITS.check_documents(documents, f"of the {name} dataset")  # no id is negative
    expected = documents.lengths()
    for column in documents.columns:
        entries = documents.lengths(column)
        wrong = np.flatnonzero(entries != expected)
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"document {row} of the {name} dataset has {expected[row]} input_ids but "
                f"{entries[row]} entries in {column!r}; give one per token{and_others(wrong)}"
            )
