"""Rendered texts → token ids and weights of trained tokens, in one call of the tokenizer.

    text        Question: Why?\\nAnswer: Because.<eos>
    spans                              [Because.<eos>]             characters, with a weight
    input_ids   Question  :  Why  ?  \\n  Answer  :  Because .  <eos>
    trained     0         0  0    0  0   0       0  1       1  1

No token crosses `prompt_ends`: a model reads the prompt before it writes, so both are tokenized
apart where they would merge. A prompt of `prompt` ends where TRL ends it: at the first token that
differs between the prompt alone and the prompt with its completion.
"""

import re
import string
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from trl.data_utils import common_prefix_length

from trl_packing.data.printable import quote
from trl_packing.documents.labels import IGNORE_INDEX

Span = tuple[int, int]  # [start, stop), in characters or in tokens
WeightedSpan = tuple[int, int, float]


@dataclass(frozen=True)
class Rendered:
    """One document as text, and the characters of it that are trained."""

    text: str
    spans: Sequence[WeightedSpan] | None = None  # None trains all
    prompt: str | None = None  # untrained, which TRL tokenizes alone to find its end
    only_whole: bool = False  # tokens that are partly outside of a span are masked
    adds_special_tokens: bool = True  # the tokenizer does; a chat template has written them
    keeps_prompt_tokens: bool = False  # its tokens are those of `prompt` alone, or it is refused
    prompt_ends: Sequence[int] = ()  # where a model begins to write, increasing: no token crosses
    handled: int = 0  # bits of the column `HANDLED`
    tokens: "Tokenized | None" = None  # known without the text


@dataclass(frozen=True)
class Tokenized:
    """The T tokens of a document, and their weights."""

    input_ids: list[int]
    weights: np.ndarray  # of each token, ``(T,)`` float32; 0 if it is not trained
    lost_prompt: Sequence[int] = ()  # end of the prompt alone that differs from the whole


