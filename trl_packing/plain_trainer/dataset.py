"""Turns a tokenized data set into packed rows, for trainers without support for packing.

    documents        [5 6 7] [8 9] [4 4 4 4]                pack_len 6

    row 0  input_ids        4   4   4   4   8   9           PackedDataset[0]
           labels        -100   4   4   4 -100  9           first tokens are not trained
           attention_mask   1   1   1   1   2   2           the number of each token's document
    row 1  input_ids        5   6   7                       nothing is padded
           attention_mask   2   2   2                       one document: not 1, as in any mask

A data loader gets the rows of a micro-batch joined, with numbers that continue. Only a model
prepared with `enable_packing` understands them, so rows are refused until one exists.
"""

import logging
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch import Tensor
from transformers import TrainerCallback

from trl_packing.data.bad_rows import check_not_padded
from trl_packing.data.chat_template import ChatTemplate
from trl_packing.data.files import load_rows
from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.limits import NO_LIMITS
from trl_packing.data.row_format import PromptTemplate, RowFormat
from trl_packing.data.stop_tokens import stop_token_ids
from trl_packing.data.tokenize_rows import documents_from_rows, notes_on_unread
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

logger = logging.getLogger(__name__)

_NO_LIMIT = 10**9  # tokenizers without a limit report 10**30
_COLUMNS = ("input_ids", "labels", *MASK_COLUMNS)

# Living models on which `enable_packing` was called.
enabled_models: "weakref.WeakSet[Any]" = weakref.WeakSet()


class PackedDataset(torch.utils.data.Dataset):
    """Packed rows of tokenized documents, each a mapping of three tensors ``(T,)`` int64.

    Rows are the same in every epoch (`RepackEveryEpoch` draws new ones); the trainer draws their
    order. Any collator works that stacks or pads all columns, and so does `PackedCollator`.

    Args:
        dataset: a `datasets.Dataset`, or any sequence of rows, with `input_ids`, perhaps `labels`
            or masks as in `PackedCollator`; not padded.
        tokenizer: its padding token fills empty rows (`rows_multiple_of`); may be None.
        pack_len: most tokens of a row.
        shuffle_seed: draws which documents share a row. If None or negative, none are shuffled.
        strategy: as in `pack`.
        rows_multiple_of: the number of rows becomes a multiple of this. accelerate fills the last
            batches of several ranks with the first rows, which are then trained twice: with
            `per_device_train_batch_size` × ranks here, there is nothing to fill.

    Attributes:
        lengths: tokens of each document, ``(N,)`` int64.
        plan: the documents of each row, before rows are split.

    Raises:
        ValueError: a document is longer than `pack_len`; an id is negative; the data set has
            padding, or weights, which a plain trainer ignores; or its rows are packed already.
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
        if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
            rows = list(dataset)
            names = dict.fromkeys(name for row in rows for name in row)  # not of row 0 alone
            columns = {}
            for name in names:
                columns[name] = [row.get(name) for row in rows]
            dataset = Dataset.from_dict(columns)
        for column in (TOKEN_WEIGHTS, DOCUMENT_WEIGHT, SEQ_LENGTHS):
            if column in dataset.column_names:
                raise ValueError(
                    f"the data set has {column}, which a plain loss or these rows ignore; use "
                    f"PackedSFTTrainer, or drop the column: dataset.remove_columns({column!r})"
                )
        check_not_padded(dataset, "training")
        self.documents = ArrowDocuments(dataset, _COLUMNS)
        self.tokenizer = tokenizer
        self.pack_len = pack_len
        self.shuffle_seed = None if shuffle_seed is None or shuffle_seed < 0 else shuffle_seed
        self.strategy = strategy
        if rows_multiple_of < 1:
            raise ValueError(f"rows_multiple_of={rows_multiple_of} must be at least 1")
        self.rows_multiple_of = rows_multiple_of
        self.lengths = self.documents.lengths()
        if self.lengths.max(initial=0) > pack_len:
            at = int(np.argmax(self.lengths > pack_len))
            raise ValueError(
                f"document {at} has {self.lengths[at]} tokens but pack_len is {pack_len}; raise "
                "pack_len, or cut the document, as make_supervised_dset does"
            )
        NO_LIMITS.check(dataset, "training")
        self._enabled_where_pickled = False
        self.repack(0)

    def repack(self, epoch: int) -> None:
        """Draw the rows of an epoch. Every epoch has equally many."""
        epoch = 0 if find_strategy(self.strategy).order_dependent else epoch
        seed = None if self.shuffle_seed is None else (self.shuffle_seed, epoch)
        self.plan: PackingPlan = pack(self.lengths, self.pack_len, self.strategy, seed)
        num_rows = -(-len(self.plan) // self.rows_multiple_of) * self.rows_multiple_of
        rows = split_bins(self.plan, num_rows)
        self._rows = rows + [np.array([-1])] * (num_rows - len(rows))  # -1: no document

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        """Return a row: `input_ids`, `labels`, and document numbers from 1 in `attention_mask`."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._joined([self._rows[index]])

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, Tensor]]:
        """Return the rows of a micro-batch as one row; a data loader calls this."""
        if not (enabled_models or self._enabled_where_pickled):
            raise RuntimeError("no model isolates documents: call enable_packing(model) first")
        return [self._joined([self._rows[index] for index in indices])]

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no model.
        return self.__dict__ | {"_enabled_where_pickled": bool(enabled_models)}

    def _joined(self, rows: Sequence[np.ndarray]) -> dict[str, Tensor]:
        token = getattr(self.tokenizer, "pad_token_id", None) or 0
        empty = {"input_ids": np.array([token]), "labels": np.array([IGNORE_INDEX])}
        documents = [self.documents[i] if i >= 0 else empty for i in np.concatenate(rows)]
        ids = [document["input_ids"].astype(np.int64) for document in documents]
        lengths = [*map(len, ids)]
        first = 2 if len(documents) == 1 else 1  # a mask of ones may be any collator's
        columns = {
            "input_ids": np.concatenate(ids),
            "labels": np.concatenate([*map(document_labels, documents, ids)]),
            "attention_mask": np.repeat(np.arange(first, len(documents) + first), lengths),
        }
        columns["labels"][np.cumsum([0, *lengths[:-1]])] = IGNORE_INDEX
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def stat(self) -> None:
        """Print the number of documents and rows, their mean tokens, and the utilization."""
        documents = len(self.lengths)
        rows = len(self)
        tokens = int(self.lengths.sum())
        print(
            f"Number of sequences: {documents:,} documents -> {rows:,} rows of {self.pack_len:,}\n"
            f"Average effective length: {tokens / documents:,.1f} -> {tokens / rows:,.1f} tokens "
            f"({tokens / (rows * self.pack_len):.2%} filled)"
        )


