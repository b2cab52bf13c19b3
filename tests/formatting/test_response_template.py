"""A template is found in the text, and exactly the tokens of the answer are trained."""

import numpy as np
import pytest
from helpers.merging import merging_tokenizer, sentence_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from trl_packing.formatting.response_template import DecodedDocument, ResponseTemplate

ANSWER = "### Answer:"
QUESTION = "### Question:"
TOKENIZERS = {"bytes": merging_tokenizer, "sentences": sentence_tokenizer}


def ids_of(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def trained_text(tokenizer, text, response, instruction=None) -> str | None:
    ids = ids_of(tokenizer, text)
    mask = ResponseTemplate.from_settings(tokenizer, response, instruction).trained(ids)
    return None if mask is None else tokenizer.decode(ids[mask])


def byte_ends(tokenizer, ids) -> np.ndarray:
    """Bytes of the document up to the end of each token: what a byte-level token is made of."""
    return np.cumsum([len(piece) for piece in tokenizer.convert_ids_to_tokens(ids.tolist())])


def test_the_template_alone_has_other_tokens_than_in_the_document_and_is_found():
    tokenizer = merging_tokenizer()
    text = "### Question: Why?\n### Answer: Because."
    ids = ids_of(tokenizer, text).tolist()
    alone = ids_of(tokenizer, ANSWER).tolist()
    windows = [ids[i : i + len(alone)] for i in range(len(ids))]
    assert alone not in windows  # the trap: TRL looked for these ids, and trained nothing
    assert "Because.".endswith(trained_text(tokenizer, text, ANSWER).lstrip())
    assert trained_text(tokenizer, text, ANSWER)


def test_a_token_across_the_end_of_the_template_is_masked():
    tokenizer = merging_tokenizer()
    text = "### Question: Why?\n ### Answer: Because."
    ids = ids_of(tokenizer, text)
    mask = ResponseTemplate.from_settings(tokenizer, ANSWER, None).trained(ids)
    first = int(np.argmax(mask))
    before = tokenizer.decode(ids[first - 1 : first])
    assert ":" in before
    assert not before.endswith(":")  # it holds the end of the template and some of the answer
    assert text.endswith(before + tokenizer.decode(ids[first:]))


def test_a_token_across_the_beginning_of_the_instruction_template_is_masked():
    tokenizer = merging_tokenizer()
    text = "### Answer:\n\nHi? ### Answer:\n\nHi"
    ids = ids_of(tokenizer, text)
    pieces = [tokenizer.decode([token]) for token in ids]
    across = pieces.index(" ### A")  # its space belongs to the answer
    mask = ResponseTemplate.from_settings(tokenizer, "\n\n", "### Answer:").trained(ids)
    assert not mask[across]
    assert mask[across - 1]
    assert tokenizer.decode(ids[mask]) == "Hi?Hi"


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_every_answer_is_trained_and_nothing_else(make):
    tokenizer = make()
    text = "".join(
        f"### Human:{' x' * n}\n### Assistant:\n\nThe {word}!\n\n"
        for n, word in enumerate(["naïve", "東京", "🦙", "end"])
    )
    ids = ids_of(tokenizer, text)
    mask = ResponseTemplate.from_settings(tokenizer, "### Assistant:\n\n", "### Human:").trained(
        ids
    )
    runs = np.split(ids, np.flatnonzero(np.diff(mask.astype(int))) + 1)
    answers = [tokenizer.decode(run).strip() for run in runs[1::2]]
    assert answers == ["The naïve!", "The 東京!", "The 🦙!", "The end!"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_trained_tokens_are_those_that_begin_after_the_template(question, answer):
    assume(ANSWER not in answer)
    tokenizer = merging_tokenizer()
    prompt = f"{QUESTION}{question}\n{ANSWER}"
    ids = ids_of(tokenizer, prompt + answer)
    ends = byte_ends(tokenizer, ids)
    expected = np.concatenate([[0], ends[:-1]]) >= len(prompt.encode())
    mask = ResponseTemplate.from_settings(tokenizer, ANSWER, None).trained(ids)
    assert mask.tolist() == expected.tolist()
    # The text: the answer, but for what shares a token with the template.
    lost = int(ends[~mask][-1]) - len(prompt.encode())
    assert tokenizer.decode(ids[mask]) == answer.encode()[lost:].decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.text(max_size=20))
def test_sentencepiece_tokens_are_traced_back_too(question, answer):
    assume(ANSWER not in answer and "<" not in question + answer)
    tokenizer = sentence_tokenizer()
    text = f"{QUESTION}{question}\n{ANSWER}{answer}"
    ids = ids_of(tokenizer, text)
    assume(tokenizer.decode(ids) == text)  # "▁" itself comes back as a space
    mask = ResponseTemplate.from_settings(tokenizer, ANSWER, None).trained(ids)
    pieces = [
        1 if piece.startswith("<0x") else len(piece.replace("▁", " ").encode())
        for piece in tokenizer.convert_ids_to_tokens(ids.tolist())
    ]
    starts = np.cumsum([0, *pieces])[:-1] - 1  # the space before the first word is stripped
    assert mask.tolist() == (starts >= len(f"{QUESTION}{question}\n{ANSWER}".encode())).tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=4))
