"""`DataCollatorForCompletionOnlyLM`, which TRL removed: train what follows a template.

    text       ### Question: Why?\\n ### Answer: Because.<eos>
    template                        ### Answer:
    labels     -100 … … … … … … … … … … … … …  Because . <eos>

It works alone, with any trainer, as it did; in `PackedSFTTrainer` it labels the documents once,
while they are prepared.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import DataCollatorForLanguageModeling
from trl.data_utils import get_dataset_column_names

from trl_packing.collator import PackedCollator
from trl_packing.labels import DOCUMENT_WEIGHT_COLUMN, IGNORE_INDEX, WEIGHT_COLUMN
from trl_packing.templates import Templates

logger = logging.getLogger(__name__)


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Train what follows the response template; with TRL 0.17's arguments.

    response_template: text or token ids; what follows its last occurrence is trained. Ids that are
        not in a document are looked for by the text that they stand for.
    instruction_template: text or token ids; with it every answer is trained, from the end of each
        response template to the next instruction template.
    tokenizer: decodes documents, and pads them.
    mlm: must be False.
    ignore_index: the label of what is not trained.
    padding_free: one flat row, exactly the batch of `PackedCollator`, instead of padded rows.
    processing_class: another name of `tokenizer`; a processor's tokenizer is taken.
    pad_to_multiple_of: T of a batch becomes a multiple of it.
    return_tensors: must be "pt".

    `num_seen` and `num_unfound` count documents, and those of them without the template (or without
    the instruction template): these train nothing, and a warning says how many they are.

    Different from TRL on purpose: padding is masked by its place and not by its id, so an answer's
    EOS token is trained also where it is the padding token; and `labels` of examples, tokens under
    an `attention_mask` of 0, and other columns take no part in padded rows either.

    Raises ValueError for mlm=True, for an empty template, and for other tensors than PyTorch's.
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
        processing_class: Any = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
        **unused: Any,  # settings of masked language modeling: transformers' class checks them
    ):
        tokenizer = processing_class if tokenizer is None else tokenizer
        if tokenizer is None:
            raise TypeError("DataCollatorForCompletionOnlyLM needs tokenizer=...")
        if mlm:
            raise ValueError(
                "mlm=True predicts tokens masked at random, but the response template is for a "
                "causal language model; leave mlm=False"
            )
        if return_tensors != "pt":
            raise ValueError(f"return_tensors must be 'pt', got {return_tensors!r}")
        super().__init__(
            getattr(tokenizer, "tokenizer", tokenizer),
            mlm=False,
            pad_to_multiple_of=pad_to_multiple_of,
            **unused,
        )
        self.response_template = response_template
        self.instruction_template = instruction_template
        self.ignore_index = ignore_index
        self.padding_free = padding_free
        self.templates = Templates.of(self.tokenizer, response_template, instruction_template)
        self.num_seen = self.num_unfound = 0

    def labels_of(self, input_ids: Any) -> np.ndarray:
        """Return the labels ``(T,)`` int64 of one document, and count it."""
        ids = np.asarray(input_ids).astype(np.int64, copy=False)
        return np.where(self.trained(ids), ids, self.ignore_index)

    def trained(self, input_ids: np.ndarray) -> np.ndarray:
        """Return ``(T,)`` bool, True on the trained tokens of one document, and count it."""
        trained = self.templates.trained(input_ids)
        self.num_seen += 1
        if trained is not None:
            return trained
        self.num_unfound += 1
        if str(self.num_unfound).rstrip("0") == "1":  # 1, 10, 100, …: not a line a document
            logger.warning(self.templates.unfound(self.num_unfound, self.num_seen, input_ids))
        return np.zeros(len(input_ids), bool)

    def torch_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        """Return a batch of examples: mappings with `input_ids`, or lists of ids."""
        documents = [self._document(example) for example in examples]
        batch: dict[str, Any]
        if self.padding_free:
            batch = PackedCollator(self.tokenizer.pad_token_id or 0, self.pad_to_multiple_of)(
                documents
            )
        else:
            batch = self._padded(documents)
        labels = batch["labels"]
        labels[labels == IGNORE_INDEX] = self.ignore_index
        return batch

    def numpy_call(self, examples: Sequence[Any]) -> dict[str, Any]:
        raise ValueError("return_tensors must be 'pt'")  # the parent's labels would be unmasked

    def _document(self, example: Any) -> dict[str, np.ndarray]:
        columns = example if isinstance(example, Mapping) else {"input_ids": example}
        ids = np.asarray(columns["input_ids"]).astype(np.int64, copy=False)
        if columns.get("attention_mask") is not None:
            ids = ids[np.asarray(columns["attention_mask"]) != 0]
        return {"input_ids": ids, "labels": self.labels_of(ids)}

    def _padded(self, documents: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
        if self.tokenizer.pad_token_id is None:
            raise ValueError(
                "the tokenizer has no padding token; set tokenizer.pad_token, or padding_free=True"
            )
        width = max(len(document["input_ids"]) for document in documents)
        width += -width % (self.pad_to_multiple_of or 1)
        shape = (len(documents), width)
        batch = {
            "input_ids": torch.full(shape, self.tokenizer.pad_token_id),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "labels": torch.full(shape, self.ignore_index),
        }
        for row, document in enumerate(documents):
            length = len(document["input_ids"])
            first = width - length if self.tokenizer.padding_side == "left" else 0
            for name, values in document.items():
                batch[name][row, first : first + length] = torch.from_numpy(values)
            batch["attention_mask"][row, first : first + length] = 1
        return batch


# --- data preparation -----------------------------------------------------------------------------


def label_documents(
    dataset: Dataset | IterableDataset,
    collator: DataCollatorForCompletionOnlyLM,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, str | None]:
    """Return `dataset` with `labels` from `collator`, and a sentence on documents without template.

    A stream is labeled, counted and warned about each time that it is read, by the collator; its
    sentence is None, and only its token columns are kept.
    Raises ValueError if no document of a data set has the template.
    """
    if isinstance(dataset, IterableDataset):
        columns = get_dataset_column_names(dataset)
        kept = [c for c in _STREAM_COLUMNS if c in {*columns, "labels"}]
        labeled = dataset.map(
            _label_stream,
            batched=True,
            fn_kwargs={"collator": collator},
            remove_columns=[c for c in columns if c not in kept],
            # Or whoever asks for its columns reads, and counts, the first thousand documents.
            features=Features({c: _STREAM_COLUMNS[c] for c in kept}),
        )
        return labeled, None
    # Not `labels_of`: other processes could not count here, and a cached result would not.
    labeled = dataset.map(
        _label_batch,
        batched=True,
        fn_kwargs={"templates": collator.templates},
        num_proc=num_proc,
        desc=f"Finding the response template in {name} dataset",
    )
    seen, unfound = (np.asarray(labeled.with_format("numpy")[c][:]) for c in _COUNTS)
    labeled = labeled.remove_columns(list(_COUNTS))
    collator.num_seen += int(seen.sum())
    collator.num_unfound += int(unfound.sum())
    if not unfound.any():
        return labeled, None
    first = np.asarray(labeled[int(np.argmax(unfound > 0))]["input_ids"])
    words = collator.templates.unfound(int(unfound.sum()), int(seen.sum()), first)
    if (unfound == seen).all():
        raise ValueError(f"no document of the {name} dataset has a trained token left: {words}")
    return labeled, f"{name} dataset: {words}"


_STREAM_COLUMNS = {
    "input_ids": List(Value("int64")),
    "labels": List(Value("int64")),
    "seq_lengths": List(Value("int64")),
    WEIGHT_COLUMN: List(Value("float32")),
    DOCUMENT_WEIGHT_COLUMN: Value("float32"),
}
_COUNTS = ("_documents_seen", "_documents_unfound")


def _label_batch(batch: Mapping[str, Any], templates: Templates) -> dict[str, list[Any]]:
    labels, seen, unfound = [], [], []
    for documents in _documents_of(batch):
        trained = [templates.trained(ids) for ids in documents]
        labels.append(
            np.concatenate(
                [
                    np.full(len(ids), IGNORE_INDEX) if mask is None else _masked(ids, mask)
                    for ids, mask in zip(documents, trained, strict=True)
                ]
            )
        )
        seen.append(len(documents))
        unfound.append(sum(mask is None for mask in trained))
    return {"labels": labels, **dict(zip(_COUNTS, (seen, unfound), strict=True))}


def _label_stream(
    batch: Mapping[str, Any], collator: DataCollatorForCompletionOnlyLM
) -> dict[str, list[Any]]:
    labels = [
        np.concatenate([_masked(ids, collator.trained(ids)) for ids in documents])
        for documents in _documents_of(batch)
    ]
    return {"labels": labels}


def _masked(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    return np.where(trained, ids, IGNORE_INDEX)


def _documents_of(batch: Mapping[str, Any]) -> list[list[np.ndarray]]:
    """Return the documents of each row: one, or as many as its `seq_lengths` names."""
    rows = [np.asarray(ids, dtype=np.int64) for ids in batch["input_ids"]]
    if "seq_lengths" not in batch:
        return [[ids] for ids in rows]
    return [
        np.split(ids, np.cumsum(np.asarray(lengths))[:-1])
        for ids, lengths in zip(rows, batch["seq_lengths"], strict=True)
    ]
