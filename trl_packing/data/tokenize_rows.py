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
from trl_packing.data.messages import Row, has_flags
from trl_packing.data.printable import escape_hidden, quote
from trl_packing.data.row_format import RowFormat
from trl_packing.data.spans import Rendered, Tokenized, flat_tokens, tokenize
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
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
    if first.get("tools") and row_format.chat.exists and not row_format.calls_tools:
        logger.warning(
            f"the {name} dataset has tools, but the chat template renders no tool calls; use "
            "another template"
        )
    columns = ["input_ids", "labels"]
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
            "form": row_format.form(first),
            "columns": columns,
            "name": name,
            "version": version("trl_packing"),  # another version may render differently
            "is_alone": not is_stream and not row_format.makes_turns and removed == present,
        },
    }
    if row_format.makes_turns:
        options["batch_size"] = _CONVERSATIONS_AT_ONCE
    if isinstance(rows, IterableDataset):
        # A type that the stream does not know is that of its first row. Texts may hold any value.
        known = rows.features or {}
        of_values = {bool: "bool", int: "int64", float: "float64"}
        kinds = {c: Value(of_values.get(type(first.get(c)), "string")) for c in document_columns}
        kinds |= {**known, **_DTYPES}
        features = Features({c: kinds[c] for c in (*columns, *document_columns)})
        return rows.map(_prepare_batch, features=features, **options)
    return rows.map(_prepare_batch, num_proc=num_proc, desc=f"Tokenizing {name} dataset", **options)


def _prepare_batch(
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    row_format: RowFormat,
    form: str,
    columns: Sequence[str],
    name: str,
    version: str,
    is_alone: bool,
) -> dict[str, list[Any]] | pa.Table:
    """Return the documents of a batch; a table if no other column stays beside theirs."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    tokenizer = row_format.chat.tokenizer

    def render(row: Row) -> list[Rendered]:
        found = row_format.documents(row, form)
        if TOKEN_WEIGHTS not in columns and any(
            weight != 1 for document in found for *_, weight in document.spans or ()
        ):
            raise ValueError(
                "a message has a weight other than 0 and 1, but those of the first row have none; "
                "give them the weight 1"
            )
        return found

    try:
        documents, places, turns = _documents_of(rows, render, tokenizer)
    except (ValueError, RuntimeError, *TEMPLATE_ERRORS):
        for row, index in zip(rows, indices, strict=True):
            _check_row(row, render, row_format, row_name(index, name))
        raise
    if lost := next((d.lost_prompt for d in documents if d.lost_prompt), None):
        logger.warning_once(
            "The tokenized prompt is not a prefix of the tokenized prompt+completion: its end "
            f"{quote(tokenizer.decode(lost))} is left out, unlike at inference. End the prompt on "
            "a token boundary, or use a chat template that renders it the same way. Shown once."
        )
    tokens = zip(("input_ids", "labels", TOKEN_WEIGHTS), flat_tokens(documents), strict=True)
    flat = {column: values for column, values in tokens if column in columns}
    stops = np.cumsum([len(document.input_ids) for document in documents])
    if is_alone:  # an Arrow table is written at once; `datasets` checks every other value
        offsets = pa.array(np.concatenate([[0], stops]), pa.int32())
        kinds = {"input_ids": pa.int32()}  # as `datasets` stores them
        lists = {column: pa.array(values, kinds.get(column)) for column, values in flat.items()}
        return pa.table({c: pa.ListArray.from_arrays(offsets, v) for c, v in lists.items()})
    made: dict[str, list[Any]] = {c: np.split(values, stops[:-1]) for c, values in flat.items()}
    made |= {c: [each.tolist() for each in made[c]] for c in ("input_ids", "labels")}
    if TURN in columns:
        made[TURN] = turns
    repeated = [column for column in columns if column in batch]
    return made | {column: [batch[column][n] for n in places] for column in repeated}


def _documents_of(
    rows: Sequence[Row], render: Callable[[Row], list[Rendered]], tokenizer: Any
) -> tuple[list[Tokenized], list[int], list[int]]:
    """Return documents, places of their rows, and numbers of turns, -1 without a trained one."""
    rendered = (
        (place, turn if document.spans else -1, document)
        for place, row in enumerate(rows)
        for turn, document in enumerate(render(row))
    )
    parts = []
    places: list[int] = []
    turns: list[int] = []
    # A fast tokenizer releases the interpreter lock, so the next rows are rendered meanwhile.
    with ThreadPoolExecutor(max_workers=1) as tokenizing:
        while chunk := list(islice(rendered, _AT_ONCE)):
            found, numbers, texts = zip(*chunk, strict=True)
            parts.append(tokenizing.submit(tokenize, tokenizer, texts))
            places += found
            turns += numbers
    return [document for part in parts for document in part.result()], places, turns


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
