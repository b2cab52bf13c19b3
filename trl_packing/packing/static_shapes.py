"""Batches of one shape, so that `torch.compile` and a GPU's allocator see one shape.

    documents      a a a a a | b b | c c c                    10 tokens of 16
    row            a a a a a | b b | c c c | . . . . . .      padded with a masked document
    seq_lengths    5           2     3       0 0 0 0 6        four documents have no tokens
    cu_seqlens     0 5 7 10 10 10 10 10 16
    max_length     8                                          the longest document of the data set

A masked document has no targets, and no other document sees it, so losses and gradients do not
change.

FlashAttention-2 launches blocks for `max_length` queries of every document, also of those without
tokens. With the capacity instead of the longest document, a row of 16,384 tokens would launch a
million of them in each layer, and nearly all would be idle.
"""

from dataclasses import dataclass
from typing import Any

from trl_packing.attention.model_facts import layer_values, rope_thresholds, text_config

_DOCUMENTS_MULTIPLE_OF = 8  # the number of documents in a row is rounded up to a multiple of it


@dataclass(frozen=True)
class StaticShapes:
    """The shape that all batches share.

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
        cls,
        model: Any,
        *,
        capacity: int,
        bins: int,
        most_documents: int | None = None,
        longest: int | None = None,
        pad_to_multiple_of: int | None = None,
    ) -> "StaticShapes":
        """Return the shape of micro-batches for `model`.

        Args:
            model: limits the length of masked documents by its position embeddings.
            capacity: tokens that a bin may hold.
            bins: bins in a micro-batch.
            most_documents: largest number of documents in a micro-batch of this epoch (the bins of
                later epochs differ). None makes room for documents of 32 tokens.
            longest: tokens of the longest document of the data set; None: `capacity`.
            pad_to_multiple_of: makes `num_tokens` a multiple of it.
        """
        multiple = pad_to_multiple_of or 1
        num_tokens = -(-capacity * bins // multiple) * multiple
        expected = num_tokens // 32 if most_documents is None else most_documents * 5 // 4
        # Some rotary embeddings depend on the longest position in the row, and learned positions
        # end: a tail longer than the documents would change the former and exceed the latter.
        learned = layer_values(text_config(model), "max_position_embeddings")
        limits = [*rope_thresholds(model), *learned]
        documents = expected + 2  # one without tokens, and a tail
        max_length = min(longest or capacity, capacity)
        return cls(
            num_tokens=num_tokens,
            max_length=max_length,
            num_documents=-(-documents // _DOCUMENTS_MULTIPLE_OF) * _DOCUMENTS_MULTIPLE_OF,
            longest_tail=min([max_length, *(limit for limit in limits if limit > 0)]),  # xlnet: -1
        )

    def padding(self, num_tokens: int) -> list[int]:
        """Return the lengths of the masked documents behind `num_tokens` tokens.

        Examples:
            >>> StaticShapes(16, max_length=8, num_documents=8, longest_tail=8).padding(5)
            [8, 3]
        """
        missing = -num_tokens % self.num_tokens if num_tokens else self.num_tokens
        full, left = divmod(missing, self.longest_tail)
        return [self.longest_tail] * full + [left] * bool(left)

    def empty_documents(self, num_documents: int) -> int:
        """Return how many documents without tokens a row with `num_documents` needs, at least one.

        Examples:
            >>> shapes = StaticShapes(16, max_length=8, num_documents=8, longest_tail=8)
            >>> shapes.empty_documents(3), shapes.empty_documents(8)
            (5, 8)
        """
        held = self.num_documents
        while held <= num_documents:
            held *= 2
        return held - num_documents
