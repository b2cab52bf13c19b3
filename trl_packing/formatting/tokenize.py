"""Rendered texts → token ids and weights of trained tokens, in one call of the tokenizer.

    text        Question: Why?\\nAnswer: Because.<eos>
    spans                              [Because.<eos>]             characters, with a weight
    input_ids   Question  :  Why  ?  \\n  Answer  :  Because .  <eos>
    trained     0         0  0    0  0   0       0  1       1  1

A token with some characters of a span and some before it is trained; if it were masked, the first
word of an answer would never be learned. After a response template in plain text it is masked
(`response_template.py`). A prompt ends where TRL ends it: at the first token that differs between
the prompt alone and the prompt with its completion.
"""

import re
import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from trl.data_utils import common_prefix_length

from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.formatting.printable import quote
from trl_packing.formatting.response_template import DecodedDocument


@dataclass(frozen=True)
class Rendered:
    """One document as text, and the characters of it that are trained.

    Attributes:
        text: the whole document.
        spans: (start, stop, weight) in characters; None if every token is trained.
        prompt: untrained text that TRL tokenizes alone to find the start of the completion; None
            without one.
        only_whole: tokens that are partly outside of a span are masked.
        adds_special_tokens: the tokenizer adds special tokens. Not so after a chat template, which
            has written them.
        keeps_prompt_tokens: The document begins with the tokens of `prompt` alone, as a model reads
            them at inference. Without it, tokens may merge where the prompt ends.
    """

    text: str
    spans: Sequence[tuple[int, int, float]] | None = None
    prompt: str | None = None
    only_whole: bool = False
    adds_special_tokens: bool = True
    keeps_prompt_tokens: bool = False


@dataclass(frozen=True)
class Tokenized:
    """The T tokens of a document, and their weights ``(T,)`` float32, 0 if not trained.

    Weights are None if every token is trained, and ids stay a list: one array per document would
    cost a tenth of the preparation.
    """

    input_ids: list[int]
    weights: np.ndarray | None
    lost_prompt: list[int]  # end of the prompt alone that differs from prompt and completion

    @property
    def labels(self) -> list[int] | np.ndarray:
        """The ids, with `IGNORE_INDEX` on tokens that are not trained."""
        if self.weights is None:
            return self.input_ids
        return np.where(self.weights > 0, np.asarray(self.input_ids, np.int64), IGNORE_INDEX)


def tokenize(tokenizer: Any, documents: Sequence[Rendered]) -> list[Tokenized]:
    """Return the tokens of `documents`, which must agree in `adds_special_tokens`.

    Raises:
        ValueError: if spans need offsets and a tokenizer without them does not decode to the text.
    """
    special = documents[0].adds_special_tokens
    encoded = _encode(tokenizer, [document.text for document in documents], special)
    views = [
        _view(tokenizer, encoded, number, document) for number, document in enumerate(documents)
    ]
    ends = [
        None if view is None or document.prompt is None else _prompt_end(view, document)
        for view, document in zip(views, documents, strict=True)
    ]
    alone = [n for n, end in enumerate(ends) if end is None and documents[n].prompt is not None]
    prompts: dict[int, list[int]] = {}
    if alone:
        texts = [documents[n].prompt or "" for n in alone]
        ids = _encode(tokenizer, texts, special)["input_ids"]
        prompts = dict(zip(alone, ids, strict=True))
    return [
        _tokenized(ids, view, document, end, prompts.get(number))
        if not _merges(ids, document, prompts.get(number))
        else _tokenized_apart(tokenizer, ids, document, prompts[number])
        for number, (ids, view, document, end) in enumerate(
            zip(encoded["input_ids"], views, documents, ends, strict=True)
        )
    ]


def _merges(ids: list[int], document: Rendered, prompt: list[int] | None) -> bool:
    """Whether tokens that must be kept merge with the text after them."""
    return document.keeps_prompt_tokens and prompt is not None and ids[: len(prompt)] != prompt


def _tokenized_apart(
    tokenizer: Any, together: list[int], document: Rendered, prompt: list[int]
) -> Tokenized:
    """Return the tokens of the prompt alone, then those of the rest alone.

    Raises ValueError if the tokens of both parts do not give back the text, as for tokenizers that
    put a space before any text.
    """
    size = len(document.prompt or "")
    spans = [(start - size, stop - size, weight) for start, stop, weight in document.spans or ()]
    rest = Rendered(document.text[size:], spans, adds_special_tokens=False)
    [tokens] = tokenize(tokenizer, [rest])
    ids = prompt + tokens.input_ids
    if tokenizer.decode(ids) != tokenizer.decode(together):
        raise ValueError(
            f"its tokens merge where the generation prompt ends and the turn "
            f"{quote(rest.text[:20])} begins, and the tokenizer cannot keep them apart; begin the "
            "turn with another character"
        )
    weights = np.concatenate([np.zeros(len(prompt), np.float32), tokens.weights])
    return Tokenized(ids, weights, [])


def _encode(tokenizer: Any, texts: list[str], special: bool) -> Any:
    return tokenizer(texts, add_special_tokens=special, return_attention_mask=False)


def _tokenized(
    ids: list[int], view: Any, document: Rendered, end: int | None, prompt: list[int] | None
) -> Tokenized:
    if view is None:
        return Tokenized(ids, None, [])
    weights = np.ones(len(ids), np.float32)
    if document.spans is not None:
        weights = np.zeros(len(ids), np.float32)
        for start, stop, weight in document.spans:
            first, last = view.tokens_of(start, stop, document.only_whole)
            weights[first:last] = weight
    lost: list[int] = []
    if prompt is not None:
        end = common_prefix_length(prompt, ids)
        lost = prompt[end:]
    weights[: end or 0] = 0
    return Tokenized(ids, weights, lost)