@dataclass(eq=False)
class RepackEveryEpoch(TrainerCallback):
    """Draw new rows of a `PackedDataset` before every epoch, the same ones on all ranks.

    Args:
        dataset: the training set. Persistent loader workers keep the rows of their first epoch.
    """

    dataset: PackedDataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # In a resumed run, `state.epoch` is in the middle of the epoch that continues.
        self.dataset.repack(int((state.epoch or 0) + 1e-6))


def make_supervised_dset(
    tokenizer: Any,
    data_path: str | Sequence[str],
    query_field: str | Sequence[str] = "query",
    resp_field: str | Sequence[str] = "response",
    tokenized_cache_home: str | None = None,
    shuffle_seed: int | None = 42,
    pack_len: int | None = None,
    prompt_template: str = "alpaca",
    *,
    overflow: str = "truncate",
    rows_multiple_of: int = 1,
) -> "PackedDataset | Dataset":
    """Return queries and responses as packed rows. Responses are trained, including their EOS.

    Args:
        tokenizer: of the model.
        data_path: a .json, .jsonl or .parquet file, a folder of such files, or a hub id; or several
            of these.
        query_field: the column of queries, one name for all paths or one for each.
        resp_field: the column of responses, one name for all paths or one for each.
        tokenized_cache_home: the cache folder of `datasets`. If None or "", its default.
        shuffle_seed: as in `PackedDataset`.
        pack_len: most tokens of a row. If None or not positive, the documents are returned
            unpacked, as a `datasets.Dataset` with `input_ids`, `labels` and `attention_mask`.
        prompt_template: "alpaca", "qa", a file, or a text with columns in braces.
        overflow: the policy for documents longer than `pack_len` or the tokenizer's
            `model_max_length`: "truncate", "truncate_prompt", "drop", "split" or "error".
        rows_multiple_of: as in `PackedDataset`.

    Raises:
        ValueError: the data cannot be read.
    """
    paths = [data_path] if isinstance(data_path, (str, os.PathLike)) else list(data_path)
    fields = []
    for given in (query_field, resp_field):
        names = [given] * len(paths) if isinstance(given, str) else list(given)
        if len(names) != len(paths):
            raise ValueError(f"{len(names)} fields {names} for {len(paths)} paths; give one name")
        fields.append(names)
    pack_len = max(pack_len or 0, 0)  # 0: not packed
    limits = (pack_len, tokenizer.model_max_length)
    capacity = min((n for n in limits if n and n < _NO_LIMIT), default=None)
    parts = []
    for path, query, response in zip(paths, *fields, strict=True):
        name = Path(path).name
        row_format = RowFormat(
            ChatTemplate(tokenizer),
            tokenizer.eos_token,
            prompt_template=PromptTemplate.from_setting(prompt_template, query),
            response_field=response,
        )
        rows = load_rows(os.fspath(path), cache_dir=tokenized_cache_home or None)
        fitted, counts = fit_and_count(
            documents_from_rows(rows, row_format, name=name),
            Overflow(overflow, capacity),
            stop_ids=stop_token_ids(tokenizer),
            name=name,
        )
        if str(counts):
            logger.warning(f"{path}: {counts}")
        for note in notes_on_unread(rows, row_format, name):
            logger.warning(note)
        parts.append(fitted)
    documents = concatenate_datasets(parts)
    if pack_len:
        return PackedDataset(
            documents, tokenizer, pack_len, shuffle_seed, rows_multiple_of=rows_multiple_of
        )
    return documents.map(
        lambda rows: {"attention_mask": [[1] * len(ids) for ids in rows["input_ids"]]}, batched=True
    )
