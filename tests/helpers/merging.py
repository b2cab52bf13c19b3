"""Tokenizers with tokens across the borders of words: a template alone reads as other tokens.

tokenizer = merging_tokenizer()      # byte-level BPE with tokens like "\\n###" and "wer: B"
tokenizer = sentence_tokenizer()     # BPE as SentencePiece's: "▁word", bytes for unknown characters
"""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from helpers.tiny import byte_level_bpe

SPECIAL = ["<pad>", "<bos>", "<eos>"]
SENTENCES = [
    "### Question: Why?\n ### Answer: Because.",
    "### Question: Who?\n ### Answer: Beatrice.",
    "### Human: Hello.\n### Assistant: Hello.\n### Human: Bye.\n### Assistant: Bye.",
    "Is naïve spelled with two dots? Yes: naïve — 東京 🦙.",
]


@cache
def _merging_json() -> str:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level_bpe(SENTENCES * 2, 320, SPECIAL, whole).to_str()


@cache
def _sentence_json() -> str:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=100, show_progress=False)
    trained.train_from_iterator(SENTENCES[:3], trainer)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    vocabulary = {name: number for number, name in enumerate([*names, *learned])}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in learned
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return tokenizer.to_str()


def _wrapped(json: str, pad: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json), eos_token="<eos>", pad_token=pad
    )


def merging_tokenizer(pad: str = "<pad>") -> PreTrainedTokenizerFast:
    """320 tokens, of bytes; `decode(encode(text)) == text` for every text."""
    return _wrapped(_merging_json(), pad)


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """SentencePiece's manner: a space before the first word, bytes where a character is unknown."""
    return _wrapped(_sentence_json(), "<pad>")