# Ends of a prompt that a tokenizer may split differently once more text follows: the last of
# several spaces joins the next word (GPT-2's "\s+(?!\S)"), an apostrophe a "'ll".
_OPEN_END = re.compile(r"(\s\s|['’].?)\Z", re.DOTALL)


def _prompt_end(view: Any, document: Rendered) -> int | None:
    """Return the first token of the completion if the prompt alone surely ends there, or None."""
    prompt, text = document.prompt or "", document.text
    size = len(prompt)
    if not text.startswith(prompt) or size >= len(text) or _OPEN_END.search(prompt[-2:]):
        return None
    if text[size - 1 : size].isalnum() and text[size].isalnum():
        return None
    if prompt[-1:].isspace() and not _keeps_at_end(view.tokenizer, prompt[-1]):
        return None
    return view.token_starting_at(size)


@lru_cache(maxsize=64)
def _keeps_at_end(tokenizer: Any, space: str) -> bool:
    """Whether a tokenizer reads white space at the end of a text as it does before a letter."""
    normalizer = tokenizer.backend_tokenizer.normalizer if tokenizer.is_fast else None
    if normalizer is None:
        return True
    return normalizer.normalize_str(f"a{space}") + "a" == normalizer.normalize_str(f"a{space}a")


def _view(tokenizer: Any, encoded: Any, number: int, document: Rendered) -> Any:
    if document.spans is None and document.prompt is None:
        return None
    if tokenizer.is_fast:
        return _Offsets(encoded.encodings[number], tokenizer)
    return _Decoded(tokenizer, encoded["input_ids"][number], document)


class _Offsets:
    """Maps characters to tokens by the offsets of a fast tokenizer."""

    def __init__(self, encoding: Any, tokenizer: Any):
        self.encoding, self.tokenizer = encoding, tokenizer

    def token_starting_at(self, char: int) -> int | None:
        """Return the token that starts at `char`, if the token before it ends there."""
        token = self.encoding.char_to_token(char)
        if token is None or self.encoding.token_to_chars(token)[0] != char:
            return None
        # With trimmed offsets " word" also starts at its "w", and the token before ends earlier.
        before = self.encoding.token_to_chars(token - 1) if token else None
        if (before[1] if before else 0) != char:
            return None
        # The tokenizer may end every text, so the prompt too, in the token that begins here.
        ids, after = self.encoding.ids, self._num_tokens
        return None if after < len(ids) and ids[token] == ids[after] else token

    def tokens_of(self, start: int, stop: int, only_whole: bool) -> tuple[int, int]:
        """Return the tokens of the characters [start, stop), without space that belongs to none."""
        tokens = range(self._num_tokens)
        first = bisect_right(tokens, start, key=self._stop)
        last = bisect_left(tokens, stop, key=self._start)
        if start >= stop or first >= last:
            return 0, 0
        if not only_whole:
            return first, last
        first = max(first, bisect_left(tokens, start, key=self._start))
        after = bisect_right(tokens, stop, key=self._stop)
        # A span at the end of the text includes tokens that the tokenizer adds after it.
        after = len(self.encoding) if after == len(tokens) else after
        return min(first, after), after

    @cached_property
    def _num_tokens(self) -> int:
        """Number of tokens, without those that the tokenizer adds at the end."""
        tokens = range(len(self.encoding), 0, -1)
        return next((n for n in tokens if self._stop(n - 1)), 0)

    @cached_property
    def _trimmed(self) -> list[str] | None:
        """The tokens, if offsets exclude their leading and trailing space; else None."""
        processor = self.tokenizer.backend_tokenizer.post_processor
        trims = processor is not None and b'"trim_offsets":true' in processor.__getstate__()
        return self.encoding.tokens if trims else None

    def _chars(self, token: int) -> tuple[int, int]:
        return self.encoding.token_to_chars(token) or (
            0,
            0,
        )  # None for added tokens

    def _start(self, token: int) -> int:
        start = self._chars(token)[0]
        if self._trimmed is None:
            return start
        piece = self._trimmed[token]
        return max(start - len(piece) + len(piece.lstrip(_SPACE)), 0)

    def _stop(self, token: int) -> int:
        stop = self._chars(token)[1]
        if self._trimmed is None:
            return stop
        piece, words = self._trimmed[token], self._trimmed[token].rstrip(_SPACE)
        return stop + len(piece) - len(words) if words else self._start(token) + len(piece)


# Vocabularies of byte-level tokenizers write a space as "Ġ".
_SPACE = "Ġ" + string.whitespace


class _Decoded:
    """Maps characters to tokens by decoding, for tokenizers without offsets."""

    def __init__(self, tokenizer: Any, ids: list[int], document: Rendered):
        self.tokenizer, self.text = tokenizer, document.text
        self.document = DecodedDocument(tokenizer, ids)

    def token_starting_at(self, char: int) -> int | None:
        return None

    def tokens_of(self, start: int, stop: int, only_whole: bool) -> tuple[int, int]:
        before = self.document.text.find(self.text)
        if before < 0:
            raise ValueError(
                f"{type(self.tokenizer).__name__} has no offsets and does not give back the text "
                "that it read, so trained characters cannot be found among its tokens; load the "
                "fast tokenizer (AutoTokenizer.from_pretrained(..., use_fast=True))"
            )
        first, last = self.document.tokens_of(before + start, before + stop)
        if only_whole:
            inside = self.document.tokens_of(before, before + start)[1]
            after = self.document.tokens_of(before + stop, len(self.document.text))[0]
            last = len(self.document.input_ids) if stop == len(self.text) else after
            return inside, max(last, inside)
        return first, last
