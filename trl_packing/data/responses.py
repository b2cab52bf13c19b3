"""Response templates: find them in texts and in token ids, and train what answers them.

A text is searched for the characters of a template. Rows that were tokenized before are searched
for the ids that it has inside of a document: alone, a tokenizer may split it differently.
`DataCollatorForCompletionOnlyLM`, which TRL removed, works with any trainer, as before. In
`PackedSFTTrainer` it labels the documents once, during preparation.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling
from trl.data_utils import get_dataset_column_names

from trl_packing.data.chat_template import tokenizer_in
from trl_packing.data.printable import quote
from trl_packing.data.spans import Span
from trl_packing.documents.arrow import AnyDataset
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    Batch,
    check_same_columns,
    document_labels,
    refused_beyond_int64,
)
from trl_packing.packing.collator import PackedCollator

logger = logging.getLogger(__name__)

Template: TypeAlias = str | Sequence[int]  # text, or token ids


class Marker:
    """A template as the `text` and as the `token_ids` that are searched for."""

    def __init__(self, tokenizer: Any, template: Template, name: str):
        if len(template) == 0:
            raise ValueError(f"{name} is empty: it would be found everywhere")
        if isinstance(template, str):
            self.text = template
            self.token_ids = tokenizer.encode(template, add_special_tokens=False)
        else:
            self.token_ids = [int(token) for token in template]
            self.text = tokenizer.decode(self.token_ids, clean_up_tokenization_spaces=False)

    def spans(self, document: str | np.ndarray) -> list[Span]:
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


class ResponseTemplate:
    """A response template, with or without an instruction template."""

    def __init__(self, tokenizer: Any, response: Template, instruction: Template | None):
        self.tokenizer = tokenizer
        self.response = Marker(tokenizer, response, "response_template")
        self.instruction = None
        if instruction is not None:
            self.instruction = Marker(tokenizer, instruction, "instruction_template")

    def answers(self, document: str | np.ndarray) -> list[Span] | None:
        """Return what answers a template, in characters of a text or tokens of ids ``(T,)``.

        Spans are behind each response template, up to the next instruction template; without
        instructions, behind the last one. None if one is not found.
        """
        responses = self.response.spans(document)
        if not responses:
            return None
        if self.instruction is None:
            return [(responses[-1][1], len(document))]
        instructions = self.instruction.spans(document)
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

    def not_found(self, documents: str, input_ids: np.ndarray) -> str:
        """Return a sentence on `documents` without a template, with the tokens of one of them."""
        names = f"response_template {self.response.text!r}"
        if self.instruction is not None:
            names += f" or no instruction_template {self.instruction.text!r}"
        start = quote(self.tokenizer.decode(input_ids.tolist())[:200])
        return (
            f"{documents} have no {names}, so nothing in them is trained; one starts {start}; if "
            "the text is there, pass its token ids inside of a document"
        )


def label_tokenized(
    dataset: AnyDataset,
    *,
    completion_only: bool,
    template: ResponseTemplate | None = None,
    num_proc: int | None = None,
    name: str = "train",
) -> AnyDataset:
    """Return tokenized rows with `labels`, by a template or, as TRL does, by their masks."""
    present = get_dataset_column_names(dataset)
    if template is None and "labels" in present:
        return dataset
    masks = [column for column in MASK_COLUMNS if column in present]
    applied = [m for m in masks if completion_only or m != "completion_mask"]
    rules = {"columns": present, "masks": applied, "template": template}
    options: dict[str, Any] = {"batched": True, "with_indices": True, "remove_columns": masks}
    if isinstance(dataset, Dataset):
        options |= {"num_proc": num_proc, "desc": f"Building labels for {name} dataset"}
    return dataset.with_format(None).map(_label_batch, fn_kwargs=rules, **options)


def _label_batch(
    batch: Batch,
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


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Train the text after the response template, with TRL 0.17's arguments.

    Padding is masked by position, not by token id as in TRL, so the EOS of an answer is trained
    even if it is also the padding token. `labels` of examples and other columns are ignored.

    Args:
        response_template: text or token ids; what follows its last occurrence is trained. The ids
            of a text are those that it has alone.
        instruction_template: text or token ids; if given, every answer is trained, from the end of
            each response template to the next instruction template.
        tokenizer: decodes documents, and pads them; of a processor, its tokenizer is used.
        mlm: must be False, else ValueError.
        ignore_index: the label of tokens that are not trained.
        padding_free: return one flat row, the batch of `PackedCollator`, instead of padded rows.
        pad_to_multiple_of: T of a batch is rounded up to a multiple of this.
    """

    tokenizer: Any

    def __init__(
        self,
        response_template: Template,
        instruction_template: Template | None = None,
        tokenizer: Any = None,
        *,
        mlm: bool = False,
        ignore_index: int = IGNORE_INDEX,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        **unused: Any,  # settings of masked language modeling: transformers' class checks them
    ):
        if mlm:
            raise ValueError("mlm=True must be False: answers are trained, not masked tokens")
        super().__init__(
            tokenizer_in(tokenizer),
            mlm=False,
            pad_to_multiple_of=pad_to_multiple_of,
            **unused,
        )
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.templates = ResponseTemplate(self.tokenizer, response_template, instruction_template)
        self._has_warned = False

    def torch_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of examples: mappings with `input_ids`, or lists of ids."""
        documents = []
        for example in examples:
            columns = example if isinstance(example, Mapping) else {"input_ids": example}
            ids = np.asarray(columns["input_ids"], np.int64)
            if columns.get("attention_mask") is not None:
                ids = ids[np.asarray(columns["attention_mask"]) != 0]
            labels, found = self.templates.labels(ids, self.ignore_index)
            if not found and not self._has_warned:  # not one line per document
                self._has_warned = True
                logger.warning(self.templates.not_found("documents", ids))
            documents.append({"input_ids": ids, "labels": labels})
        if self.padding_free:
            collate = PackedCollator(self.tokenizer.pad_token_id or 0, self.pad_to_multiple_of)
            batch = collate(documents)
            batch["labels"][batch["labels"] == IGNORE_INDEX] = self.ignore_index
            return batch
        rows = [{"input_ids": document["input_ids"].tolist()} for document in documents]
        batch = self.tokenizer.pad(
            rows,
            pad_to_multiple_of=self.pad_to_multiple_of,
            return_attention_mask=True,
            return_tensors="pt",
        )
        flat = torch.from_numpy(np.concatenate([document["labels"] for document in documents]))
        of_rows = torch.full_like(batch["input_ids"], self.ignore_index)
        of_rows[batch["attention_mask"] == 1] = flat
        return {**batch, "labels": of_rows}

    def numpy_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        raise ValueError("return_tensors must be 'pt'")  # the parent's labels would be unmasked
