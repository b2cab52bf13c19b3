"""Prompts of fields: the named templates, files and texts, and what is wrong with a row by name."""

import pytest

from trl_packing.data.row_format import NAMED, PromptTemplate, value_of

# tatsu-lab/stanford_alpaca's train.py, word by word
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


def prompt_of(given: str, row: dict, query_field: str = "query") -> str:
    return PromptTemplate.from_setting(given, query_field).prompt(row)


def test_alpaca_is_stanfords_with_a_line_break_at_the_end():
    row = {"instruction": "Add.", "input": "2, 3"}
    prompt = prompt_of("alpaca", row, "instruction")
    assert prompt == ALPACA_WITH_INPUT.format(**row) + "\n"


@pytest.mark.parametrize("no_input", [{}, {"input": ""}, {"input": None}])
def test_alpaca_without_an_input_says_nothing_of_one(no_input):
    prompt = prompt_of("alpaca", {"instruction": "Add.", **no_input}, "instruction")
    assert prompt == ALPACA.format(instruction="Add.") + "\n"


@pytest.mark.parametrize("name", NAMED)
def test_every_named_template_asks_for_the_query_alone(name):
    template = PromptTemplate.from_setting(name, "question")
    assert template.fields == ["question"]
    assert "2 + 3?" in template.prompt({"question": "2 + 3?"})


def test_query_is_the_column_of_query_field_in_a_template_of_ones_own():
    row = {"query": "no", "question": "Why?"}
    assert prompt_of("Q: {query}", row, "question") == "Q: Why?"
    assert prompt_of("Q: {query}", row) == "Q: no"
    assert prompt_of("Q: {question} {query}", {"q": "a", "question": "b"}, "q") == "Q: b a"


def test_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Ünter {topic}:\\n\n", encoding="utf-8")
    assert prompt_of(str(path), {"topic": "Recht"}) == "Ünter Recht:\\n\n"


def test_the_two_characters_of_a_line_break_become_one():
    assert prompt_of(r"Q: {q}\nA: ", {"q": r"a\nb"}) == "Q: a\\nb\nA: "


def test_doubled_braces_are_braces():
    template = PromptTemplate.from_setting('{{"task": "{task}"}}')
    assert template.fields == ["task"]
    assert template.prompt({"task": "{x}"}) == '{"task": "{x}"}'


def test_columns_may_have_spaces_and_points():
    row = {"the question": "a", "q.text": "b", "q[0]": "c"}
    assert prompt_of("{the question} {q.text} {q[0]}", row) == "a b c"


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"b": 1, "a": 2}, r"no value in the column 'q' \(it has \['a', 'b'\]\)"),
        ({"q": None}, r"no value in the column 'q' \(it is null\)"),
    ],
)
def test_a_missing_column_is_named(row, complaint):
    with pytest.raises(ValueError, match=complaint):
        prompt_of("Q: {q}", row)
    with pytest.raises(ValueError, match=complaint):
        prompt_of("alpaca", row, "q")
    with pytest.raises(ValueError, match=complaint):
        value_of(row, "q")


@pytest.mark.parametrize("given", ["alpacca", "missing.txt", "", "Answer:", "long " * 999])
def test_what_is_no_name_no_file_and_has_no_field_is_refused(given):
    with pytest.raises(ValueError, match=r"prompt_template=.* is no file, names no template \(alp"):
        PromptTemplate.from_setting(given)


def test_a_file_without_a_field_is_refused(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("Answer: {{}}")
    with pytest.raises(ValueError, match="has no field in braces"):
        PromptTemplate.from_setting(str(path))


@pytest.mark.parametrize("given", ["{", "Q: {q", "Q: q}{q}", "{q} }"])
def test_braces_that_do_not_close_are_refused(given):
    with pytest.raises(ValueError, match="prompt_template cannot be read"):
        PromptTemplate.from_setting(given)


@pytest.mark.parametrize("given", ["{}", "{} {q}"])
def test_a_field_without_a_name_of_a_column_is_refused(given):
    with pytest.raises(ValueError, match="no name of a column"):
        PromptTemplate.from_setting(given)


@pytest.mark.parametrize("template", ["{text:>1000000000}", "{text:{width}}"])
def test_a_width_that_would_not_end_is_refused(template):
    with pytest.raises(ValueError, match=r"format .* for 'text'; give a width below 1,000"):
        PromptTemplate.from_setting(template)
    row = {"text": "a", "score": 1}
    assert PromptTemplate.from_setting("{text:>3} {score:.2f}").prompt(row) == "  a 1.00"
