"""A document is shown as its text with trained tokens marked; rows are drawn cell by cell."""

import contextlib
import io
import re
import textwrap

from trl_packing.recipes import multipack_picture

import pytest
from helpers.attacks import ATTACKS, harmful
from helpers.tiny import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import show_document, show_rows
from trl_packing.data.printable import escape_hidden


def document(tokenizer, *parts: tuple[str, bool]) -> dict:
    ids, labels = [], []
    for text, trained in parts:
        tokens = tokenizer(text)["input_ids"]
        ids += tokens
        labels += tokens if trained else [-100] * len(tokens)
    return {"input_ids": ids, "labels": labels}


def test_trained_tokens_are_marked_with_their_weights():
    tokenizer = tiny_tokenizer()
    example = document(tokenizer, ("Why? ", False), ("So.<eos>", True))
    heading, text = show_document(example, tokenizer).split("\n")
    assert text == "Why? ⟦So.<eos>⟧"
    assert "ends in '<eos>', trained" in heading
    example["loss_weights"] = [1.0 if label == -100 else 0.5 for label in example["labels"]]
    assert show_document(example, tokenizer).endswith("Why? ⟦0.5×So.<eos>⟧")
    # The first token is no target.
    ids = tokenizer("So.")["input_ids"]
    first = tokenizer.decode(ids[:1])
    shown = show_document({"input_ids": ids, "labels": ids}, tokenizer)
    assert shown.endswith(f"{first}⟦{'So.'[len(first) :]}⟧")
    with pytest.raises(ValueError, match="labels"):
        show_document({"input_ids": [5, 6], "labels": [5]}, tokenizer)


@settings(max_examples=60)
@given(parts=st.lists(st.tuples(st.text(max_size=6), st.booleans()), max_size=6))
def test_nothing_is_added_or_lost_but_the_marks_and_the_escapes(parts):
    tokenizer = tiny_tokenizer()
    example = document(tokenizer, *parts)
    if not example["input_ids"]:
        return
    _, _, body = show_document(example, tokenizer).partition("\n")
    whole = tokenizer.decode(example["input_ids"])
    assert re.sub("[⟦⟧]", "", body) == escape_hidden(whole)


class TextOf:
    """A tokenizer whose tokens are the characters of one text, so that it decodes to any text."""

    def __init__(self, text: str):
        self.text = text

    def decode(self, ids, **options):
        return "".join(self.text[i] for i in ids)


def shown(text: str, color: bool) -> str:
    ids = list(range(len(text)))
    return show_document({"input_ids": ids, "labels": ids}, TextOf(text), color=color)


@pytest.mark.parametrize("color", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_document_cannot_act_on_the_terminal_or_fake_a_mark(attack, color):
    text = f"So: {ATTACKS[attack]}."
    found = shown(text, color)
    if color:
        found = found.replace("\x1b[1;32m", "", 1).replace("\x1b[0m", "", 1)
    else:
        assert found.count("⟦") == found.count("⟧") == 1
    assert not harmful(found)
    assert attack == "marks" or harmful(text), "the text holds nothing that could harm"
    _, _, body = found.partition("\n")
    assert re.sub("[⟦⟧]", "", body) == escape_hidden(text)
    found.encode()  # a lone surrogate could not be printed


def test_text_that_a_reader_sees_stays_as_it_is_and_fakes_no_weight():
    text = "Zażółć\t\\frac{1}{2}\n漢字 한글 العربية 🙂 é \\n × 0.5×"
    assert shown(text, color=False).endswith(f"Z⟦{text[1:]}⟧")
    assert shown("x0.5×y", color=False).endswith("x⟦0.5\\xd7y⟧")


@settings(max_examples=300)
@given(text=st.text(st.characters(categories=None), max_size=30))
def test_no_text_is_harmful_once_it_is_escaped(text):
    escaped = escape_hidden(text)
    assert not harmful(escaped)
    assert escape_hidden(escaped) == escaped


# --- rows -----------------------------------------------------------------------------------------


DRAWN = [
    ([[3, 2], [4], []], {"capacity": 6}, "AAABB·\nCCCC··\n······"),
    ([[3, 0, 2]], {}, "AAACC"),
    ([[3, 4]], {"cells_per_line": 5}, "AAABB\nBB"),
    # A cell is what its middle token belongs to.
    ([[9, 7]], {"tokens_per_cell": 4, "capacity": 24}, "AABB··"),
    ([[2, 2]], {"documents": [[51, 52]], "tokens_per_cell": 2}, "zA"),
]


@pytest.mark.parametrize(("rows", "options", "drawn"), DRAWN)
def test_rows_are_drawn_a_letter_a_document(rows, options, drawn):
    assert show_rows(rows, **options) == drawn


def test_a_row_beyond_its_capacity_is_refused():
    with pytest.raises(ValueError, match="7 tokens is beyond capacity=6"):
        show_rows([[3, 4]], capacity=6)


def test_the_page_of_multipack_is_reproduced():
    """axolotl's picture of a batch of 4 × 4,096 tokens, packed into one row, and its boundaries."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        multipack_picture.main()
    expected = textwrap.indent(printed.getvalue().rstrip(), "    ")
    assert expected in multipack_picture.__doc__
