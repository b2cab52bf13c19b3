"""Batches of one shape, so that `torch.compile` and a GPU's allocator see the same one every time.

    documents      a a a a a | b b | c c c                    10 tokens of 16
    row            a a a a a | b b | c c c | . . . . . .      filled up by a masked document
    seq_lengths    5           2     3       0 0 0 0 6        four documents have no tokens
    cu_seqlens     0 5 7 10 10 10 10 10 16
    max_length     16                                         whatever the row holds

Nothing masked is a target, and nobody but itself sees it, so losses and gradients stay as they are.
"""

from dataclasses import dataclass
from typing import Any

from trl_packing.models.introspection import layer_values, rope_thresholds, text_config

# Documents of a row are counted up to a multiple of it.
_STEP = 8


@dataclass(frozen=True)
class StaticShapes:
    """What all batches have alike.

    num_tokens: T of a row; a row with more is filled up to a multiple of it.
    max_length: what kernels are told is the longest document.
    num_documents: boundaries of a row, less one; a row that needs more has twice as many, or four
        times, ...
    longest_tail: most tokens of a masked document; a longer tail is several of them.
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
        pad_to_multiple_of: int | None = None,
    ) -> "StaticShapes":
        """Return the shape of micro-batches of `bins` bins for `model`.

        most_documents: of a micro-batch, as far as it is known (the bins of later epochs are
            others); None: room for documents of 32 tokens.
        """
        multiple = pad_to_multiple_of or 1
        num_tokens = -(-capacity * bins // multiple) * multiple
        expected = num_tokens // 32 if most_documents is None else most_documents * 5 // 4
        # Some ropes look at the longest position of the row, and learned positions end: a tail that
        # reached further than the documents do would change them, or the model would stop.
        learned = layer_values(text_config(model), "max_position_embeddings")
        limits = [*rope_thresholds(model), *learned]
        return cls(
            num_tokens=num_tokens,
            max_length=capacity,
            num_documents=-(-(expected + 2) // _STEP) * _STEP,  # one without tokens, and a tail
            longest_tail=min([capacity, *(limit for limit in limits if limit > 0)]),  # xlnet: -1
        )

    def tail(self, num_tokens: int) -> list[int]:
        """Return the lengths of the masked documents behind `num_tokens` tokens.

        >>> StaticShapes(16, max_length=8, num_documents=8, longest_tail=8).tail(5)
        [8, 3]
        """
        missing = -num_tokens % self.num_tokens if num_tokens else self.num_tokens
        full, rest = divmod(missing, self.longest_tail)
        return [self.longest_tail] * full + [rest] * bool(rest)

    def empty_documents(self, num_documents: int) -> int:
        """Return how many documents without tokens a row with `num_documents` needs, at least one.

        >>> shapes = StaticShapes(16, max_length=8, num_documents=8, longest_tail=8)
        >>> shapes.empty_documents(3), shapes.empty_documents(8)
        (5, 8)
        """
        held = self.num_documents
        while held <= num_documents:
            held *= 2
        return held - num_documents
