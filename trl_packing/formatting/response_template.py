"""Find response templates in documents, and the tokens that answer them.

    text        ### Question: Why?\\n### Answer: Because.
    tokens      …  Why  ?  \\n##  #  Answer  :   Because  .
    template             [ ###     Answer  : ]
    trained                                   Because  .

A tokenizer splits "### Answer:" differently after a line break than alone, so the ids of the
template are often not in the document. A template given as text is therefore searched for in the
decoded text, and its characters are mapped back to tokens.

A token that holds any character of a template is masked, even if it also holds a part of the
answer: its other part would teach the model to write the template.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from trl_packing.formatting.printable import quote

Span = tuple[int, int]  # [start, stop), in tokens or in characters


@dataclass(frozen=True)
class Marker:
    """A template to search for: by `token_ids` if there are any, else by `texts` in turn."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def from_setting(cls, tokenizer: Any, template: str | Sequence[int], name: str) -> "Marker":
        """Return the marker of a setting; `name` is the setting's name in the error message.

        Raises:
            ValueError: the template is empty.
        """
        if len(template) == 0:
            raise ValueError(f"{name} is empty: it would be found everywhere")
        if isinstance(template, str):
            # Some tokenizers change text: the second text is the template after a round trip.
            again = _decode(tokenizer, tokenizer.encode(template, add_special_tokens=False))
            return cls((), tuple(dict.fromkeys(text for text in (template, again) if text)))
        ids = tuple(int(token) for token in template)
        text = _decode(tokenizer, list(ids))
        return cls(ids, (text,) if text else ())

    def spans(self, document: "DecodedDocument", *, last: bool) -> list[Span]:
        """Return the tokens of every occurrence (or the last one), in order."""
        if self.token_ids:
            starts = _occurrences(document.input_ids, self.token_ids)
            if starts:
                return [(start, start + len(self.token_ids)) for start in starts]
        return [document.tokens_of(*place) for place in self.places(document.text, last=last)]

    def places(self, text: str, *, last: bool) -> list[Span]:
        """Return the characters of every occurrence in `text` (or the last one), in order."""
        for wanted in self.texts:
            at = text.rfind(wanted) if last else text.find(wanted)
            places = []
            while at >= 0:
                places.append((at, at + len(wanted)))
                at = -1 if last else text.find(wanted, at + len(wanted))
            if places:
                return places
        return []


@dataclass(frozen=True)
class ResponseTemplate:
    """A response template, with or without an instruction template.

    It has no state, so that `map` of `datasets` can cache its results.
    """

    tokenizer: Any
    response: Marker
    instruction: Marker | None

    @classmethod
    def from_settings(
        cls,
        tokenizer: Any,
        response: str | Sequence[int],
        instruction: str | Sequence[int] | None,
    ) -> "ResponseTemplate":
        return cls(
            tokenizer,
            Marker.from_setting(tokenizer, response, "response_template"),
            None
            if instruction is None
            else Marker.from_setting(tokenizer, instruction, "instruction_template"),
        )

    def trained(self, input_ids: np.ndarray) -> np.ndarray | None:
        """Return ``(T,)`` bool, True on trained tokens; None if a template is not found."""
        document = DecodedDocument(self.tokenizer, input_ids.tolist())
        responses = self.response.spans(document, last=self.instruction is None)
        instruction = self.instruction
        instructions = None if instruction is None else instruction.spans(document, last=False)
        answers = _answers(responses, instructions, len(input_ids))
        if answers is None:
            return None
        mask = np.zeros(len(input_ids), bool)
        for start, stop in answers:
            mask[start:stop] = True
        return mask

    def answers(self, text: str) -> list[Span] | None:
        """Return the characters of `text` that answer a template; None if one is not found."""
        responses = self.response.places(text, last=self.instruction is None)
        instruction = self.instruction
        instructions = None if instruction is None else instruction.places(text, last=False)
        return _answers(responses, instructions, len(text))

    def not_found(self, number: int, of: int, input_ids: np.ndarray) -> str:
        """Return a sentence on documents without a template.

        Args:
            number: documents without one.
            of: all documents.
            input_ids: tokens of one of them, to quote from.
        """
        names = f"response_template {self.response.texts[0]!r}"
        if self.instruction is not None:
            names += f" or no instruction_template {self.instruction.texts[0]!r}"
        start = _decode(self.tokenizer, input_ids[:200].tolist())[:200]
        return (
            f"{number:,} of {of:,} documents ({number / of:.1%}) have no {names}, so nothing in "
            f"them is trained; one of them starts {quote(start)}"
        )


