"""The hooks of the site that change how a page looks: tables, notebooks, ranks in the search."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "hooks"))

import search_ranks
import tables

import notebooks


def table(*rows: list[str]) -> str:
    head, *body = (
        "".join(f"<{tag}>{cell}</{tag}>" for cell in row)
        for tag, row in zip(("th", *["td"] * len(rows)), rows, strict=False)
    )
    lines = "".join(f"<tr>{row}</tr>" for row in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def test_cells_after_the_first_know_their_column():
    long = "words " * 12
    shown = tables.named(table(["task", "a <b>file</b>", "needs"], ["x", "y", long]))
    assert f'<td>x</td><td data-column="a file">y</td><td data-column="needs">{long}' in shown
    assert "data-narrow" not in shown


def test_a_table_that_fits_a_narrow_window_is_marked():
    assert "<table data-narrow>" in tables.named(table(["a", "b", "c"], ["1", "2", "3"]))
    assert "<table data-narrow data-dense>" in tables.named(table(list("abcdefghijklm")))
    assert tables.named(table(["a", "b"], ["x " * 40, "y"])).startswith("<table><thead>")


def test_long_code_in_a_table_can_be_broken_at_its_punctuation():
    code = "<code>per_device_train_batch_size=1</code> <code>a_b</code>"
    expected = "<code>per_<wbr>device_<wbr>train_<wbr>batch_<wbr>size=<wbr>1</code>"
    assert tables.breakable(code) == f"{expected} <code>a_b</code>"


def test_a_notebook_becomes_text_code_and_escaped_outputs(tmp_path):
    outputs = [
        {"output_type": "stream", "text": ["1%\r50%\r", "100%\n", "\x1b[1m<b>\x1b[0m\n"]},
        {"output_type": "display_data", "data": {"image/svg+xml": "<svg/>", "text/plain": "no"}},
        {"output_type": "execute_result", "data": {"text/html": '<table class="x">', "a": "b"}},
    ]
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "print(1)", "outputs": outputs},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert notebooks.markdown_of(path).split("\n\n") == [
        "# Title\ntext",
        "````python\nprint(1)\n````",
        '<div class="output"><pre><code>100%\n&lt;b&gt;</code></pre></div>',
        '<div class="output"><svg/></div>',
        '<div class="output"><table></div>',
    ]


@pytest.mark.parametrize(
    ("address", "rank"),
    [
        ("settings.md", None),
        ("recipes/chat_data.py.md", {"boost": 0.5}),
        ("LOG.md", {"boost": 0.2}),
        ("repository/benchmarks/results/pack.md", {"boost": 0.2}),
        ("repository/trl_packing/config/options.py.md", {"exclude": True}),
        ("recipes/lora_8b.yaml.md", {"exclude": True}),
    ],
)
def test_the_search_ranks_guides_before_recipes_before_measurements(address, rank):
    assert search_ranks.rank(address) == rank
