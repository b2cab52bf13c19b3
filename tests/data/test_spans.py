"""Tokens of a rendered text: prompts end where TRL ends them, spans cover whole characters.

Seven kinds of tokenizers, each trained here on a few sentences, so that tokens cross every border.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from helpers.merging import merging_tokenizer, sentence_tokenizer
from helpers.tiny import byte_level_bpe
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast
from trl.data_utils import common_prefix_length

from trl_packing.data.spans import Rendered, flat_tokens, tokenize

SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
SENTENCES = [
    "Question: Why?\n\n\nAnswer: Because.\n\n",
    "Answer:   Beatrice  doesn't, and we'll  see.  ",
    "Is naïve spelled with two dots? Yes: naïve — 東京 🦙 🦙.",
    "the answer is the answer, in the end 12345",
] * 3


def wrapped(backend: Tokenizer, **parts) -> PreTrainedTokenizerFast:
    for name, part in parts.items():
        setattr(backend, name, part)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
    )


# Llama 3 and Qwen split words by this pattern before bytes are merged.
_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(llama: bool) -> PreTrainedTokenizerFast:
    bos = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    trim = processors.ByteLevel(trim_offsets=llama)
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not llama)
    if llama:
        words = pre_tokenizers.Split(Regex(_LLAMA), "isolated")
        split, trim = pre_tokenizers.Sequence([words, split]), processors.Sequence([trim, bos])
    return wrapped(byte_level_bpe(SENTENCES, 360, SPECIAL, split), post_processor=trim)


def unigram(normalizer, **parts) -> PreTrainedTokenizerFast:
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.normalizer = normalizer
    backend.train_from_iterator(SENTENCES, trainer)
    return wrapped(backend, **parts)


def normalizing() -> PreTrainedTokenizerFast:
    steps = [normalizers.NFKC(), normalizers.Replace("  ", " ")]
    return unigram(normalizer=normalizers.Sequence(steps))


def stripping() -> PreTrainedTokenizerFast:
    """As T5's: white space at the ends of a text is no token, and every text ends in <eos>."""
    end = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 3)])
    return unigram(normalizer=normalizers.Strip(), post_processor=end)


def stripping_bytes() -> PreTrainedTokenizerFast:
    tokenizer = byte_level(llama=False)
    tokenizer.backend_tokenizer.normalizer = normalizers.Strip(left=False)
    return tokenizer


MAKERS = {
    "stripping": stripping,
    "stripping bytes": stripping_bytes,
    "bytes": lambda: byte_level(llama=False),
    "bytes as Llama 3": lambda: byte_level(llama=True),
    "bytes across words": merging_tokenizer,
    "sentencepiece bpe": sentence_tokenizer,
    "unigram": normalizing,
}


@cache
def made(kind: str) -> PreTrainedTokenizerFast:
    return MAKERS[kind]()


# `characters_of_tokens` needs tokens that hold every byte of the text.
every_kind = pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "stripping bytes"])
pieces = st.sampled_from(
    [
        *(" ", "  ", "\n", "\n\n", "\t", "\u3000", "Answer:", " Be", "cause", "'", "'ll", "we"),
        *("the", "12", ".", "é", "e\u0301", "ï", "ﬁ", "東", "京", "🦙", "<eos>", "<", "eos>"),
    ]
)
texts = st.lists(st.one_of(pieces, st.text(max_size=3)), max_size=6).map("".join)


def ids_of(tokenizer, text: str, special: bool = True) -> list[int]:
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def first_trained(tokenizer, prompt: str, completion: str, special: bool = True) -> int:
    [document] = tokenize(
        tokenizer, [Rendered(prompt + completion, prompt=prompt, adds_special_tokens=special)]
    )
    assert document.input_ids == ids_of(tokenizer, prompt + completion, special)
    trained = np.flatnonzero(flat_tokens([document])[2])
    return int(trained[0]) if len(trained) else len(document.input_ids)


# --- where a prompt ends --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=300, deadline=None)
@given(prompt=texts, completion=texts, special=st.booleans())
@example(prompt="Answer:\n", completion="we", special=True)
@example(prompt="Answer: ", completion="we", special=True)
@example(prompt="Answer:", completion="<eos>", special=True)
def test_a_prompt_ends_where_trl_ends_it(kind, prompt, completion, special):
    tokenizer = made(kind)
    alone = ids_of(tokenizer, prompt, special)
    both = ids_of(tokenizer, prompt + completion, special)
    expected = common_prefix_length(alone, both)
    assert first_trained(tokenizer, prompt, completion, special) == expected


