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
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from accelerate.logging import get_logger
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase
from trl.data_utils import get_dataset_column_names

from trl_packing.data.chat_template import TEMPLATE_ERRORS
from trl_packing.data.messages import MESSAGES, Row, has_flags, without_arrow_nulls
from trl_packing.data.printable import escape_hidden, quote
from trl_packing.data.row_format import RowFormat
from trl_packing.data.spans import Rendered, Tokenized, flat_tokens, tokenize
from trl_packing.data.stream import steps_of
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    HANDLED,
    SOURCE,
    TOKEN_WEIGHTS,
    TURN,
    row_name,
)

logger = get_logger(__name__)

_AT_ONCE = 128  # documents per tokenizer call; the next are rendered meanwhile
_CONVERSATIONS_AT_ONCE = 32  # rows of a batch with `every_turn`: each may be many long documents

_DTYPES = {
    "input_ids": List(Value("int64")),
    "labels": List(Value("int64")),
    TOKEN_WEIGHTS: List(Value("float32")),
    TURN: Value("int64"),
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
    dataset: Dataset | IterableDataset,
    row_format: RowFormat,
    *,
    keeps_columns: bool = False,
    document_columns: Sequence[str] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> Dataset | IterableDataset:
    """Return whole documents with `input_ids`, `labels` and, with "every_turn", `TURN`.

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
    _note_unread_tools(first, row_format, name)
    form = row_format.form(first)
    columns = ["input_ids", "labels"]
    if form.endswith("messages"):
        columns.append(HANDLED)
    if flagged and row_format.train_on in ("assistant", "last_assistant", "every_turn"):
        columns.append(TOKEN_WEIGHTS)
    if row_format.makes_turns:
        columns += [TURN, *document_columns]
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
            "is_alone": not is_stream and not row_format.makes_turns and removed == present,
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


def _note_unread_tools(first: Row, row_format: RowFormat, name: str) -> None:
    """Warn that the chat template leaves out what a data set has of tools."""
    if not (first.get("tools") and row_format.chat.exists):
        return
    lacks = "" if row_format.chat.reads_tools else "tools"
    if not row_format.calls_tools:
        lacks = "tool calls"
    if lacks:
        logger.warning(
            f"the {name} dataset has tools, but the chat template renders no {lacks}; use another "
            "template"
        )


def note_unread_columns(
    dataset: Dataset | IterableDataset, row_format: RowFormat, name: str
) -> str | None:
    """Return a sentence on columns with parts of the conversation that are not read, or None.

    Of a stream, the first row decides.
    """
    first = next(iter(dataset.with_format(None)))
    unread = row_format.unread(first)
    if isinstance(dataset, IterableDataset):
        unread = [column for column in unread if first[column]]
    else:
        columns = {column: dataset.data.column(column) for column in unread}
        unread = [c for c, values in columns.items() if _has_value(values)]
    if not unread:
        return None
    remedy = "put them into the messages (docs/data.md has the line for 'system'), or remove them"
    if row_format.prompt_template is not None:
        remedy = f"name them in prompt_template ({{{unread[0]}}}), make messages, or remove them"
    names = " and ".join(map(repr, unread))
    return (
        f"the {name} dataset has {names} beside what is trained; such columns look like parts of "
        f"the conversation and are not read: {remedy}"
    )


def _has_value(values: pa.ChunkedArray) -> bool:
    return any(any(chunk.to_pylist()) for chunk in values.chunks)


def _structs(rows: Dataset | IterableDataset) -> dict[str, Any]:
    """Return the features of columns of a conversation in which Arrow may have added null keys.

    Rows that a generator yields have none; a function of a stream leaves no features, so those of
    its source count.
    """
    known = rows.features or {}
    if isinstance(rows, IterableDataset) and not known:
        of_steps = (getattr(step, "features", None) for step in steps_of(rows))
        known = next((features for features in of_steps if features), {})
    columns = sorted({*MESSAGES, "tools", "chat_template_kwargs"} & {*known})
    if isinstance(rows, Dataset):
        chunks = {column: rows.data.column(column).chunks for column in columns}
        columns = [column for column in columns if any(map(_has_null, chunks[column]))]
    return {column: known[column] for column in columns}


def _has_null(values: pa.Array) -> bool:
    """Whether a value is null, at any depth."""
    if values.null_count:
        return True
    kind = values.type
    if pa.types.is_struct(kind):
        return any(map(_has_null, values.flatten()))
    is_text = isinstance(kind, pa.BaseExtensionType) or not pa.types.is_nested(kind)
    return not is_text and _has_null(values.flatten())


def _prepare_batch(
    batch: Mapping[str, Sequence[Any]],
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
        documents, places, turns, handled = _documents_of(rows, render, tokenizer)
    except (ValueError, RuntimeError, *TEMPLATE_ERRORS):
        for row, index in zip(rows, indices, strict=True):
            _check_row(row, render, row_format, row_name(index, name))
        raise
    _note_lost_prompt(documents, tokenizer)
    tokens = zip(("input_ids", "labels", TOKEN_WEIGHTS), flat_tokens(documents), strict=True)
    flat = {column: values for column, values in tokens if column in columns}
    stops = np.cumsum([len(document.input_ids) for document in documents])
    of_documents = {TURN: turns, HANDLED: handled}
    numbers = {column: values for column, values in of_documents.items() if column in columns}
    if is_alone:  # an Arrow table is written at once; `datasets` checks every other value
        return _as_table(flat, stops, numbers)
    made: dict[str, list[Any]] = {}
    for column, values in flat.items():
        made[column] = np.split(values, stops[:-1])
        if column != TOKEN_WEIGHTS:
            made[column] = [each.tolist() for each in made[column]]
    made |= numbers
    for column in columns:
        if column in batch:
            made[column] = [batch[column][place] for place in places]
    return made


def _rows_of(
    batch: Mapping[str, Sequence[Any]], structs: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the rows of a batch, without the nulls that Arrow adds to structs."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    for column, feature in structs.items():
        for row in rows:
            row[column] = without_arrow_nulls(row.get(column), feature)
    return rows


def _note_lost_prompt(documents: Sequence[Tokenized], tokenizer: Any) -> None:
    """Warn of the first prompt whose last tokens are not in its document."""
    if lost := next((d.lost_prompt for d in documents if d.lost_prompt), None):
        logger.warning_once(
            "The tokenized prompt is not a prefix of the tokenized prompt+completion: its end "
            f"{quote(tokenizer.decode(lost))} is left out, unlike at inference. End the prompt on "
            "a token boundary, or use a chat template that renders it the same way. Shown once."
        )


def _has_other_weights(document: Rendered) -> bool:
    """Return whether a span of a document has a weight other than 1."""
    return any(weight != 1 for *_, weight in document.spans or ())


def _as_table(
    flat: Mapping[str, np.ndarray], stops: np.ndarray, numbers: Mapping[str, list[int]]
) -> pa.Table:
    """Return documents that end at `stops` of flat columns, with other `numbers` of each."""
    offsets = pa.array(np.concatenate([[0], stops]), pa.int32())
    kinds = {"input_ids": pa.int32()}  # as `datasets` stores them
    made: dict[str, Any] = {}
    for column, values in flat.items():
        made[column] = pa.ListArray.from_arrays(offsets, pa.array(values, kinds.get(column)))
    for column, of_documents in numbers.items():
        made[column] = pa.array(of_documents, pa.int64())
    return pa.table(made)


def _documents_of(
    rows: Sequence[Row], render: Callable[[Row], list[Rendered]], tokenizer: Any
) -> tuple[list[Tokenized], list[int], list[int], list[int]]:
    """Return documents, places of their rows, numbers of turns (-1: none), bits of `HANDLED`."""
    rendered = (
        (place, turn if document.spans else -1, document)
        for place, row in enumerate(rows)
        for turn, document in enumerate(render(row))
    )
    parts = []
    places: list[int] = []
    turns: list[int] = []
    handled: list[int] = []
    # A fast tokenizer releases the interpreter lock, so the next rows are rendered meanwhile.
    with ThreadPoolExecutor(max_workers=1) as tokenizing:
        while chunk := list(islice(rendered, _AT_ONCE)):
            found, numbers, texts = zip(*chunk, strict=True)
            parts.append(tokenizing.submit(tokenize, tokenizer, texts))
            places += found
            turns += numbers
            handled += [text.handled for text in texts]
    documents = [document for part in parts for document in part.result()]
    return documents, places, turns, handled


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
