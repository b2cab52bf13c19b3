"""Documents in, one flat packed batch out; the only place that spells Hugging Face's batch keys.

    documents           [11 12 13] [21 22]        completion masks [0 1 1] [0 1]
    input_ids           11  12  13  21  22        (1, T) int64
    labels            -100  12  13 -100 22        (1, T) int64, prompt and document starts −100
    position_ids         0   1   2   0   1        (1, T) int64
    loss_weights         0   1  .5   0   1        (1, T) float32, if there are any
    source_ids           0   0   0   3   3        (1, T) int64, −1 on padding, if there are any
    seq_idx              0   0   0   1   1        (1, T) int32, for short convolutions
    cu_seq_lens_q/k      0           3       5    (N + 1,) int32
    max_length_q/k       3                        int   } for models that are not prepared for
    use_cache            False                          } packing; not in a batch of `tensors_only`

A batch never has an attention_mask or a cache. With either one, transformers skips its detection of
packed documents, and every token silently sees the documents before it
(tests/attention/test_packed_models.py::test_attention_mask_or_cache_breaks_isolation).
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trl_packing.attention.model_facts import layer_values, rope_thresholds, text_config
from trl_packing.attention.sequence_parallel import share_of_rank
from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
from trl_packing.documents.host_row import HostRow, PackedBatch
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    SEQ_LENGTHS,
    SOURCE_IDS,
    TOKEN_WEIGHTS,
    Document,
    document_labels,
)
from trl_packing.documents.weights import document_weight, token_weights, weigh_tokens
from trl_packing.packing.prefix_tree import share_prefixes

# --- one shape --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StaticShapes:
    """The shape that all batches share, for `torch.compile` and a GPU's allocator.

        documents      a a a a a | b b | c c c                    10 tokens of 16
        row            a a a a a | b b | c c c | . . . . . .      padded with a masked document
        cu_seqlens     0 5 7 10 10 10 10 10 16                    four documents have no tokens

    Attributes:
        num_tokens: T of a row; a longer row is padded to a multiple of it.
        max_length: length of the longest document, as passed to kernels.
        num_documents: boundaries of a row, minus one; a row that needs more has twice as many, or
            four times as many, ...
        longest_tail: most tokens of a masked document; a longer tail becomes several of them.
    """

    num_tokens: int
    max_length: int
    num_documents: int
    longest_tail: int

    @classmethod
    def for_model(
        cls, model: Any, num_tokens: int, longest: int, most_documents: int | None = None
    ) -> "StaticShapes":
        """Return the shape of micro-batches for `model`.

        Args:
            model: limits the length of masked documents by its position embeddings.
            num_tokens: of a row.
            longest: tokens of the longest document.
            most_documents: in a micro-batch of this epoch; later ones differ. None makes room for
                documents of 32 tokens.
        """
        expected = num_tokens // 32 if most_documents is None else most_documents * 5 // 4
        # Some rotary embeddings depend on the longest position in the row, and learned positions
        # end: a tail longer than the documents would change the former and exceed the latter.
        learned = layer_values(text_config(model), "max_position_embeddings")
        limits = [*rope_thresholds(model), *learned]
        return cls(
            num_tokens=num_tokens,
            max_length=longest,
            num_documents=expected + 2,  # one without tokens, and a tail
            longest_tail=min([longest, *(limit for limit in limits if limit > 0)]),  # xlnet: -1
        )

    def masked_documents(self, num_documents: int, num_tokens: int) -> list[int]:
        """Return the lengths of the documents behind those of a row: empty ones, then padding.

        Examples:
            >>> shapes = StaticShapes(16, max_length=8, num_documents=8, longest_tail=8)
            >>> shapes.masked_documents(3, num_tokens=5)
            [0, 0, 0, 8, 3]
        """
        missing = -num_tokens % self.num_tokens if num_tokens else self.num_tokens
        full, left = divmod(missing, self.longest_tail)
        padding = [self.longest_tail] * full + [left] * bool(left)
        held = self.num_documents
        needed = num_documents + len(padding)
        while held <= needed:
            held *= 2
        return [0] * (held - needed) + padding


# --- rows -------------------------------------------------------------------------------------


@dataclass
class PackedCollator:
    """Flatten documents into one padding-free row.

    A document is a mapping with `input_ids` and, in this order of precedence, `labels`, or
    `completion_mask` and/or `assistant_masks` (1 on trained tokens), or nothing (every token is
    trained). With `seq_lengths`, or an `attention_mask` that numbers its documents (1 1 2 2 2), it
    is a row that already holds several. `loss_weights` weigh each trained token, and `loss_weight`,
    a number, weighs all of them. Take the weights out of the batch in a training loop of your own:
    the model does not accept them.

    An empty list of documents gives a batch with one masked token, so that a rank without documents
    still takes part in the step, and a blank image where ranks wait for each other's vision tower.

    Attributes:
        pad_token_id: token id of the padding that `pad_to_multiple_of` adds.
        pad_to_multiple_of: makes T a multiple of it by one more document, which is masked.
        loss_weighting: effect of a document's length on its weights: "token", "document" or "sqrt"
            (documents/weights.py).
        static_shapes: shape of every batch; overrides `pad_to_multiple_of`.
        tensors_only: Leave out `max_length_q/k` and `use_cache`, and add the CPU copy of the row as
            `host` (`PackedBatch`). `PackedSFTTrainer` and `enable_packing` pass to their models
            what is left out.
        shares_prefixes: compute the tokens with which documents begin alike once (prefix_tree.py),
            on models that passed the check of such rows.
        images: adds the tensors of the images of documents (vision/batch.py); None without images.
        share: (rank, ranks): The row is divided over so many ranks, of which this one gets its
            tokens, and the boundaries of the row (attention/sequence_parallel.py).

    Examples:
        >>> collate = PackedCollator()
        >>> batch = collate(
        ...     [
        ...         {"input_ids": [11, 12, 13], "completion_mask": [0, 1, 1]},
        ...         {"input_ids": [21, 22], "completion_mask": [0, 1]},
        ...     ]
        ... )
        >>> batch["labels"].tolist(), batch["cu_seq_lens_q"].tolist()
        ([[-100, 12, 13, -100, 22]], [0, 3, 5])
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    loss_weighting: str = "token"
    static_shapes: StaticShapes | None = None
    tensors_only: bool = False
    shares_prefixes: bool = False
    images: Any = None
    share: tuple[int, int] = (0, 1)

    def replaced(self, **attributes: Any) -> "PackedCollator":
        """Return a copy with other attributes; a subclass may have its own constructor."""
        made = copy.copy(self)
        vars(made).update(attributes)
        return made

    def __call__(self, documents: Sequence[Document]) -> PackedBatch:
        """Return the batch of `documents`, in one row.

        Raises:
            ValueError: labels, masks, weights or `seq_lengths` do not match `input_ids`, or weights
                are not finite and ≥ 0.
        """
        input_ids = [_token_ids(document["input_ids"]) for document in documents]
        labels = [*map(document_labels, documents, input_ids)]
        rows = list(_seq_lengths(documents, input_ids))
        real = [length for row in rows for length in row if length]
        blanks = [] if self.images is None else self.images.blanks(documents)
        lengths = real + [len(document["input_ids"]) for document in blanks]
        masked = self._masked_documents(len(lengths), sum(lengths))
        lengths += masked
        tail = sum(lengths[len(real) :])
        padding = np.full(sum(masked), self.pad_token_id, dtype=np.int64)
        tokens = [*input_ids, *(document["input_ids"] for document in blanks), padding]
        seq_lengths = torch.tensor(lengths, dtype=torch.int64)
        flat_labels = torch.from_numpy(np.concatenate([*labels, np.full(tail, IGNORE_INDEX)]))
        starts = seq_lengths.cumsum(0) - seq_lengths
        flat_labels[starts[seq_lengths > 0]] = IGNORE_INDEX
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(np.concatenate(tokens))[None],
            "labels": flat_labels[None],
            **boundaries_of_row(
                seq_lengths, longest=self.static_shapes.max_length if self.static_shapes else 0
            ),
        }
        if has_weights(documents, self.loss_weighting):
            weights = self._weights(documents, rows, lengths, flat_labels.numpy())
            batch[TOKEN_WEIGHTS] = torch.from_numpy(weights)[None]
        sources = None
        if any(SOURCE_IDS in document for document in documents):
            ids = [document[SOURCE_IDS] for document in documents]
            source_ids = np.repeat([*ids, -1], [*map(sum, rows), tail])  # −1 behind the documents
            batch[SOURCE_IDS] = torch.from_numpy(source_ids)[None]
            sources = source_ids[starts[: len(real)].numpy()]
        if self.images is not None:
            batch |= self.images.tensors([*documents, *blanks], tokens)
        is_trained = flat_labels.numpy() != IGNORE_INDEX
        host = HostRow(
            np.cumsum([0, *lengths], dtype=np.int64),
            is_trained,
            tail,
            lengths=np.array(real, np.int64),
            num_trained=int(is_trained.sum()),
            max_length=batch["max_length_q"],
            sources=sources,
            num_images=0 if self.images is None else self.images.count(documents),
        )
        return self._finished(batch, host, real)

    def _finished(self, batch: dict[str, Any], host: HostRow, real: list[int]) -> PackedBatch:
        """Return a row with shared prefixes and its CPU copy, as the attributes say."""
        if self.shares_prefixes and len(real) > 1 and self.images is None:
            named = {*batch} & {"input_ids", "labels", TOKEN_WEIGHTS}
            apart = {name: batch[name][0, : sum(real)].numpy() for name in named}
            batch, host = share_prefixes(apart, real, host.sources) or (batch, host)
        rank, size = self.share
        if size > 1:
            batch = share_of_rank(batch, rank, size)
            is_trained = batch["labels"][0].numpy() != IGNORE_INDEX
            host = replace(host, is_trained=is_trained, is_counted=rank == 0)
        if not self.tensors_only:
            return PackedBatch(batch)
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        # A user's subclass may change the batch, and a CPU copy made here would then be wrong.
        is_ours = type(self).__call__ is PackedCollator.__call__
        return PackedBatch(tensors, host if is_ours else None)

    def _masked_documents(self, num_documents: int, num_tokens: int) -> list[int]:
        """Return the lengths of the masked documents that a row gets behind its own."""
        if self.static_shapes is not None:
            return self.static_shapes.masked_documents(num_documents, num_tokens)
        multiple = self.pad_to_multiple_of or 1
        missing = -num_tokens % multiple if num_tokens else multiple
        return [missing] if missing else []

    def _weights(
        self,
        documents: Sequence[Document],
        rows: Sequence[Sequence[int]],
        lengths: Sequence[int],
        labels: np.ndarray,
    ) -> np.ndarray:
        """Return the weight of each token of a row, ``(T,)``; those behind `rows` have 1."""
        sizes = [*map(sum, rows)]
        behind = np.ones(len(labels) - sum(sizes))
        weights = np.concatenate([*map(token_weights, documents, sizes), behind])
        factors = []
        for document, row in zip(documents, rows, strict=True):
            factors += [document_weight(document)] * np.count_nonzero(row)
        factors += [1.0] * (len(lengths) - len(factors))
        return weigh_tokens(weights, labels, lengths, factors, self.loss_weighting)


