"""Where a template is in a document, and so which tokens answer it.

    text        ### Question: Why?\\n### Answer: Because.
    tokens      …  Why  ?  \\n##  #  Answer  :   Because  .
    template             [ ###     Answer  : ]
    trained                                   Because  .

A tokenizer reads "### Answer:" one way alone and another way after a line break, so its ids are
often not in the document. A template given as text is therefore looked for in the decoded text, and
its characters are traced back to tokens.

A token that holds any character of a template is masked, also if it holds some of the answer: its
other half would teach the model to write the template.
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
    """What is looked for: `token_ids`, if it was given so, else each of `texts` in turn."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]

    @classmethod
    def from_setting(cls, tokenizer: Any, template: str | Sequence[int], name: str) -> "Marker":
        """Return the template. Raises ValueError if it is empty."""
        if len(template) == 0:
            raise ValueError(f"{name} is empty: it would be found everywhere")
        if isinstance(template, str):
            # The second text is the template as a tokenizer that changes text gives it back.
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
    """Says which tokens of a document are trained; without state, so that `map` can cache it."""

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
        """Return ``(T,)`` bool, True on trained tokens; None if a template is not there."""
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
        """Return the characters of `text` that answer a template; None if one is not there."""
        responses = self.response.places(text, last=self.instruction is None)
        instruction = self.instruction
        instructions = None if instruction is None else instruction.places(text, last=False)
        return _answers(responses, instructions, len(text))

    def not_found(self, number: int, of: int, input_ids: np.ndarray) -> str:
        """Return the sentence on `number` of `of` documents, `input_ids` being one of them."""
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
    """Return what follows each response template, up to the next instruction template.

    Without instructions it is what follows the last one, to the end.
    """
    if not responses or instructions == []:
        return None
    responses = responses[-1:] if instructions is None else responses
    answers = []
    for _, stop in responses:
        # By its end: an instruction template may be the beginning of the response template.
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
    """A document as text, and the way back from characters to tokens.

    The way back needs nothing but `decode`, since offsets are lost with the text that was
    tokenized, and tokenizing the decoded text again need not give the same tokens.
    """

    def __init__(self, tokenizer: Any, input_ids: list[int]):
        self.tokenizer = tokenizer
        self.input_ids = input_ids
        self._num_chars = {0: 0}
        self._clean = [0]  # numbers of tokens after which no character is cut, in order
        self._cut: set[int] = set()  # and after which one is

    @cached_property
    def text(self) -> str:
        """What the tokens read as, special tokens included."""
        return _decode(self.tokenizer, self.input_ids)

    def tokens_of(self, first: int, last: int) -> Span:
        """Return the tokens that hold any of the characters [first, last)."""
        start = self._tokens_up_to(first)
        if self._chars(start) > first or start in self._cut:
            start -= 1  # that token ends inside the characters asked for
        return start, self._tokens_up_to(last)

    def _tokens_up_to(self, char: int) -> int:
        """Return the least number of tokens that hold all characters before `char`."""
        # A search around an estimate, usually exact: two or three decodings, O(log T) at worst.
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
        """Return how many whole characters of the text the first `num_tokens` tokens hold."""
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
        """Count from token `clean`, which no character crosses; None if the text says otherwise."""
        # With one token of context: a decoder may treat the first one differently.
        before = _decode(self.tokenizer, self.input_ids[clean - 1 : clean])
        both = _decode(self.tokenizer, self.input_ids[clean - 1 : num_tokens])
        more, first = both[len(before) :], self._num_chars[clean]
        if both.startswith(before) and self.text.startswith(more, first):
            return first + len(more)
        return None


# How the vocabularies of byte-level and of SentencePiece tokenizers write the bytes 0x80 to 0xBF,
# which continue a character. A letter that is meant as itself is among them rarely enough.
_CONTINUATIONS = str.maketrans(
    "", "", "¡¢£¤¥¦§¨©ª«¬®¯°±²³´µ¶·¸¹º»¼½¾¿" + "".join(map(chr, range(0x122, 0x144)))
)


def _characters_begun(piece: str) -> int:
    """Return about how many characters begin in a token of the vocabulary."""
    if len(piece) == 6 and piece.startswith("<0x"):
        return int(not "<0x80>" <= piece <= "<0xBF>")
    return len(piece.translate(_CONTINUATIONS))
