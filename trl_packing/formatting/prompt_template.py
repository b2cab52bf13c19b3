"""Prompts from the fields of a row, by a named template, a text with fields in braces, or a file.

    {"query": "2 + 3?", "response": "5"}     "alpaca"      Below is an instruction … ### Response:
    {"q": "2 + 3?", "a": "5"}                "Q: {q}\\nA:"   Q: 2 + 3?\\nA:

{query} stands for the column "query", or the one of "instruction" and "question" that is there, in
named and in user-defined templates; so does the answer, for "response".
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

_ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{{query}}\n\n{input}### Response:\n"
)

# name -> template, template for rows with a non-empty "input" (tatsu-lab/stanford_alpaca)
NAMED: dict[str, tuple[str, str | None]] = {
    "alpaca": (
        _ALPACA.format(paired="", input=""),
        _ALPACA.format(
            paired=", paired with an input that provides further context",
            input="### Input:\n{input}\n\n",
        ),
    ),
    "qa": ("Question: {query}\nAnswer:\n", None),
}


# Columns of questions and of answers. The first is taken if it is there, else the only other one.
QUERIES = ("query", "instruction", "question")
ANSWERS = ("response", "output", "answer", "completion")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with the fields of a row in braces.

    Attributes:
        template: text with names of columns in braces.
        with_input: template for rows with a non-empty "input", or None.
        query_field: the column that {query} stands for; "query" may be one of `QUERIES`.
    """

    template: str
    with_input: str | None = None
    query_field: str = "query"

    @classmethod
    def from_setting(cls, given: str, query_field: str = "query") -> "PromptTemplate":
        """Return the template of a name, of a file, or of the text itself.

        Raises:
            ValueError: the text has no field, or braces that cannot be read.
        """
        if given in NAMED:
            return cls(*NAMED[given], query_field)
        is_name = "{" not in given
        if is_name and not os.path.isfile(given):
            raise ValueError(
                f"prompt_template={given!r} is no file, names no template ({', '.join(NAMED)}) and "
                "has no field in braces, as 'Question: {question}\\nAnswer: ' would"
            )
        # A shell passes a line break as two characters.
        text = Path(given).read_text(encoding="utf-8") if is_name else given.replace("\\n", "\n")
        template = cls(text, None, query_field)
        if not template.fields:
            raise ValueError(f"prompt_template={given!r} has no field in braces")
        return template

    @property
    def fields(self) -> list[str]:
        """The columns that the template needs, with {query} as `query_field`."""
        try:
            parsed = [field for field in Formatter().parse(self.template) if field[1] is not None]
        except ValueError as error:
            raise ValueError(f"prompt_template cannot be read: {error}") from error
        for _, name, width, _ in parsed:
            if not name:
                raise ValueError(
                    "prompt_template has braces with no name of a column, {}; write {{}}"
                )
            if width and re.search(r"\d{4}|{", width):
                raise ValueError(
                    f"prompt_template has the format {width[:20]!r} for {name!r}; give a width "
                    "below 1,000, as a number"
                )
        return [self.query_field if name == "query" else str(name) for _, name, _, _ in parsed]

    def prompt(self, row: Mapping[str, Any]) -> str:
        """Return the prompt of a row. Raises ValueError for a missing column."""
        template = self.with_input if self.with_input and row.get("input") else self.template
        return _Columns(self.query_field).vformat(template, (), row)


class _Columns(Formatter):
    """Treats everything in braces as the name of a column: "q.text", "q[0]" or "the question"."""

    def __init__(self, query_field: str):
        self.query_field = query_field

    def get_field(
        self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, str]:
        column = self.query_field if field_name == "query" else field_name
        return _value(kwargs, column), field_name


def field_text(row: Mapping[str, Any], column: str) -> str:
    """Return a field as text. Raises ValueError if it is missing or null."""
    return str(_value(row, column))


def column_among(columns: Iterable[str], name: str) -> str:
    """Return the column that "query" or "response" stands for; any other name is a column.

    Raises:
        ValueError: several columns may be meant.
    """
    names = next((names for names in (QUERIES, ANSWERS) if names[0] == name), (name,))
    found = [other for other in names if other in columns]
    if len(found) > 1 and name not in found:
        raise ValueError(
            f"prompt_template takes one of the columns {found}; rename the one that is meant: "
            f"dataset.rename_column({found[0]!r}, {name!r})"
        )
    return name if name in found or not found else found[0]


def _value(row: Mapping[str, Any], column: str) -> Any:
    column = column_among(row, column)
    if row.get(column) is None:
        has = f"it has {sorted(row)}" if column not in row else "it is null"
        raise ValueError(f"no value in the column {column!r} ({has})")
    return row[column]
