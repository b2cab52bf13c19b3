"""A document is shown as it reads, and its trained tokens are told from the others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl_packing import show_document


def document(tokenizer, *parts: tuple[str, bool]) -> dict:
    ids, labels = [], []
    for text, trained in parts:
        tokens = tokenizer(text)["input_ids"]
        ids += tokens
        labels += tokens if trained else [-100] * len(tokens)
    return {"input_ids": ids, "labels": labels}


def test_trained_tokens_are_marked():
    tokenizer = tiny_tokenizer()
    shown = show_document(document(tokenizer, ("Why? ", False), ("So.<eos>", True)), tokenizer)
    heading, text = shown.split("\n")
    assert text == "Why? ⟦So.<eos>⟧"
    assert "ends in '<eos>', trained" in heading


def test_color_takes_the_place_of_brackets():
    tokenizer = tiny_tokenizer()
    parts = (("Why? ", False), ("So.", True))
    shown = show_document(document(tokenizer, *parts), tokenizer, color=True)
    assert shown.endswith("Why? \x1b[1;32mSo.\x1b[0m")


def test_weights_are_written_before_their_tokens():
    tokenizer = tiny_tokenizer()
    example = document(tokenizer, ("Why? ", False), ("So.", True))
    trained = sum(label != -100 for label in example["labels"])
    example["loss_weights"] = [1.0] * (len(example["labels"]) - trained) + [0.5] * trained
    assert show_document(example, tokenizer).endswith("Why? ⟦0.5×So.⟧")


def test_the_first_token_is_shown_as_what_it_is_no_target():
    tokenizer = tiny_tokenizer()
    ids = tokenizer("So.")["input_ids"]
    first = tokenizer.decode(ids[:1])
    shown = show_document({"input_ids": ids, "labels": ids}, tokenizer)
    assert shown.endswith(f"{first}⟦{'So.'[len(first) :]}⟧")


def test_an_empty_document_is_said_to_be_empty():
    assert "empty" in show_document({"input_ids": [], "labels": []}, tiny_tokenizer())


def test_labels_of_another_length_are_refused():
    with pytest.raises(ValueError, match="labels"):
        show_document({"input_ids": [5, 6], "labels": [5]}, tiny_tokenizer())


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.tuples(st.text(max_size=6), st.booleans()), max_size=6))
def test_nothing_is_added_or_lost_but_the_marks(parts):
    tokenizer = tiny_tokenizer()
    clean = [(text.replace("⟦", "").replace("⟧", ""), trained) for text, trained in parts]
    example = document(tokenizer, *clean)
    if not example["input_ids"]:
        return
    _, _, body = show_document(example, tokenizer).partition("\n")
    whole = tokenizer.decode(example["input_ids"])
    assert body.replace("⟦", "").replace("⟧", "") == whole
