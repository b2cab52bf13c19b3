"""`DataCollatorForCompletionOnlyLM`, which TRL removed: train the text after a template.

    text       ### Question: Why?\n ### Answer: Because.<eos>
    template                        ### Answer:
    labels     -100 … … … … … … … … … … … … …  Because . <eos>

It works with any trainer, as before. In `PackedSFTTrainer` it labels the documents once, during
preparation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorForLanguageModeling

from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.formatting.label_tokenized import ResponseLabeler
from trl_packing.formatting.response_template import ResponseTemplate
from trl_packing.packing.collator import PackedCollator


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Train the text after the response template, with TRL 0.17's arguments.

    `num_seen` counts documents, and `num_unfound` those without the template (or without the
    instruction template). Such documents train nothing, and a warning gives their number.

    Two differences from TRL are intended. Padding is masked by position and not by token id, so the
    EOS of an answer is trained even if EOS is also the padding token. `labels` of examples, tokens
    under an `attention_mask` of 0, and other columns are ignored in padded rows too.

    Args:
        response_template: text or token ids; the text after its last occurrence is trained. Ids
            that are not found in a document are searched by the text that they decode to.
        instruction_template: text or token ids; if given, every answer is trained, from the end of
            each response template to the next instruction template.
        tokenizer: decodes documents, and pads them.
        mlm: must be False.
        ignore_index: the label of tokens that are not trained.
        padding_free: return one flat row, the batch of `PackedCollator`, instead of padded rows.
        processing_class: another name of `tokenizer`; of a processor, its tokenizer is used.
        pad_to_multiple_of: T of a batch is rounded up to a multiple of this.
        return_tensors: must be "pt".

    Raises:
        ValueError: ``mlm=True``, an empty template, or tensors other than PyTorch's.
        TypeError: there is no tokenizer.
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
        self.labeler = ResponseLabeler(
            ResponseTemplate.from_settings(self.tokenizer, response_template, instruction_template)
        )

    @property
    def num_seen(self) -> int:
        return self.labeler.num_seen

    @property
    def num_unfound(self) -> int:
        return self.labeler.num_not_found

    def labels_of(self, input_ids: Any) -> np.ndarray:
        """Return the labels ``(T,)`` int64 of one document, and count it."""
        ids = np.asarray(input_ids).astype(np.int64, copy=False)
        return np.where(self.labeler.trained(ids), ids, self.ignore_index)

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
