"""Turns a tokenized data set into packed rows, for trainers without support for packing.

    documents        [5 6 7] [8 9] [4 4 4 4]                pack_len 6

    row 0  input_ids        4   4   4   4   8   9           PackedDataset[0]
           labels        -100   4   4   4 -100  9           first tokens are not trained
           attention_mask   1   1   1   1   2   2           the number of each token's document
    row 1  input_ids        5   6   7                       nothing is padded
           attention_mask   2   2   2                       one document: not 1, as in any mask

A micro-batch is one flat row. A data loader that requests several rows gets them joined, with
document numbers that continue, so any collator that stacks its input works. Only a model prepared
with `enable_packing` understands these numbers, so rows are refused until one exists.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from trl_packing.data.limits import ModelLimits
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_WEIGHTS,
    document_labels,
)
from trl_packing.packing.bins import PackingPlan, find_strategy, pack
from trl_packing.packing.epoch import split_bins

_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS, "attention_mask")
_REFUSED_COLUMNS = {
    TOKEN_WEIGHTS: "a plain loss has no weights",
    DOCUMENT_WEIGHT: "a plain loss has no weights",
    SEQ_LENGTHS: "rows are packed already",
}

# Living models on which `enable_packing` was called.
enabled_models: "weakref.WeakSet[Any]" = weakref.WeakSet()


class PackedDataset(torch.utils.data.Dataset):
    """Packed rows of tokenized documents, each a mapping of three tensors ``(T,)`` int64.

    Rows are the same in every epoch, and the trainer draws their order. `RepackEveryEpoch` draws
    new rows. Any collator works that stacks or pads all columns (Trainer's default does), and so
    does `PackedCollator`. A collator that drops `attention_mask` does not work: transformers'
    `DataCollatorWithFlattening` would turn the row into one document.

    Args:
        dataset: a `datasets.Dataset`, or any sequence of rows, with `input_ids`. Optional columns
            are `labels`, or masks as in `PackedCollator` (without either, every token is trained),
            and `attention_mask`, 0 on padding, which is removed.
        tokenizer: its padding token fills empty rows (`rows_multiple_of`); may be None.
        pack_len: most tokens of a row.
        shuffle_seed: draws which documents share a row. If None or negative, none are shuffled.
        strategy: as in `pack`.
        rows_multiple_of: the number of rows becomes a multiple of this: rows are split, then empty
            ones are added. On several ranks, accelerate fills the last batches with the first rows,
            which are then trained twice. With `per_device_train_batch_size` × ranks here, there is
            nothing to fill.

    Attributes:
        lengths: tokens of each document, ``(N,)`` int64.
        plan: the documents of each row, before rows are split.

    Raises:
        ValueError: a document is longer than `pack_len`; an id is negative; the data set has
            weights, which a plain trainer ignores; or its rows are packed already.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        pack_len: int,
        shuffle_seed: int | None = 42,
        *,
        strategy: str = "bfd",
        rows_multiple_of: int = 1,
    ):
        columns = _column_names(dataset)
        for column, reason in _REFUSED_COLUMNS.items():
            if column in columns:
                raise ValueError(
                    f"the data set has {column}: {reason}; use PackedSFTTrainer, or drop the "
                    f"column: dataset.remove_columns({column!r})"
                )
        if rows_multiple_of < 1:
            raise ValueError(f"rows_multiple_of={rows_multiple_of} must be at least 1")
        self.documents: Any = dataset
        if _is_stored(dataset):
            self.documents = ArrowDocuments(dataset, [c for c in _COLUMNS if c in columns])
        self.tokenizer = tokenizer
        self.pack_len = pack_len
        self.shuffle_seed = None if shuffle_seed is None or shuffle_seed < 0 else shuffle_seed
        self.strategy = strategy
        self.rows_multiple_of = rows_multiple_of
        self.lengths = self._lengths()
        self.check(ModelLimits())
        self._enabled_where_pickled = False
        self.repack(0)

    def check(self, limits: ModelLimits) -> None:
        """Raise ValueError for the first document with ids, labels or a length beyond `limits`."""
        if isinstance(self.documents, ArrowDocuments):
            replace(limits, positions=None).check_documents(self.documents, "of the data set")
            beyond = self.lengths > (limits.positions or np.inf)
            chosen = np.flatnonzero(beyond)[:1].tolist()
        else:
            chosen = list(range(len(self.documents)))
        for number in chosen:
            ids, labels = self._document(number)
            document = {"input_ids": ids, "labels": labels}
            limits.check_document(document, f"document {number} of the data set")

    def _lengths(self) -> np.ndarray:
        if isinstance(self.documents, ArrowDocuments):
            mask = "attention_mask"
            lengths = (
                self.documents.sums(mask)
                if mask in self.documents.columns
                else self.documents.lengths()
            )
        else:
            number = range(len(self.documents))
            lengths = np.array([len(self._document(i)[0]) for i in number], dtype=np.int64)
        if len(lengths) and lengths.max() > self.pack_len:
            at = int(np.argmax(lengths > self.pack_len))
            raise ValueError(
                f"document {at} has {lengths[at]} tokens but pack_len is {self.pack_len}; raise "
                "pack_len, or cut the document before (make_supervised_dset does, and logs what is "
                "lost)"
            )
        return lengths

    def repack(self, epoch: int) -> None:
        """Draw the rows of an epoch. Every epoch has equally many."""
        epoch = 0 if find_strategy(self.strategy).order_dependent else epoch
        seed = None if self.shuffle_seed is None else (self.shuffle_seed, epoch)
        self.plan: PackingPlan = pack(self.lengths, self.pack_len, self.strategy, seed)
        num_rows = -(-len(self.plan) // self.rows_multiple_of) * self.rows_multiple_of
        rows = split_bins(self.plan, num_rows, repeatedly=False)
        self._rows = rows + [np.array([-1])] * (num_rows - len(rows))  # -1: no document

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        """Return a row: `input_ids`, `labels`, and document numbers from 1 in `attention_mask`."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._joined([self._rows[index]])

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Tensor]]:
        """Return the rows of a micro-batch as one row; a data loader calls this.

        Raises:
            RuntimeError: `enable_packing` was called on no model.
        """
        if not (enabled_models or self._enabled_where_pickled):
            raise RuntimeError(
                "packed rows need a model that isolates their documents, and there is none: call "
                "enable_packing(model) before training"
            )
        return [self._joined([self._rows[index] for index in indices])]

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no model.
        return self.__dict__ | {"_enabled_where_pickled": bool(enabled_models)}

    def _joined(self, rows: Sequence[np.ndarray]) -> dict[str, Tensor]:
        documents = [
            self._document(int(i)) if i >= 0 else self._empty() for row in rows for i in row
        ]
        lengths = [len(ids) for ids, _ in documents]
        first = 2 if len(documents) == 1 else 1  # a mask of ones may be any collator's
        columns = {
            "input_ids": np.concatenate([ids for ids, _ in documents]),
            "labels": np.concatenate([labels for _, labels in documents]),
            "attention_mask": np.repeat(np.arange(first, len(documents) + first), lengths),
        }
        columns["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORE_INDEX
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def _document(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `input_ids` and `labels` of a document, without its padding."""
        row = {name: np.asarray(v) for name, v in self.documents[index].items() if name in _COLUMNS}
        ids = row["input_ids"].astype(np.int64)
        labels = document_labels(row, ids)
        if "attention_mask" in row:
            is_real = row["attention_mask"] != 0
            ids, labels = ids[is_real], labels[is_real]
        return ids, labels

    def _empty(self) -> tuple[np.ndarray, np.ndarray]:
        token = getattr(self.tokenizer, "pad_token_id", None) or 0
        return np.array([token]), np.array([IGNORE_INDEX])

    def token_ids(self, document: int) -> np.ndarray:
        """Return the `input_ids` ``(T,)`` int64 of a document, without its padding."""
        return self._document(document)[0]

    def stat(self) -> None:
        """Print the number of documents and rows, their mean tokens, and the utilization."""
        documents, rows, tokens = len(self.lengths), len(self), int(self.lengths.sum())
        print(
            f"Number of sequences: {documents:,} documents -> {rows:,} rows of {self.pack_len:,}\n"
            f"Average effective length: {tokens / documents:,.1f} -> {tokens / rows:,.1f} tokens "
            f"({tokens / (rows * self.pack_len):.2%} filled)"
        )


def _is_stored(dataset: Any) -> bool:
    """Return whether rows are read from the Arrow table, without a transform of the user."""
    return isinstance(dataset, Dataset) and dataset.format["type"] != "custom"


def _column_names(dataset: Any) -> list[str]:
    return list(dataset.column_names) if _is_stored(dataset) else list(dataset[0])


class RepackEveryEpoch(TrainerCallback):
    """Draw new rows of a `PackedDataset` before every epoch, the same ones on all ranks.

    Persistent data loader workers (`dataloader_persistent_workers`) keep the rows of their first
    epoch.

    Args:
        dataset: the training set. Its number of rows does not change.
    """

    def __init__(self, dataset: PackedDataset):
        self.dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # In a resumed run, `state.epoch` is in the middle of the epoch that continues.
        self.dataset.repack(int((state.epoch or 0) + 1e-6))