class DataCollatorWithFlattening(PackedCollator):
    """transformers' class of this name, with document boundaries in every batch.

    Some models need more than a batch to keep documents apart: call `enable_packing(model)` for
    these (`tests/drop_in/test_articles.py` has one).

    Args:
        return_flash_attn_kwargs: has no effect: boundaries are always in the batch.
        return_seq_idx: has no effect: `seq_idx` is always in the batch.
    """

    def __init__(self, *, return_flash_attn_kwargs: bool = True, return_seq_idx: bool = True):
        super().__init__()


def _token_ids(values: Any) -> np.ndarray:
    ids = np.asarray(values)
    if ids.dtype.kind not in "iu" and ids.size:  # a float would lose its fraction silently
        raise ValueError(f"input_ids must be integers, got {ids.dtype}; tokenize the text first")
    return ids.astype(np.int64, copy=False)


def _seq_lengths(
    documents: Sequence[Document], input_ids: Sequence[np.ndarray]
) -> Iterator[list[int]]:
    for row, (document, ids) in enumerate(zip(documents, input_ids, strict=True)):
        if document.get(SEQ_LENGTHS) is None:
            numbers = np.asarray(document.get("attention_mask", ()))
            is_packed = numbers.max(initial=0) > 1  # a row of `PackedDataset`
            yield lengths_from_numbers(numbers).tolist() if is_packed else [len(ids)]
            continue
        lengths = np.asarray(document[SEQ_LENGTHS]).tolist()
        if sum(lengths) != len(ids):
            raise ValueError(
                f"row {row} has {len(ids)} tokens, and its seq_lengths sum to {sum(lengths)}"
            )
        yield lengths


