"""Response templates: find them in texts and in token ids, and train what answers them.

A text is searched for the characters of a template. Rows that were tokenized before are searched
for its ids, as by TRL: a tokenizer splits "### Answer:" differently after a line break than alone,
so those must be the ids that it has inside of a document.

`DataCollatorForCompletionOnlyLM`, which TRL removed, works with any trainer, as before. In
`PackedSFTTrainer` it labels the documents once, during preparation.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import DataCollatorForLanguageModeling
from trl.data_utils import get_dataset_column_names
from trl.trainer.utils import pad

from trl_packing.data.printable import quote
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    check_same_columns,
    document_labels,
    refused_beyond_int64,
)
from trl_packing.packing.collator import PackedCollator

logger = logging.getLogger(__name__)

Span = tuple[int, int]  # [start, stop), in tokens or in characters


@dataclass(frozen=True)
class Marker:
    """A template as the `text` and as the `token_ids` that are searched for."""

    text: str
    token_ids: tuple[int, ...]

    @classmethod
    def from_setting(cls, tokenizer: Any, template: str | Sequence[int], name: str) -> "Marker":
        """Return the marker of the setting `name`. Raises ValueError for an empty one."""
        if len(template) == 0:
            raise ValueError(f"{name} is empty: it would be found everywhere")
        if isinstance(template, str):
            return cls(template, tuple(tokenizer.encode(template, add_special_tokens=False)))
        ids = [int(token) for token in template]
        return cls(tokenizer.decode(ids, clean_up_tokenization_spaces=False), tuple(ids))

    def places(self, document: str | np.ndarray) -> list[Span]:
        """Return the characters of every occurrence in a text, or its tokens in ids ``(T,)``."""
        if isinstance(document, str):
            starts = re.finditer(f"(?={re.escape(self.text)})", document) if self.text else ()
            return [(found.start(), found.start() + len(self.text)) for found in starts]
        size = len(self.token_ids)
        if not 0 < size <= len(document):
            return []
        windows = np.lib.stride_tricks.sliding_window_view(document, size)
        at = np.flatnonzero((windows == np.array(self.token_ids)).all(axis=1))
        return [(start, start + size) for start in at.tolist()]


@dataclass(frozen=True)
class ResponseTemplate:
    """A response template, with or without an instruction template."""

    tokenizer: Any
    response: Marker
    instruction: Marker | None

    @classmethod
    def from_settings(
        cls, tokenizer: Any, response: str | Sequence[int], instruction: str | Sequence[int] | None
    ) -> "ResponseTemplate":
        marker, other = Marker.from_setting(tokenizer, response, "response_template"), None
        if instruction is not None:
            other = Marker.from_setting(tokenizer, instruction, "instruction_template")
        return cls(tokenizer, marker, other)

    def answers(self, document: str | np.ndarray) -> list[Span] | None:
        """Return what answers a template, in characters of a text or tokens of ids ``(T,)``.

        Spans are behind each response template, up to the next instruction template; without
        instructions, behind the last one. None if one is not found.
        """
        responses = self.response.places(document)
        if not responses:
            return None
        if self.instruction is None:
            return [(responses[-1][1], len(document))]
        instructions = self.instruction.places(document)
        if not instructions:
            return None
        answers = []
        for _, stop in responses:
            # Compare ends: an instruction template may be the beginning of the response template.
            later = (start for start, end in instructions if end > stop)
            answers.append((stop, next(later, len(document))))
        return answers

    def labels(
        self, input_ids: np.ndarray, ignore_index: int = IGNORE_INDEX
    ) -> tuple[np.ndarray, bool]:
        """Return the labels of a document, ``(T,)`` int64, and whether the templates are found."""
        answers = self.answers(input_ids)
        labels = np.full(len(input_ids), ignore_index, np.int64)
        for start, stop in answers or ():
            labels[start:stop] = input_ids[start:stop]
        return labels, answers is not None

    def not_found(self, number: int, of: int, input_ids: np.ndarray) -> str:
        """Return a sentence on `number` of documents without a template, with tokens of one."""
        names = f"response_template {self.response.text!r}"
        if self.instruction is not None:
            names += f" or no instruction_template {self.instruction.text!r}"
        text = self.tokenizer.decode(input_ids.tolist())
        return (
            f"{number:,} of {of:,} documents ({number / of:.1%}) have no {names}, so nothing in "
            f"them is trained; one of them starts {quote(text[:200])}; if the text is there, pass "
            "its token ids inside of a document"
        )


# --- rows that were tokenized before --------------------------------------------------------------


def label_tokenized(
    dataset: Dataset | IterableDataset,
    *,
    completion_only: bool,
    template: ResponseTemplate | None = None,
    num_proc: int | None = None,
    name: str = "train",
) -> Dataset | IterableDataset:
    """Return tokenized rows with `labels`, by a template or, as TRL does, by their masks.

    `assistant_masks` are always applied, `completion_mask` with `completion_only`.
    """
    present = get_dataset_column_names(dataset)
    if template is None and "labels" in present:
        return dataset
    masks = [column for column in MASK_COLUMNS if column in present]
    options: dict[str, Any] = {
        "fn_kwargs": {
            "columns": present,
            "masks": [m for m in masks if completion_only or m != "completion_mask"],
            "template": template,
        },
        "batched": True,
        "with_indices": True,
        "remove_columns": masks,
    }
    if isinstance(dataset, Dataset):
        options |= {"num_proc": num_proc, "desc": f"Building labels for {name} dataset"}
    return dataset.with_format(None).map(_label_batch, **options)


def _label_batch(
    batch: Mapping[str, Sequence[Any]],
    rows: Sequence[int],
    columns: Sequence[str],
    masks: Sequence[str],
    template: ResponseTemplate | None,
) -> dict[str, list[np.ndarray]]:
    check_same_columns(batch, rows, columns)
    labels = []
    with refused_beyond_int64(rows):
        ids_of_rows = [np.asarray(values, np.int64) for values in batch["input_ids"]]
    for number, ids in enumerate(ids_of_rows):
        if template is None:
            labels.append(document_labels({name: batch[name][number] for name in masks}, ids))
            continue
        lengths = batch[SEQ_LENGTHS][number] if SEQ_LENGTHS in batch else [len(ids)]
        documents = np.split(ids, np.cumsum(lengths)[:-1])
        labels.append(np.concatenate([template.labels(document)[0] for document in documents]))
    return {"labels": labels}


# --- the collator ---------------------------------------------------------------------------------


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Train the text after the response template, with TRL 0.17's arguments.

    `num_seen` counts documents, and `num_unfound` those without a template, which train nothing.

    Padding is masked by position, not by token id as in TRL, so the EOS of an answer is trained
    even if it is also the padding token. `labels` of examples and other columns are ignored.

    Args:
        response_template: text or token ids; what follows its last occurrence is trained. The ids
            of a text are those that it has alone.
        instruction_template: text or token ids; if given, every answer is trained, from the end of
            each response template to the next instruction template.
        tokenizer: decodes documents, and pads them; of a processor, its tokenizer is used.
        mlm: must be False.
        ignore_index: the label of tokens that are not trained.
        padding_free: return one flat row, the batch of `PackedCollator`, instead of padded rows.
        pad_to_multiple_of: T of a batch is rounded up to a multiple of this.
        return_tensors: must be "pt".

    Raises:
        ValueError: ``mlm=True``, an empty template, or tensors other than PyTorch's.
    """

    tokenizer: Any

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        tokenizer: Any = None,
        *,
        mlm: bool = False,
        ignore_index: int = IGNORE_INDEX,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
        **unused: Any,  # settings of masked language modeling: transformers' class checks them
    ):
        if mlm or return_tensors != "pt":
            raise ValueError(f"mlm={mlm} and {return_tensors=} must be False and 'pt'")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        super().__init__(tokenizer, mlm=False, pad_to_multiple_of=pad_to_multiple_of, **unused)
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.templates = ResponseTemplate.from_settings(
            self.tokenizer, response_template, instruction_template
        )
        self.num_seen = self.num_unfound = 0

    def labels_of(self, input_ids: Any) -> np.ndarray:
        """Return the labels ``(T,)`` int64 of one document, and count it."""
        ids = np.asarray(input_ids).astype(np.int64, copy=False)
        labels, found = self.templates.labels(ids, self.ignore_index)
        self.num_seen += 1
        self.num_unfound += not found
        # At 1, 10, 100, …: not one line per document.
        if not found and str(self.num_unfound).rstrip("0") == "1":
            logger.warning(self.templates.not_found(self.num_unfound, self.num_seen, ids))
        return labels

    def torch_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of examples: mappings with `input_ids`, or lists of ids."""
        documents = []
        for example in examples:
            columns = example if isinstance(example, Mapping) else {"input_ids": example}
            ids = np.asarray(columns["input_ids"]).astype(np.int64, copy=False)
            if columns.get("attention_mask") is not None:
                ids = ids[np.asarray(columns["attention_mask"]) != 0]
            documents.append({"input_ids": ids, "labels": self.labels_of(ids)})
        padding = self.tokenizer.pad_token_id
        if self.padding_free:
            batch = PackedCollator(padding or 0, self.pad_to_multiple_of)(documents)
            batch["labels"][batch["labels"] == IGNORE_INDEX] = self.ignore_index
            return batch
        if padding is None:
            raise ValueError("the tokenizer has no padding token; set it, or padding_free=True")
        for document in documents:
            document["attention_mask"] = np.ones_like(document["input_ids"])
        fill = {"input_ids": padding, "attention_mask": 0, "labels": self.ignore_index}
        side, multiple = self.tokenizer.padding_side, self.pad_to_multiple_of
        return {
            name: pad([torch.from_numpy(d[name]) for d in documents], value, side, multiple)
            for name, value in fill.items()
        }

    def numpy_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        raise ValueError("return_tensors must be 'pt'")  # the parent's labels would be unmasked
