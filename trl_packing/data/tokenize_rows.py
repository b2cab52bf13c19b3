"""Rows of a user's data set → tokenized documents, in one cached `map`.

    rows           text | prompt, completion | messages | fields        (row_format)
        │  render, tokenize    which characters and tokens are trained
    documents      input_ids, labels (and loss_weights, if messages have a weight)

`datasets` caches the result by the tokenizer, the settings and the version of this package.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging
from trl.data_utils import get_dataset_column_names

from trl_packing.data.chat_template import TEMPLATE_ERRORS
from trl_packing.data.messages import MESSAGES, Row, has_flags, without_arrow_nulls
from trl_packing.data.printable import escape_hidden, quote
from trl_packing.data.row_format import RowFormat
from trl_packing.data.spans import Rendered, Tokenized, flat_tokens, tokenize
from trl_packing.data.stream import steps_of
from trl_packing.documents.arrow import AnyDataset
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    HANDLED,
    SOURCE,
    TOKEN_WEIGHTS,
    Batch,
    row_name,
)

logger = logging.get_logger(__name__)

_PARTS = 8  # of a batch: one is tokenized while the next is rendered
_CONVERSATIONS_AT_ONCE = 32  # rows of a batch with `every_turn`: each may be many long documents

_DTYPES = {
    "input_ids": List(Value("int64")),
    "labels": List(Value("int64")),
    TOKEN_WEIGHTS: List(Value("float32")),
    HANDLED: Value("int64"),
    DOCUMENT_WEIGHT: Value("float32"),
    SOURCE: Value("string"),
}


def can_prepare(processing_class: Any) -> bool:
    """Return whether a fast tokenizer renders and tokenizes with the code of transformers."""
    cls = type(processing_class)
    return (
        isinstance(processing_class, PreTrainedTokenizerBase)
        and getattr(processing_class, "is_fast", False)  # MistralCommonBackend has none
        and cls.apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        and cls.__call__ is PreTrainedTokenizerBase.__call__
    )


def documents_from_rows(
    dataset: AnyDataset,
    row_format: RowFormat,
    *,
    keeps_columns: bool = False,
    document_columns: Sequence[str] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> AnyDataset:
    """Return whole documents with `input_ids`, `labels` and, of messages, `HANDLED`.

    The first row decides the form of all. `keeps_columns` keeps the other columns, but never those
    of a stream or of turns; `document_columns` are kept always. Raises ValueError, naming the row,
    for what cannot be rendered or tokenized.
    """
    rows = dataset.with_format(None)
    present = get_dataset_column_names(dataset)
    first = next(iter(rows))
    is_stream = isinstance(rows, IterableDataset)
    flagged = has_flags(dataset, first)
    if flagged and row_format.flags_decide:
        if row_format.answers is not None:
            raise ValueError(
                f"'train' or 'weight' of messages of the {name} dataset and response_template both "
                "say what is trained; remove one"
            )
        row_format = replace(row_format, train_on="assistant")
    try:
        row_format.check(first)
    except ValueError as error:
        sentence = f"the {name} dataset cannot be prepared: {escape_hidden(str(error))}"
        raise ValueError(sentence) from error
    form = row_format.form(first)
    columns = ["input_ids", "labels"]
    if form.endswith("messages"):
        columns.append(HANDLED)
    if flagged and row_format.train_on in ("assistant", "last_assistant", "every_turn"):
        columns.append(TOKEN_WEIGHTS)
    if row_format.makes_turns:
        columns += document_columns
    keeps_columns = keeps_columns and not is_stream and not row_format.makes_turns
    removed = [] if keeps_columns else [c for c in present if c not in document_columns]
    options: dict[str, Any] = {
        "batched": True,
        "with_indices": True,
        "remove_columns": removed,
        "fn_kwargs": {
            "row_format": row_format,
            "form": form,
            "columns": columns,
            "structs": _structs(rows) if row_format.formatting_func is None else {},
            "name": name,
            "version": version("trl_packing"),  # another version may render differently
            "is_alone": not is_stream and removed == present,
        },
    }
    if row_format.makes_turns:
        options["batch_size"] = _CONVERSATIONS_AT_ONCE
    if isinstance(rows, IterableDataset):
        features = _features_of_stream(rows, first, columns, document_columns)
        return rows.map(_prepare_batch, features=features, **options)
    return rows.map(_prepare_batch, num_proc=num_proc, desc=f"Tokenizing {name} dataset", **options)


def _features_of_stream(
    rows: IterableDataset, first: Row, columns: Sequence[str], document_columns: Sequence[str]
) -> Features:
    """Return the features of the documents of a stream with this first row."""
    # A type that the stream does not know is that of its first row. Texts may hold any value.
    of_values = {bool: "bool", int: "int64", float: "float64"}
    kinds = {c: Value(of_values.get(type(first.get(c)), "string")) for c in document_columns}
    kinds |= {**(rows.features or {}), **_DTYPES}
    return Features({column: kinds[column] for column in (*columns, *document_columns)})


def notes_on_unread(dataset: AnyDataset, row_format: RowFormat, name: str) -> list[str]:
    """Return a sentence each on tools, and on columns beside the conversation, that are not read.

    Of a stream, the first row decides.
    """
    rows = dataset.with_format(None)
    first = next(iter(rows))
    notes = []
    lacks = row_format.lacks(first)
    if lacks:
        notes.append(
            f"the {name} dataset has tools, but the chat template renders no {lacks}; use another "
            "template"
        )
    unread = []
    for column in row_format.unread(first):
        values = [first[column]] if isinstance(rows, IterableDataset) else rows[column]
        if any(values):
            unread.append(column)
    if unread:
        names = " and ".join(map(repr, unread))
        remedy = "put them into the messages (docs/data.md has the line for 'system')"
        if row_format.prompt_template is not None:
            remedy = f"name them in prompt_template ({{{unread[0]}}}), make messages"
        notes.append(
            f"the {name} dataset has {names} beside what is trained; such columns look like parts "
            f"of the conversation and are not read: {remedy}, or remove them"
        )
    return notes


def _structs(rows: AnyDataset) -> dict[str, Any]:
    """Return the features of columns of a conversation in which Arrow may have added null keys.

    Rows that a generator yields have none; a function of a stream leaves no features, so those of
    its source count.
    """
    known = rows.features
    if not known:
        of_steps = (getattr(step, "features", None) for step in steps_of(rows))
        known = next(filter(None, of_steps), {})
    columns = (*MESSAGES, "tools", "chat_template_kwargs")
    return {column: known[column] for column in columns if column in known}


def _prepare_batch(
    batch: Batch,
    indices: Sequence[int],
    row_format: RowFormat,
    form: str,
    columns: Sequence[str],
    structs: Mapping[str, Any],
    name: str,
    version: str,
    is_alone: bool,
) -> dict[str, list[Any]] | pa.Table:
    """Return the documents of a batch; a table if no other column stays beside theirs."""
    rows = _rows_of(batch, structs)
    tokenizer = row_format.chat.tokenizer

    def render(row: Row) -> list[Rendered]:
        found = row_format.documents(row, form)
        if TOKEN_WEIGHTS not in columns and any(map(_has_other_weights, found)):
            raise ValueError(
                "a message has a weight other than 0 and 1, but those of the first row have none; "
                "give them the weight 1"
            )
        return found

    try:
        rendered, documents = _documents_of(rows, render, tokenizer)
    except (ValueError, RuntimeError, *TEMPLATE_ERRORS):
        for row, index in zip(rows, indices, strict=True):
            _check_row(row, render, row_format, row_name(index, name))
        raise
    tokens = zip(("input_ids", "labels", TOKEN_WEIGHTS), flat_tokens(documents), strict=True)
    flat = {column: values for column, values in tokens if column in columns}
    stops = np.cumsum([len(document.input_ids) for document in documents])
    table = _as_table(flat, stops)
    if HANDLED in columns:
        handled = [text.handled for texts in rendered for text in texts]
        table = table.append_column(HANDLED, pa.array(handled, pa.int64()))
    if is_alone:  # a table is written at once; `datasets` checks every other value
        return table
    made = table.to_pydict()
    if TOKEN_WEIGHTS in flat:  # float32, unlike lists
        made[TOKEN_WEIGHTS] = np.split(flat[TOKEN_WEIGHTS], stops[:-1])
    for column in columns:
        if column in batch:
            pairs = zip(batch[column], rendered, strict=True)
            made[column] = [value for value, texts in pairs for _ in texts]
    return made


def _rows_of(batch: Batch, structs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a batch, without the nulls that Arrow adds to structs."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    for column, feature in structs.items():
        for row in rows:
            row[column] = without_arrow_nulls(row[column], feature)
    return rows


def _has_other_weights(document: Rendered) -> bool:
    """Return whether a span of a document has a weight other than 1."""
    return any(weight != 1 for *_, weight in document.spans or ())


def _as_table(flat: Mapping[str, np.ndarray], stops: np.ndarray) -> pa.Table:
    """Return documents that end at `stops` of flat columns."""
    offsets = pa.array(np.append(0, stops), pa.int32())
    kinds = {"input_ids": pa.int32()}  # as `datasets` stores them
    lists = [pa.array(values, kinds.get(column)) for column, values in flat.items()]
    return pa.table([pa.ListArray.from_arrays(offsets, each) for each in lists], names=[*flat])


def _documents_of(
    rows: Sequence[Row], render: Callable[[Row], list[Rendered]], tokenizer: Any
) -> tuple[list[list[Rendered]], list[Tokenized]]:
    """Return the texts of each row, and the tokens of all; warn of a prompt that loses its end."""
    rendered: list[list[Rendered]] = []
    parts = []
    at_once = -(-len(rows) // _PARTS)
    # A fast tokenizer releases the interpreter lock, so the next rows are rendered meanwhile.
    with ThreadPoolExecutor(max_workers=1) as tokenizing:
        for start in range(0, len(rows), at_once):
            texts = [render(row) for row in rows[start : start + at_once]]
            parts.append(tokenizing.submit(tokenize, tokenizer, [*chain.from_iterable(texts)]))
            rendered += texts
    documents = [document for part in parts for document in part.result()]
    if lost := next((d.lost_prompt for d in documents if d.lost_prompt), None):
        logger.warning_once(
            "The tokenized prompt is not a prefix of the tokenized prompt+completion: its end "
            f"{quote(tokenizer.decode(lost))} is left out, unlike at inference. End the prompt on "
            "a token boundary, or use a chat template that renders it the same way. Shown once."
        )
    return rendered, documents


def _check_row(
    row: Row, render: Callable[[Row], list[Rendered]], row_format: RowFormat, where: str
) -> None:
    """Raise an error that begins with `where` for a row that cannot be rendered or tokenized."""
    try:
        for document in render(row):
            document.text.encode()  # half a character is a ValueError
            tokenize(row_format.chat.tokenizer, [document])
    except TEMPLATE_ERRORS as error:
        if row_format.formatting_func is not None:
            raise  # with the traceback of the user's own function
        reason = escape_hidden(f"the chat template cannot render it: {error}")
        raise ValueError(f"{where}: {reason}") from error
    except (ValueError, RuntimeError) as error:
        kind = RuntimeError if isinstance(error, RuntimeError) else ValueError
        raise kind(f"{where}: {escape_hidden(str(error))}") from error