# --- weights ----------------------------------------------------------------------------------


def has_weights(documents: Sequence[Document], loss_weighting: str) -> bool:
    """Return whether a batch of `documents` has loss weights."""
    return loss_weighting != "token" or any(
        document.get(TOKEN_WEIGHTS) is not None or DOCUMENT_WEIGHT in document
        for document in documents
    )


@dataclass
class WeightedPaddedCollator:
    """The padded batches of `collator` (TRL's), with weights and sources as in packed batches."""

    collator: Any
    loss_weighting: str = "token"

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Return a padded batch, with `loss_weights` (rows, T) float32 if there are weights."""
        batch = self.collator(documents)
        labels = batch["labels"]
        if has_weights(documents, self.loss_weighting):
            sizes = [len(document["input_ids"]) for document in documents]
            weights = np.zeros(labels.shape)
            for row, document, size in zip(weights, documents, sizes, strict=True):
                row[:size] = token_weights(document, size)
            weights[:, 0] = 0  # never a target
            found = weigh_tokens(
                weights.ravel(),
                labels.numpy().ravel(),
                [labels.shape[1]] * len(labels),
                [*map(document_weight, documents)],
                self.loss_weighting,
            )
            batch[TOKEN_WEIGHTS] = torch.from_numpy(found).view(labels.shape)
        if any(SOURCE_IDS in document for document in documents):
            source_ids = torch.tensor([int(document[SOURCE_IDS]) for document in documents])
            batch[SOURCE_IDS] = source_ids[:, None].repeat(1, labels.shape[1])
        return batch