def test_trained_tokens_of_several_turns_hold_no_character_of_a_template(turns):
    assume(all("#" not in part for turn in turns for part in turn))
    tokenizer = merging_tokenizer()
    expected_bytes, text = [], ""
    for question, answer in turns:
        text += f"### Human:{question}\n### Assistant:"
        expected_bytes.append((len(text.encode()), len((text + answer).encode())))
        text += answer
    ids = ids_of(tokenizer, text)
    ends = byte_ends(tokenizer, ids)
    starts = np.concatenate([[0], ends[:-1]])
    expected = [
        any(low <= start and end <= high for low, high in expected_bytes)
        for start, end in zip(starts, ends, strict=True)
    ]
    mask = ResponseTemplate.from_settings(tokenizer, "### Assistant:", "### Human:").trained(ids)
    assert mask.tolist() == expected


def test_only_the_last_answer_is_trained_without_an_instruction_template():
    tokenizer = merging_tokenizer()
    text = "### Human: a\n### Assistant:\n\nb\n### Human: c\n### Assistant:\n\ndd"
    assert trained_text(tokenizer, text, "### Assistant:\n\n") == "dd"


def test_an_instruction_template_may_begin_the_response_template():
    tokenizer = merging_tokenizer()
    text = "###Q\n\na\n\n###R\n\nb\n\n###Q\n\nc\n\n###R\n\nd"
    assert trained_text(tokenizer, text, "###R\n\n", "###") == "b\n\nd"


def test_a_document_with_only_one_of_two_templates_has_nothing_to_train():
    tokenizer = merging_tokenizer()
    for text in ("### Assistant: b", "### Human: a"):
        assert trained_text(tokenizer, text, "### Assistant:", "### Human:") is None


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_ids_that_are_not_in_the_document_are_found_by_their_text(make):
    tokenizer = make()
    text = "### Question: Why?\n\n### Answer:\n\nBecause."
    ids = ids_of(tokenizer, text).tolist()
    wanted = ids_of(tokenizer, "\n### Answer:\n\n").tolist()[2:]  # as in the post about it
    assert trained_text(tokenizer, text, wanted) == "Because."
    assert trained_text(tokenizer, text, ids[:-3]) == tokenizer.decode(ids[-3:])


def test_ids_are_matched_as_ids_before_text():
    tokenizer = merging_tokenizer()
    one, other = ids_of(tokenizer, "ab").tolist(), ids_of(tokenizer, "a").tolist()
    assert one == [*other, *ids_of(tokenizer, "b").tolist()]
    ids = np.array([*one, 300, 301, *one, 302])
    assert ResponseTemplate.from_settings(tokenizer, one, None).trained(ids).tolist() == [
        False
    ] * 6 + [True]
    assert (
        ResponseTemplate.from_settings(tokenizer, [300, 301], None).trained(ids).tolist()
        == [False] * 4 + [True] * 3
    )


def test_invalid_bytes_between_tokens_do_not_stop_the_search():
    tokenizer = merging_tokenizer()
    broken = ids_of(tokenizer, "é").tolist()[:1] if len(ids_of(tokenizer, "é")) > 1 else []
    byte = [tokenizer.convert_tokens_to_ids(sorted(ByteLevel.alphabet())[-1])]
    ids = np.array([*broken, *byte, *ids_of(tokenizer, ANSWER), *byte, *ids_of(tokenizer, "xyz")])
    mask = ResponseTemplate.from_settings(tokenizer, ANSWER, None).trained(ids)
    assert tokenizer.decode(ids[mask]).endswith("xyz")
    assert mask.sum() == 1 + len(ids_of(tokenizer, "xyz"))


def test_long_documents_take_few_decodings():
    tokenizer = merging_tokenizer()
    text = "naïve 東京 " * 400 + ANSWER + " 🦙" * 400
    document = DecodedDocument(tokenizer, ids_of(tokenizer, text).tolist())
    start, stop = document.tokens_of(text.index(ANSWER), text.index(ANSWER) + len(ANSWER))
    assert tokenizer.decode(document.input_ids[start:stop]).strip().startswith(ANSWER)
    assert len(document._num_chars) < 10 < len(document.input_ids)


def test_offsets_of_every_character_are_those_of_the_bytes():
    """In any order of requests, each is counted from the nearest one that is known."""
    tokenizer = merging_tokenizer()
    text = "naïve 東京 ### Answer: Be 🦙🦙 – " * 6
    ids = ids_of(tokenizer, text)
    ends = byte_ends(tokenizer, ids)
    order = np.random.default_rng(0).permutation(len(text))
    document = DecodedDocument(tokenizer, ids.tolist())
    for char in order.tolist():
        expected = int(np.searchsorted(ends, len(text[:char].encode()), side="left")) + (char > 0)
        assert document.tokens_of(char, char)[1] == expected


@pytest.mark.parametrize("template", ["", []])
def test_an_empty_template_is_refused(template):
    with pytest.raises(ValueError, match="response_template is empty"):
        ResponseTemplate.from_settings(merging_tokenizer(), template, None)
    with pytest.raises(ValueError, match="instruction_template is empty"):
        ResponseTemplate.from_settings(merging_tokenizer(), ANSWER, template)
