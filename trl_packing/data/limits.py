"""Limits of what a model can read: token ids, labels and positions.

A value beyond them ends the process on CUDA, and is a wrong number in some kernels. So every data
set is checked before a model runs on it: in one pass over the Arrow table, or as it is read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import numpy as np
from torch import nn

from trl_packing.attention.model_facts import text_config
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    Document,
    and_others,
    row_name,
)

# Names of modules with learned positions, from GPT-2 to BERT's decoder and OPT.
_POSITIONS = {"wpe", "position_embeddings", "positions_embed", "embed_positions"}


@dataclass(frozen=True)
class ModelLimits:
    """Largest number of ids (and labels) and of positions of a model; None without a limit."""

    vocabulary: int | None = None
    positions: int | None = None

    def check(self, dataset: Any, name: str) -> None:
        """Raise ValueError naming the first document of a tokenized data set beyond a limit."""
        if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
            return
        columns = (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS, SEQ_LENGTHS)
        documents = ArrowDocuments(dataset, columns)
        if "input_ids" in documents.columns:
            self.check_documents(documents, partial(row_name, name=name, unit="document"))

    def check_documents(self, documents: ArrowDocuments, named: Callable[[int], str]) -> None:
        """Raise ValueError naming the first document beyond a limit or with too few entries.

        `named` returns the name of a document by its number: "document 3 of the train dataset".
        """
        lengths = documents.lengths()
        columns = documents.columns
        for column in columns:
            entries = lengths if column == SEQ_LENGTHS else documents.lengths(column)
            if len(wrong := np.flatnonzero(entries != lengths)):
                first = int(wrong[0])
                raise ValueError(
                    f"{named(first)} has {lengths[first]} input_ids but {entries[first]} entries "
                    f"in {column!r}{and_others(wrong)}"
                )
        limited = [column for column in (*TOKEN_COLUMNS, SEQ_LENGTHS) if column in columns]
        found = [documents.rows_where(c, partial(self._beyond, c)) for c in limited]
        if SEQ_LENGTHS not in columns:
            found.append(np.flatnonzero(self._beyond(SEQ_LENGTHS, lengths)))
        for wrong in found:
            if len(wrong):
                first = int(wrong[0])
                self.check_document(documents[first], named(first), and_others(wrong))

    def check_document(self, document: Document, which: str, others: str = "") -> None:
        """Raise ValueError if a document exceeds a limit; `others` ends the sentence."""
        for column in TOKEN_COLUMNS:
            values = np.asarray(document.get(column, ()))
            if (wrong := self._beyond(column, values)).any():
                kind = "label" if column == "labels" else "token id"
                allowed = f"the model's vocabulary has {self.vocabulary} ids"
                allowed = "an id is 0 or more" if self.vocabulary is None else allowed
                raise ValueError(
                    f"{which} has {kind} {values[wrong][0]}, but {allowed}; was it tokenized with "
                    f"another tokenizer?{others}"
                )
        lengths = document.get(SEQ_LENGTHS)
        longest = len(document["input_ids"]) if lengths is None else max(lengths, default=0)
        if self._beyond(SEQ_LENGTHS, np.array(longest)):
            raise ValueError(
                f"{which} has {longest:,} tokens, but the model has learned {self.positions:,} "
                f"positions; set max_length={self.positions}{others}"
            )

    def checked(self, document: dict[str, Any], number: int) -> dict[str, Any]:
        """Return document `number` of a stream, for `IterableDataset.map`, or raise ValueError."""
        self.check_document(document, f"document {number} of the stream")
        return document

    def _beyond(self, column: str, values: np.ndarray) -> np.ndarray:
        """Return where values of a column of tokens, or of lengths, exceed a limit."""
        if column == SEQ_LENGTHS:
            return values > (np.inf if self.positions is None else self.positions)
        wrong = values < 0
        if self.vocabulary is not None:
            wrong |= values >= self.vocabulary
        return wrong & (values != IGNORE_INDEX) if column == "labels" else wrong


NO_LIMITS = ModelLimits()


def limits_of(model: Any) -> ModelLimits:
    """Return the limits of `model`, which must not be wrapped or sharded yet."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if weight is None:
        vocabulary = getattr(text_config(model), "vocab_size", None)
    else:  # under ZeRO-3 the local shape is empty
        vocabulary = getattr(weight, "ds_shape", weight.shape)[0]
    return ModelLimits(vocabulary, learned_positions(model))


def learned_positions(model: Any) -> int | None:
    """Return the number of learned positions, if a module and the config agree on it."""
    stated = getattr(text_config(model), "max_position_embeddings", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS & set(name.split(".")):
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            if rows == stated:  # not those of an image encoder
                return rows
    return None
