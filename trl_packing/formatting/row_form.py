"""The form of a row: the columns that hold its text or its messages.

    text               {"text": …}
    prompt             {"prompt": …, "completion": …}
    messages           {"messages": […]} or {"conversations": […]}
    prompt messages    {"prompt": […], "completion": […]}
    fields             columns that a prompt template names

Messages may have ShareGPT's keys and roles. They are converted here.
"""

import json
from collections.abc import Mapping
from typing import Any

from trl_packing.formatting.messages import (
    check_messages,
    is_sharegpt,
    messages_from_sharegpt,
    tools_from_value,
)
from trl_packing.formatting.printable import quote

Row = Mapping[str, Any]

IN_WORDS = {
    "text": "text",
    "prompt": "prompts and completions",
    "messages": "conversations",
    "prompt messages": "prompts and completions of messages",
    "fields": "raw fields",
}


def form_of(row: Row, text_field: str) -> str:
    """Return the form of a row without a prompt template.

    Args:
        row: of the user's data set.
        text_field: column of plain text.

    Raises:
        ValueError: for a row of none of these forms.
    """
    messages = name_of_messages(row)
    # Rows of a mixed stream have nulls in the columns of other forms. A prompt beside a whole
    # conversation repeats its beginning (ultrachat_200k).
    if row.get("prompt") is not None and (messages is None or row.get("completion") is not None):
        if isinstance(row["prompt"], list):
            return "prompt messages"
        _check_not_json(row["prompt"], row.get("completion"))
        return "prompt"
    if messages is not None:
        return "messages"
    if row.get(text_field) is not None:
        return "text"
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), str):
            raise ValueError(
                f"its {name!r} is a text; if it is JSON, read it before: "
                f"dataset.map(lambda row: {{{name!r}: json.loads(row[{name!r}])}})"
            )
    raise ValueError(f"it has nothing to train on: {_contents(row)}")


def messages_of(
    row: Row, form: str, *, template: str, calls_tools: bool
) -> tuple[list[Any], list[Any], list[Any] | None]:
    """Return the messages of the prompt, the messages after it, and the tools.

    Args:
        row: with messages.
        form: of the row.
        template: source of the chat template.
        calls_tools: whether that template renders tool calls.

    Raises:
        ValueError: messages or tools cannot be read.
    """
    names: tuple[str, ...] = ("prompt", "completion")
    if form == "messages":
        names = (name_of_messages(row) or "messages",)
    lists, sharegpt = [], False
    for name in names:
        messages: Any = row.get(name)
        if is_sharegpt(messages):
            sharegpt = True
            messages = messages_from_sharegpt(messages, tool_calls=calls_tools)
        if messages != [] or name == "prompt":
            check_messages(messages, template, what=name)
        lists.append(list(messages))
    *prompt, last = lists
    tools = tools_from_value(row.get("tools"), sharegpt=sharegpt)
    return [message for part in prompt for message in part], last, tools


def string_of(row: Row, column: str) -> str:
    """Return the text in a column. Raises ValueError if it is something else."""
    value = row.get(column)
    if not isinstance(value, str):
        got = "nothing (null)" if value is None else f"{type(value).__name__} {quote(value):.60}"
        raise ValueError(f"its {column!r} is {got}; make it a string, or remove the row")
    return value


def _check_not_json(prompt: Any, completion: Any) -> None:
    """Raise ValueError if both are the JSON text of messages, as a CSV file stores them."""
    if _is_json_of_messages(prompt) and _is_json_of_messages(completion):
        raise ValueError(
            "its 'prompt' and 'completion' are messages as JSON text; read them before: "
            "dataset.map(lambda row: {name: json.loads(row[name]) for name in ('prompt', "
            "'completion')})"
        )


def _is_json_of_messages(text: Any) -> bool:
    if not isinstance(text, str) or not text.lstrip().startswith("["):
        return False
    try:
        return all(isinstance(m["role"], str) and "content" in m for m in json.loads(text))
    except (ValueError, TypeError, KeyError):
        return False


def name_of_messages(row: Row) -> str | None:
    """Return the column that holds the whole conversation of a row, or None."""
    names = ("messages", "conversations")
    return next((name for name in names if isinstance(row.get(name), list)), None)


def _contents(row: Row) -> str:
    return ", ".join(
        f"{name!r} is {'null' if row[name] is None else type(row[name]).__name__}"
        for name in sorted(row)
    )
