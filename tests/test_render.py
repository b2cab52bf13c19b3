"""A document is shown as it reads, its trained tokens told from the others; rows as they lie."""

import contextlib
import io
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from trl_packing import pack, show_document, show_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import multipack_picture


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


# --- rows -----------------------------------------------------------------------------------------


def test_rows_are_drawn_a_letter_a_document():
    assert show_rows([[3, 2], [4], []], capacity=6) == "AAABB·\nCCCC··\n······"
    assert show_rows([[3, 2], [4]]) == "AAABB\nCCCC"
    assert show_rows([[3, 0, 2]]) == "AAACC"


def test_rows_of_a_plan_keep_the_letters_of_their_documents():
    lengths = [2, 5, 3]
    plan = pack(lengths, 5)
    rows = [[lengths[i] for i in documents] for documents in plan]
    drawn = show_rows(rows, documents=[d.tolist() for d in plan])
    assert sorted("".join(drawn.split())) == sorted("AABBBBBCCC")


def test_a_cell_is_what_its_middle_token_belongs_to():
    assert show_rows([[10, 6]], tokens_per_cell=4) == "AABB"
    assert show_rows([[9, 7]], tokens_per_cell=4, capacity=24) == "AABB··"
    assert show_rows([[2] * 54], tokens_per_cell=2)[-3:] == "zAB"


def test_lines_break_where_asked():
    assert show_rows([[3, 4]], cells_per_line=5) == "AAABB\nBB"


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.integers(1, 9), max_size=5), max_size=5), line=st.integers(1, 20))
def test_every_token_is_drawn_once(rows, line):
    drawn = show_rows(rows, capacity=45, cells_per_line=line)
    lengths = [length for row in rows for length in row]
    counted = [drawn.count(letter) for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(lengths)]]
    assert counted == lengths
    assert drawn.count("·") == 45 * len(rows) - sum(lengths)


def test_colors_and_html_show_the_same_letters():
    plain = show_rows([[3, 2], [4]], capacity=6)
    colored = show_rows([[3, 2], [4]], capacity=6, color=True)
    assert colored.startswith("\x1b[30;44mAAA\x1b[0m\x1b[30;43mBB\x1b[0m·")
    html = show_rows([[3, 2], [4]], capacity=6, html=True)
    tags = [part.partition(">") for part in html.split("<")]
    assert "".join(text if mark else tag for tag, mark, text in tags) == plain
    assert html.count("<span") == 3


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="7 tokens is beyond capacity=6"):
        show_rows([[3, 4]], capacity=6)
    with pytest.raises(ValueError, match="tokens_per_cell=0"):
        show_rows([[3]], tokens_per_cell=0)


def test_the_page_of_multipack_is_reproduced():
    """axolotl's picture of a batch of 4 × 4,096 tokens, packed into one row, and its boundaries."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        multipack_picture.main()
    assert "AAAAAAAAAAABBBBB\nBCCCCCCCDDDDEEEE\nEEEEFFFFFGGGHHHH\nIIIJJJJKKKKKLLL·" in (
        printed.getvalue()
    )
    assert "[0, 11, 17, 24, 28, 36, 41, 44, 48, 51, 55, 60, 63]" in printed.getvalue()
    expected = textwrap.indent(printed.getvalue().rstrip(), "    ")
    assert expected in multipack_picture.__doc__
