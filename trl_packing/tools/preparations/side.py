"""One of two preparations that are compared: documents, found by the row that they come from.

rows  →  prepared here, or by TRL, with the row of each document  →  Prepared.of_rows(0, 1000)
"""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryDirectory

import numpy as np
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
)
from trl_packing.documents.weights import document_weight, token_weights
from trl_packing.tools.preview.previewed_run import ROW, PreviewedRun, SourceRows, with_row_numbers

# The settings of TRL on which tokens and labels depend. The tokenizer of the run has its EOS and
# padding tokens and its chat template already.
_SETTINGS = (
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_num_proc",
    "dataset_text_field",
    "max_length",
    "truncation_mode",
)


def documents_by_trl(run: PreviewedRun) -> Dataset:
    """Return the documents of `run` as TRL prepares them with packing=False, and all columns.

    Settings that TRL does not have (`train_on`, `overflow`, templates, ...) have no effect.

    Raises:
        ValueError: TRL cannot prepare these rows; the message has its reason.
    """
    if isinstance(run.dataset, SourceRows):
        raise ValueError(
            "TRL's trainer takes one data set, and train_dataset is a dictionary of several; "
            "compare them one by one"
        )
    if run.images.packs:
        raise ValueError(
            "TRL tokenizes rows with images when it makes a batch, so there are no documents to "
            "compare; a few rows are compared with its collator whenever rows are prepared"
        )
    tokenizer = run.preparation.processing_class
    vocabulary = len(getattr(tokenizer, "tokenizer", tokenizer))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
        )
    )
    settings = {name: getattr(run.args, name) for name in _SETTINGS}
    # DeepSpeed, which accelerate imports, prints to stdout, where a command's JSON goes.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        args = SFTConfig(
            folder, packing=False, use_cpu=True, bf16=False, report_to="none", **settings
        )
        try:
            trainer = SFTTrainer(
                model,
                args,
                train_dataset=run.dataset,
                processing_class=tokenizer,
                formatting_func=run.formatting_func,
            )
        except Exception as error:  # a template or TRL may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"TRL cannot prepare these rows: {reason}") from error
    return trainer.train_dataset


@dataclass(frozen=True, eq=False)
class Tokens:
    """The documents that one preparation makes of one row, laid end to end.

    Attributes:
        ids: token ids, ``(T,)`` int64.
        labels: `IGNORE_INDEX` on the first token of each document, ``(T,)`` int64.
        weights: weight of each token in the loss, 0 if it is not trained, ``(T,)`` float64.
        lengths: tokens of each document.
    """

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    lengths: tuple[int, ...]

    @property
    def num_trained(self) -> int:
        """Return the number of trained tokens."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to_dict(self) -> dict[str, list]:
        """Return the arrays as lists."""
        arrays = {"ids": self.ids, "labels": self.labels, "weights": self.weights}
        return {name: values.tolist() for name, values in arrays.items()} | {
            "lengths": list(self.lengths)
        }


@dataclass(frozen=True)
class Side:
    """One of the two preparations.

    Attributes:
        name: for a reader.
        run: the rows and the settings.
        by_trl: TRL prepares them.
    """

    name: str
    run: PreviewedRun
    by_trl: bool = False

    def prepared(self, rows: np.ndarray | None = None, **changes: object) -> "Prepared":
        """Return the documents of `rows` (None: all), with some of the settings changed."""
        run = with_row_numbers(self.run, rows).with_settings(shuffle_dataset=False, **changes)
        if is_packed(run.dataset):
            raise ValueError("the rows are packed already (they have seq_lengths): nothing differs")
        if not self.by_trl:
            return Prepared(run.documents()[0])
        return Prepared(documents_by_trl(run).select_columns([ROW, *TOKEN_COLUMNS]))


class Prepared:
    """Prepared documents, found by the row of the data set that they come from."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset
        self.has_weight = DOCUMENT_WEIGHT in dataset.column_names
        columns = [name for name in (*TOKEN_COLUMNS, TOKEN_WEIGHTS) if name in dataset.column_names]
        self.documents = ArrowDocuments(dataset, columns)
        rows = np.asarray(dataset.with_format("numpy")[ROW][:], np.int64)
        self.order = np.argsort(rows, kind="stable")
        self.rows = rows[self.order]

    def of_rows(self, first: int, end: int) -> list[Tokens]:
        """Return the documents of the rows `first` to `end`."""
        bounds = np.searchsorted(self.rows, np.arange(first, end + 1))
        chosen = self.order[bounds[0] : bounds[-1]]
        found = self.documents.__getitems__(chosen.tolist())
        weights = [1.0] * len(found)
        if self.has_weight:
            given = self.dataset[chosen.tolist()][DOCUMENT_WEIGHT]
            weights = [document_weight({DOCUMENT_WEIGHT: weight}) for weight in given]
        offsets = (bounds - bounds[0]).tolist()
        return [
            _tokens(found[start:stop], weights[start:stop]) for start, stop in pairwise(offsets)
        ]

    def touches(self, length: int | None) -> np.ndarray:
        """Return the rows with a document of `length` tokens, or with several documents."""
        lengths = self.documents.lengths()[self.order]
        several = np.concatenate([[False], self.rows[1:] == self.rows[:-1]])
        return np.unique(self.rows[(lengths == length) | several])


def _tokens(documents: list[dict[str, np.ndarray]], of_document: list[float]) -> Tokens:
    ids, labels, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
    for document, weight in zip(documents, of_document, strict=True):
        length = len(document["input_ids"])
        ids.append(document["input_ids"])
        labels.append(np.array(document["labels"], np.int64))
        labels[-1][:1] = IGNORE_INDEX
        values = token_weights(document, length) * np.float64(weight)
        weights.append(np.where(labels[-1] == IGNORE_INDEX, 0.0, values))
    lengths = tuple(len(document["input_ids"]) for document in documents)
    return Tokens(np.concatenate(ids), np.concatenate(labels), np.concatenate(weights), lengths)