def flat_tokens(documents: Sequence[Tokenized]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids, labels and weights of the T tokens of documents end to end, ``(T,)`` each."""
    weights = np.concatenate([document.weights for document in documents])
    ids = chain.from_iterable(document.input_ids for document in documents)
    input_ids = np.fromiter(ids, np.int64, len(weights))
    return input_ids, np.where(weights > 0, input_ids, IGNORE_INDEX), weights


def tokenize(tokenizer: Any, documents: Sequence[Rendered]) -> list[Tokenized]:
    """Return the tokens of `documents`, which must agree in `adds_special_tokens`.

    Raises ValueError if the tokenizer is slow: it has no offsets for spans.
    """
    special = documents[0].adds_special_tokens
    options = {"add_special_tokens": special, "return_attention_mask": False}
    encoded = tokenizer([document.text for document in documents], **options)
    if encoded.encodings is None:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; load the fast one")
    processor = tokenizer.backend_tokenizer.post_processor
    trims = processor is not None and b'"trim_offsets":true' in processor.__getstate__()
    found: list[Tokenized] = []
    open_ends: dict[int, str] = {}  # prompts whose tokens end elsewhere, by number of the document
    for number, document in enumerate(documents):
        if document.tokens is not None:
            found.append(document.tokens)
            continue
        ids = encoded["input_ids"][number]
        weights = np.full(len(ids), document.spans is None, np.float32)
        found.append(Tokenized(ids, weights))
        if document.spans is None and document.prompt is None:
            continue
        encoding = encoded.encodings[number]
        offsets = _Offsets(tokenizer, encoding, ids, encoding.tokens if trims else None)
        _weigh_spans(document, offsets, weights)
        crossed = [end for end in document.prompt_ends if offsets.merges_at(end)]
        if crossed:
            found[number] = _apart(tokenizer, document, found[number], crossed)
        if document.prompt is None:
            continue
        end = _prompt_end(offsets, document)
        if end is None or crossed:
            open_ends[number] = document.prompt
        else:
            weights[:end] = 0
    if open_ends:
        prompts = tokenizer([*open_ends.values()], **options)["input_ids"]
        for number, prompt in zip(open_ends, prompts, strict=True):
            document, tokens = documents[number], found[number]
            found[number] = _without_prompt(tokenizer, document, tokens, prompt)
    return found


def _weigh_spans(document: Rendered, offsets: "_Offsets", weights: np.ndarray) -> None:
    """Write the weights of the spans of a document into those of its tokens."""
    for start, stop, weight in document.spans or ():
        first, last = offsets.tokens_of(start, stop, document.only_whole)
        weights[first:last] = weight


def _without_prompt(
    tokenizer: Any, document: Rendered, tokens: Tokenized, prompt: list[int]
) -> Tokenized:
    """Return `tokens` with weights behind the tokens of `prompt` alone, whose end may be others."""
    end = common_prefix_length(prompt, tokens.input_ids)
    if end == len(prompt) or not document.keeps_prompt_tokens:
        tokens.weights[:end] = 0
        return replace(tokens, lost_prompt=prompt[end:] or tokens.lost_prompt)
    size = len(document.prompt or "")
    apart = _apart(tokenizer, document, tokens, [size])
    if apart.lost_prompt:
        raise ValueError(
            "its tokens merge where the generation prompt ends and the turn "
            f"{quote(document.text[size : size + 20])} begins; begin the turn with another "
            "character"
        )
    return apart


def _apart(tokenizer: Any, document: Rendered, whole: Tokenized, ends: Sequence[int]) -> Tokenized:
    """Return the tokens of the parts between `ends`, across which those of `whole` merge.

    A tokenizer that adds to any text, such as a space, cannot: `whole` stays, with `lost_prompt`.
    """
    parts = []
    for start, stop in pairwise([0, *ends, len(document.text)]):
        spans = [(a - start, b - start, weight) for a, b, weight in document.spans or ()]
        special = document.adds_special_tokens and start == 0
        part = Rendered(document.text[start:stop], spans, None, document.only_whole, special)
        parts += tokenize(tokenizer, [part])
    ids = [token for part in parts for token in part.input_ids]
    if tokenizer.decode(ids) not in (tokenizer.decode(whole.input_ids), document.text):
        prompt = parts[0].input_ids
        lost = prompt[common_prefix_length(prompt, whole.input_ids) :]
        return replace(whole, lost_prompt=lost)
    return Tokenized(ids, np.concatenate([part.weights for part in parts]))


# Ends of a prompt that a tokenizer may split differently once more text follows: the last of
# several spaces joins the next word (GPT-2's "\s+(?!\S)"), an apostrophe a "'ll".
_OPEN_END = re.compile(r"(\s\s|['’].?)\Z", re.DOTALL)


def _prompt_end(offsets: "_Offsets", document: Rendered) -> int | None:
    """Return the first token of the completion if the prompt alone surely ends there, or None."""
    prompt = document.prompt or ""
    text = document.text
    size = len(prompt)
    if not text.startswith(prompt) or size >= len(text) or _OPEN_END.search(prompt[-2:]):
        return None
    if text[size - 1 : size].isalnum() and text[size].isalnum():
        return None
    # A normalizer may strip white space at the end of a text, and keep it before a letter.
    normalizer = offsets.tokenizer.backend_tokenizer.normalizer
    normalize = getattr(normalizer, "normalize_str", str)
    end = f"a{prompt[-1:]}"
    if end[1:].isspace() and normalize(end) + "a" != normalize(f"{end}a"):
        return None
    return offsets.token_starting_at(size)


# Vocabularies of byte-level tokenizers write a space as "Ġ".
_SPACE = "Ġ" + string.whitespace


@dataclass
class _Offsets:
    """Maps characters to tokens."""

    tokenizer: Any
    encoding: Any
    input_ids: list[int]
    trimmed: list[str] | None  # the tokens, if offsets exclude space around them

    @cached_property
    def num_tokens(self) -> int:
        """Tokens without those that the tokenizer adds at the end."""
        tokens = range(len(self.encoding), 0, -1)
        return next((n for n in tokens if self._chars(n - 1)[1]), 0)

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
        ids, after = self.input_ids, self.num_tokens
        return None if after < len(ids) and ids[token] == ids[after] else token

    def tokens_of(self, start: int, stop: int, only_whole: bool) -> Span:
        """Return the tokens of the characters [start, stop), without space that belongs to none."""
        tokens = range(self.num_tokens)
        first = self._token_at(start)
        last = bisect_left(tokens, stop, key=lambda token: self._chars(token)[0])
        if start >= stop or first >= last:
            return 0, 0
        if not only_whole:
            if self._swallows(first, start):
                first += 1
            return first, last
        first = max(first, bisect_left(tokens, start, key=lambda token: self._chars(token)[0]))
        after = self._token_at(stop)
        # A span at the end of the text includes tokens that the tokenizer adds after it.
        after = len(self.encoding) if after == len(tokens) else after
        return min(first, after), after

    def merges_at(self, char: int) -> bool:
        """Return whether a token holds characters before and behind the start of `char`."""
        token = self._token_at(char)
        is_within = token < self.num_tokens and self._chars(token)[0] < char
        return is_within and not self._swallows(token, char)

    def _swallows(self, token: int, char: int) -> bool:
        """Return whether it begins before `char`, and takes in the white space there (Phi-3)."""
        if self._chars(token)[0] >= char:
            return False
        added = self.tokenizer.added_tokens_decoder.get(self.input_ids[token])
        return added is not None and added.rstrip

    def _token_at(self, char: int) -> int:
        """Return the first token that ends behind the start of `char`."""
        return bisect_right(range(self.num_tokens), char, key=lambda token: self._chars(token)[1])

    def _chars(self, token: int) -> Span:
        """Return the characters [start, stop) of a token; (0, 0) for one that was added."""
        start, stop = self.encoding.token_to_chars(token) or (0, 0)
        if self.trimmed is not None:
            piece = self.trimmed[token]
            words = piece.rstrip(_SPACE)
            start = max(start - len(piece) + len(piece.lstrip(_SPACE)), 0)
            stop = stop + len(piece) - len(words) if words else start + len(piece)
        return start, stop
