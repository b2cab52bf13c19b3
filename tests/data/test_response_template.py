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


def template_of(response, instruction=None):
    return ResponseTemplate(merging_tokenizer(), response, instruction)


parts = st.lists(st.sampled_from([ANSWER, QUESTION, "#", "a", "\n"]), max_size=9)


@settings(max_examples=200, deadline=None)
@given(parts, st.booleans())
def test_texts_and_ids_are_searched_alike(parts, with_instruction):
    """With a token for each character; the reference splits the text at its templates."""
    text = "".join(parts)
    pair = (ANSWER, QUESTION if with_instruction else None)
    spans = template_of(*pair).answers(text)
    by_ids = template_of(*(template and [ord(char) for char in template] for template in pair))
    labels, found = by_ids.labels(np.array([ord(char) for char in text], np.int64))
    if with_instruction:
        answers = [a for part in text.split(QUESTION) for a in part.split(ANSWER)[1:]]
        expected = "".join(answers) if QUESTION in text and ANSWER in text else None
    else:
        expected = text.rpartition(ANSWER)[2] if ANSWER in text else None
    if expected is None:
        assert spans is None
        assert not found
        return
    # Every answer reaches to the next question, so templates between them are in both readings.
    kept = sorted({n for start, stop in spans for n in range(start, stop)})
    assert np.flatnonzero(labels != -100).tolist() == kept
    assert "".join(text[n] for n in kept).replace(ANSWER, "") == expected


def test_templates_may_begin_alike_and_both_are_needed():
    text = "###Q\n\na\n\n###R\n\nb\n\n###Q\n\nc\n\n###R\n\nd"
    spans = template_of("###R\n\n", "###").answers(text)
    assert [text[start:stop] for start, stop in spans] == ["b\n\n", "d"]
    for text in ("### Assistant: b", "### Human: a"):
        assert template_of("### Assistant:", "### Human:").answers(text) is None


@pytest.mark.parametrize("make", [merging_tokenizer, sentence_tokenizer])
def test_ids_of_a_document_are_found_in_it_and_their_text_in_texts(make):
    tokenizer = make()
    text = "### Question: Why?\n\n### Answer:\n\nBecause."
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"])
    template = ResponseTemplate(tokenizer, ids[2:-3].tolist(), None)
    labels, _ = template.labels(ids)
    assert labels.tolist() == [-100] * (len(ids) - 3) + ids[-3:].tolist()
    [(start, stop)] = template.answers(text)
    assert text[start:stop].strip() == tokenizer.decode(ids[-3:]).strip()


def test_packed_rows_are_labeled_document_by_document():
    row = {"input_ids": [10, 11, 60, 61, 10, 11, 62, 63], "seq_lengths": [3, 1, 4]}
    rows = Dataset.from_list([row | {"labels": row["input_ids"]}])
    for data in (rows, rows.to_iterable_dataset()):
        labeled = label_tokenized(data, completion_only=True, template=template_of([10, 11]))
        expected = [-100, -100, 60, -100, -100, -100, 62, 63]
        assert list(next(iter(labeled))["labels"]) == expected
