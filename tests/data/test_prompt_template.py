"""Prompts of fields: the named templates, files and texts, and what is wrong with a row by name."""

import pytest

from trl_packing.data.row_format import PromptTemplate

# tatsu-lab/stanford_alpaca's train.py, word by word
ALPACA_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides further context. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:"""
ALPACA = """\
Below is an instruction that describes a task. \
Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:"""


def prompt_of(given: str, row: dict, query_field: str = "query") -> str:
    return PromptTemplate.from_setting(given, query_field).prompt(row)


@pytest.mark.parametrize("more", [{"input": "2, 3"}, {}, {"input": ""}, {"input": None}])
def test_alpaca_is_stanfords_with_a_line_break_at_the_end(more):
    expected = ALPACA_WITH_INPUT if more.get("input") else ALPACA
    prompt = prompt_of("alpaca", {"instruction": "Add.", **more}, "instruction")
    assert prompt == expected.format(instruction="Add.", **more) + "\n"


def test_texts_and_files_name_columns_in_braces(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Ünter {topic}:\\n\n", encoding="utf-8")
    assert prompt_of(str(path), {"topic": "Recht"}) == "Ünter Recht:\\n\n"
    assert prompt_of(r"Q: {q}\nA: ", {"q": r"a\nb"}) == "Q: a\\nb\nA: "
    assert prompt_of('{{"task": {{{task}}}}}', {"task": "{x}"}) == '{"task": {{x}}}'
    row = {"the question": "a", "q.text": "b", "q[0]": "c"}
    assert prompt_of("{the question} {q.text} {q[0]}", row) == "a b c"
    row = {"query": "no", "question": "Why?"}
    assert prompt_of("Q: {query}", row, "question") == "Q: Why?"
    assert prompt_of("Q: {query}", row) == "Q: no"


# A width is part of a name: nothing is filled up for hours.
@pytest.mark.parametrize("given", ["Q: {q}", "alpaca", "{a:>1000000000}"])
def test_a_missing_column_is_named(given):
    with pytest.raises(ValueError, match=r"no value in the column .* \(it has \['a', 'b'\]\)"):
        prompt_of(given, {"b": 1, "a": 2}, "q")
    with pytest.raises(ValueError, match=r"no value in the column 'q' \(it is null\)"):
        prompt_of("Q: {q}", {"q": None})