def _answers(
    responses: list[Span], instructions: list[Span] | None, length: int
) -> list[Span] | None:
    """Return the span behind each response template, up to the next instruction template.

    Without instructions, return the span behind the last response template, up to the end.
    """
    if not responses or instructions == []:
        return None
    responses = responses[-1:] if instructions is None else responses
    answers = []
    for _, stop in responses:
        # Compare ends: an instruction template may be the beginning of the response template.
        later = (start for start, end in instructions or () if end > stop)
        answers.append((stop, next(later, length)))
    return answers


def _occurrences(input_ids: Sequence[int], wanted: Sequence[int]) -> list[int]:
    ids, size = np.asarray(input_ids), len(wanted)
    if len(ids) < size:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    return np.flatnonzero((windows == np.asarray(wanted)).all(axis=1)).tolist()


def _decode(tokenizer: Any, input_ids: list[int]) -> str:
    return tokenizer.decode(
        input_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


class DecodedDocument:
    """A document as text, and a map from its characters back to tokens.

    The map uses `decode` alone: the offsets of the original text are lost, and tokenizing the
    decoded text again may give other tokens.
    """

    def __init__(self, tokenizer: Any, input_ids: list[int]):
        self.tokenizer = tokenizer
        self.input_ids = input_ids
        self._num_chars = {0: 0}
        self._clean = [0]  # numbers of tokens that end between two characters, in order
        self._cut: set[int] = set()  # numbers of tokens that end inside a character

    @cached_property
    def text(self) -> str:
        """The decoded tokens, special tokens included."""
        return _decode(self.tokenizer, self.input_ids)

    def tokens_of(self, first: int, last: int) -> Span:
        """Return the tokens that hold any of the characters [first, last)."""
        start = self._tokens_up_to(first)
        if self._chars(start) > first or start in self._cut:
            start -= 1  # this token ends inside [first, last)
        return start, self._tokens_up_to(last)

    def _tokens_up_to(self, char: int) -> int:
        """Return the least number of tokens that hold all characters before `char`."""
        # Search around an estimate, usually exact: two or three decodings, O(log T) at worst.
        guess = int(np.searchsorted(self._estimated_chars, char))
        low = high = min(guess, len(self.input_ids))
        step = 1
        while low > 0 and self._chars(low) >= char:
            low, high, step = max(low - step, 0), low, 2 * step
        while high < len(self.input_ids) and self._chars(high) < char:
            low, high, step = high, min(high + step, len(self.input_ids)), 2 * step
        return bisect_left(range(high), char, low, key=self._chars)

    @cached_property
    def _estimated_chars(self) -> np.ndarray:
        pieces = self.tokenizer.convert_ids_to_tokens(self.input_ids)
        ends = np.cumsum([0, *(_characters_begun(piece or "") for piece in pieces)])
        return ends * (len(self.text) / max(ends[-1], 1))

    def _chars(self, num_tokens: int) -> int:
        """Return the number of whole characters in the first `num_tokens` tokens."""
        if num_tokens not in self._num_chars:
            nearest = self._clean[bisect_left(self._clean, num_tokens) - 1]
            chars = self._chars_after(nearest, num_tokens) if nearest else None
            if chars is None:
                start = _decode(self.tokenizer, self.input_ids[:num_tokens])
                chars = len(start)
                # A character cut between two tokens decodes to replacement characters.
                while not self.text.startswith(start[:chars]):
                    chars -= 1
                if chars < len(start):
                    self._cut.add(num_tokens)
            # ByT5 decodes a cut character to nothing.
            last = self.input_ids[num_tokens - 1 : num_tokens]
            if num_tokens not in self._cut and _decode(self.tokenizer, last):
                insort(self._clean, num_tokens)
            self._num_chars[num_tokens] = chars
        return self._num_chars[num_tokens]

    def _chars_after(self, clean: int, num_tokens: int) -> int | None:
        """Count from token `clean`, where a character begins; None if the text disagrees."""
        # With one token of context: a decoder may treat the first token differently.
        before = _decode(self.tokenizer, self.input_ids[clean - 1 : clean])
        both = _decode(self.tokenizer, self.input_ids[clean - 1 : num_tokens])
        more, first = both[len(before) :], self._num_chars[clean]
        if both.startswith(before) and self.text.startswith(more, first):
            return first + len(more)
        return None


# Byte-level and SentencePiece vocabularies write the bytes 0x80 to 0xBF, which continue a
# character, as these letters. They rarely occur as letters themselves.
_CONTINUATIONS = str.maketrans(
    "", "", "¡¢£¤¥¦§¨©ª«¬®¯°±²³´µ¶·¸¹º»¼½¾¿" + "".join(map(chr, range(0x122, 0x144)))
)


def _characters_begun(piece: str) -> int:
    """Return the approximate number of characters that begin in a token of the vocabulary."""
    if len(piece) == 6 and piece.startswith("<0x"):
        return int(not "<0x80>" <= piece <= "<0xBF>")
    return len(piece.translate(_CONTINUATIONS))
