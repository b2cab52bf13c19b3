"""Templates are found in texts by their characters and in tokenized rows by their ids."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.merging import merging_tokenizer, sentence_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data.responses import ResponseTemplate, label_tokenized

ANSWER = "### Answer:"
QUESTION = "### Question:"


def answered(text, response, instruction=None) -> list[str] | None:
    template = ResponseTemplate.from_settings(merging_tokenizer(), response, instruction)
    spans = template.answers(text)
    return spans and [text[start:stop] for start, stop in spans]


def trained(ids, response, instruction=None) -> list[int] | None:
    template = ResponseTemplate.from_settings(merging_tokenizer(), response, instruction)
    labels, found = template.labels(np.array(ids, np.int64))
    return np.flatnonzero(labels != -100).tolist() if found else None


parts = st.lists(st.sampled_from([ANSWER, QUESTION, "#", "a", "\n"]), max_size=9)


@settings(max_examples=200, deadline=None)
@given(parts, st.booleans())
def test_texts_and_ids_are_searched_alike(parts, with_instruction):
    """With a token for each character; the reference splits the text at its templates."""
    text = "".join(parts)
    tokens = [ord(char) for char in text]
    pair = (ANSWER, QUESTION if with_instruction else None)
    spans = answered(text, *pair)
    ids = [template and [ord(char) for char in template] for template in pair]
    found = trained(tokens, *ids)
    if with_instruction:
        answers = [a for part in text.split(QUESTION) for a in part.split(ANSWER)[1:]]
        expected = "".join(answers) if QUESTION in text and ANSWER in text else None
    else:
        expected = text.rpartition(ANSWER)[2] if ANSWER in text else None
    if expected is None:
        assert spans is found is None
        return
    # Every answer reaches to the next question, so templates between them are in both readings.
    kept = sorted({n for start, stop in _spans(text, *pair) for n in range(start, stop)})
    assert found == kept
    assert "".join(text[n] for n in kept).replace(ANSWER, "") == expected


def _spans(text, response, instruction):
    template = ResponseTemplate.from_settings(merging_tokenizer(), response, instruction)
    return template.answers(text)


def test_templates_may_begin_alike_and_both_are_needed():
    text = "###Q\n\na\n\n###R\n\nb\n\n###Q\n\nc\n\n###R\n\nd"
    assert answered(text, "###R\n\n", "###") == ["b\n\n", "d"]
    assert answered(text, "###R\n\n") == ["d"]
    for text in ("### Assistant: b", "### Human: a"):
        assert answered(text, "### Assistant:", "### Human:") is None


@pytest.mark.parametrize("make", [merging_tokenizer, sentence_tokenizer])
def test_ids_of_a_document_are_found_in_it_and_their_text_in_texts(make):
    tokenizer = make()
    text = "### Question: Why?\n\n### Answer:\n\nBecause."
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    template = ResponseTemplate.from_settings(tokenizer, ids[2:-3].tolist(), None)
    labels, _ = template.labels(ids)
    assert labels.tolist() == [-100] * (len(ids) - 3) + ids[-3:].tolist()
    [(start, stop)] = template.answers(text)
    assert text[start:stop].strip() == tokenizer.decode(ids[-3:]).strip()


def test_a_text_that_has_other_tokens_inside_of_a_document_is_said_to_need_ids():
    tokenizer = merging_tokenizer()
    text = "### Question: Why?\n### Answer: Because."
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    template = ResponseTemplate.from_settings(tokenizer, ANSWER, None)
    assert template.answers(ids) is None
    assert "pass the ids that it has inside of a document" in template.not_found(1, 1, ids)
    assert "pass the ids" not in template.not_found(1, 1, ids[:3])


def test_packed_rows_are_labeled_document_by_document():
    template = ResponseTemplate.from_settings(merging_tokenizer(), [10, 11], None)
    row = {"input_ids": [10, 11, 60, 61, 10, 11, 62, 63], "seq_lengths": [3, 1, 4]}
    rows = Dataset.from_list([row | {"labels": row["input_ids"]}])
    labeled = label_tokenized(rows, completion_only=True, template=template)
    assert labeled[0]["labels"] == [-100, -100, 60, -100, -100, -100, 62, 63]
    stream = label_tokenized(rows.to_iterable_dataset(), completion_only=True, template=template)
    assert list(next(iter(stream))["labels"]) == labeled[0]["labels"]


@pytest.mark.parametrize("template", ["", []])
def test_an_empty_template_is_refused(template):
    with pytest.raises(ValueError, match="response_template is empty"):
        ResponseTemplate.from_settings(merging_tokenizer(), template, None)
    with pytest.raises(ValueError, match="instruction_template is empty"):
        ResponseTemplate.from_settings(merging_tokenizer(), ANSWER, template)