# --- spans ----------------------------------------------------------------------------------------


def characters_of_tokens(tokenizer, text: str) -> list[tuple[int, int]]:
    """The characters that each token holds any of, found without offsets where that can be."""
    if not isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel):
        return tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    # A byte-level token is spelled with a letter for each of its bytes.
    tokens = tokenizer.convert_ids_to_tokens(ids_of(tokenizer, text))
    ends = np.cumsum([0, *(0 if token == "<bos>" else len(token) for token in tokens)])
    char_of_byte = [n for n, char in enumerate(text) for _ in char.encode()]
    return [
        (char_of_byte[start], char_of_byte[stop - 1] + 1) if start < stop else (0, 0)
        for start, stop in pairwise(ends)
    ]


def weights_of(tokenizer, text: str, spans, only_whole: bool = False) -> list[float]:
    [document] = tokenize(tokenizer, [Rendered(text, spans, only_whole=only_whole)])
    return flat_tokens([document])[2].tolist()


@every_kind
@settings(max_examples=300, deadline=None)
@given(before=texts, inside=texts, after=texts)
def test_tokens_of_a_span_or_only_those_within_it_are_trained(kind, before, inside, after):
    tokenizer = made(kind)
    text = before + inside + after
    start, stop = len(before), len(before + inside)
    held = characters_of_tokens(tokenizer, text)
    expected = [max(begins, start) < min(ends, stop) for begins, ends in held]
    assert weights_of(tokenizer, text, [(start, stop, 1.0)]) == expected
    if not after:  # where the text ends, tokens that the tokenizer adds belong to the span
        return
    whole = weights_of(tokenizer, text, [(start, stop, 1.0)], only_whole=True)
    for weight, overlaps, (begins, ends) in zip(whole, expected, held, strict=True):
        if begins < ends:
            assert weight == (overlaps and start <= begins and ends <= stop)


def test_a_span_at_the_end_takes_in_what_the_tokenizer_adds_only_with_only_whole():
    tokenizer = made("stripping")
    text = "answer: the end"
    assert weights_of(tokenizer, text, [(12, 15, 1.0)])[-1] == 0
    assert weights_of(tokenizer, text, [(12, 15, 1.0)], only_whole=True)[-1] == 1


@every_kind
@settings(max_examples=200, deadline=None)
@given(prompt=texts, answer=texts, special=st.booleans())
@example(prompt="Answer: ", answer="we", special=True)
def test_no_token_crosses_the_end_of_a_prompt_or_it_is_said(kind, prompt, answer, special):
    tokenizer = made(kind)
    text, size = prompt + answer, len(prompt)
    spans = [(size, len(text), 1.0)]
    [document] = tokenize(
        tokenizer, [Rendered(text, spans, None, False, special, prompt_ends=[size])]
    )
    whole, ids = ids_of(tokenizer, text, special), document.input_ids
    alone = ids_of(tokenizer, prompt, special)
    if ids == whole:
        offsets = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        crosses = any(a < size < b for a, b in offsets["offset_mapping"])
        assert not crosses or whole[: len(alone)] == alone or document.lost_prompt
    else:
        assert ids == alone + ids_of(tokenizer, answer, special=False)
        assert not document.weights[: len(alone)].any()
        assert document.weights[len(alone) :].all()
        assert tokenizer.decode(ids) in (tokenizer.decode(whole), text)


def test_spans_of_a_slow_tokenizer_are_refused():
    with pytest.raises(ValueError, match="ByT5Tokenizer is a slow tokenizer"):
        weights_of(ByT5Tokenizer(), "The Answer", [(0, 3, 1.0)])


# --- the checks can fail --------------------------------------------------------------------------


def test_a_boundary_taken_from_offsets_alone_is_not_trls():
    tokenizer = made("bytes")
    prompt, completion = "Answer:\n\n", "x"
    encoding = tokenizer(prompt + completion).encodings[0]
    naive = encoding.char_to_token(len(prompt))
    alone, both = ids_of(tokenizer, prompt), ids_of(tokenizer, prompt + completion)
    assert naive != common_prefix_length(alone, both)
