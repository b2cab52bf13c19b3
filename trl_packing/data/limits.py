"""Limits of what a model can read: token ids, labels and positions.

A value beyond them raises an index error deep inside the model on a CPU, ends the process by a
device assert on CUDA, and silently gives a wrong number in some kernels. So every data set is
checked before a model runs on it: in one pass over the Arrow table, or document by document.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np
from torch import nn

from trl_packing.attention.model_facts import text_config
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, TOKEN_COLUMNS, and_others

# Names of modules with learned positions, from GPT-2 to BERT's decoder and OPT.
_POSITIONS = {"wpe", "position_embeddings", "positions_embed", "embed_positions"}

_OF_STREAM = 100  # documents of a stream that are read before training


@dataclass(frozen=True)
class ModelLimits:
    """Largest number of ids (and labels) and of positions of a model; None without a limit."""

    vocabulary: int | None = None
    positions: int | None = None

    def check(self, dataset: Any, name: str) -> None:
        """Raise ValueError naming the first document of a tokenized data set beyond a limit."""
        if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
            return
        present = [c for c in (*TOKEN_COLUMNS, SEQ_LENGTHS) if c in dataset.column_names]
        if "input_ids" in present:
            self.check_documents(ArrowDocuments(dataset, present), f"of the {name} dataset")

    def check_first(self, stream: datasets.IterableDataset, name: str) -> None:
        """Raise ValueError if one of the first documents of a stream exceeds a limit."""
        for number, document in enumerate(islice(stream, _OF_STREAM)):
            if "input_ids" in document:
                self.check_document(document, f"document {number} of the {name} dataset")

    def check_documents(
        self, documents: ArrowDocuments, where: str, numbers: Sequence[int] | None = None
    ) -> None:
        """Raise ValueError naming the first document that exceeds a limit, and how many do.

        `where` ends the name of a document: "of the train dataset"; `numbers` None: 0, 1, 2, …
        """
        columns = [c for c in documents.columns if c in (*TOKEN_COLUMNS, SEQ_LENGTHS)]
        found = [documents.rows_where(c, partial(self._beyond, c)) for c in columns]
        if not is_packed(documents):
            found.append(np.flatnonzero(self._beyond(SEQ_LENGTHS, documents.lengths())))
        for wrong in found:
            if len(wrong):
                number = wrong[0] if numbers is None else numbers[wrong[0]]
                which = f"document {number} {where}"
                self.check_document(documents[int(wrong[0])], which, and_others(wrong))

    def check_document(self, document: Mapping[str, Any], which: str, others: str = "") -> None:
        """Raise ValueError if a document exceeds a limit; `others` ends the sentence."""
        for column in TOKEN_COLUMNS:
            values = np.asarray(document.get(column, ()))
            if values.size and (wrong := self._beyond(column, values)).any():
                kind = "label" if column == "labels" else "token id"
                allowed = f"the model's vocabulary has {self.vocabulary} ids"
                allowed = "an id is 0 or more" if self.vocabulary is None else allowed
                raise ValueError(
                    f"{which} has {kind} {values[wrong][0]}, but {allowed} (a label may be "
                    f"{IGNORE_INDEX}); was it tokenized with another tokenizer?{others}"
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
        if self.vocabulary is None:
            wrong = values < 0
        elif values.dtype.kind == "i":  # as unsigned numbers, negative ones are large: one pass
            wrong = values.view(f"u{values.dtype.itemsize}") >= self.vocabulary
        else:
            wrong = values >= self.vocabulary
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


def check_entries(
    documents: ArrowDocuments, where: str, numbers: Sequence[int] | None = None
) -> None:
    """Raise ValueError for a column without one entry per token; arguments as `check_documents`."""
    expected = documents.lengths()
    for column in documents.columns:
        entries = documents.lengths(column)
        wrong = np.flatnonzero(entries != expected)
        if len(wrong):
            row = wrong[0]
            raise ValueError(
                f"document {row if numbers is None else numbers[row]} {where} has {expected[row]} "
                f"input_ids but {entries[row]} entries in {column!r}{and_others(wrong)}"
            )
