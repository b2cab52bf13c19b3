"""Messages of a conversation: convert ShareGPT's keys and roles, check messages, read weights.

    {"from": "human", "value": "Hi"}                {"role": "user", "content": "Hi"}
    {"from": "function_call", "value": "{…}"}       {"role": "assistant", "tool_calls": [{…}]}

A message may have ``"train": true/false`` and ``"weight": 0.5``, which no chat template sees. Every
message of a data set decides, not the type of a column, which depends on the loader.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset, LargeList, List

from trl_packing.data.counts import NO_JSON, PARSED
from trl_packing.data.printable import in_short, quote
from trl_packing.documents.arrow import AnyDataset
from trl_packing.documents.weights import LARGEST_WEIGHT

Message = dict[str, Any]
Row = Mapping[str, Any]

_TOOL_ROLES = ("tool", "function", "ipython")
ROLES = ("system", "developer", "user", "assistant", "model", *_TOOL_ROLES)
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")

# Values of "from" in the data of other projects.
SHAREGPT_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    "human": "user",
    "observation": "tool",
    "function_response": "tool",
}

_FLAGS = ("train", "weight")


def is_sharegpt(messages: Any) -> bool:
    """Return whether `messages` have the keys "from" and "value"."""
    first = messages[0] if isinstance(messages, (list, tuple)) and messages else None
    return isinstance(first, Mapping) and "from" in first and "value" in first


def messages_from_sharegpt(turns: Sequence[Row], *, tool_calls: bool) -> list[Message]:
    """Return messages as chat templates read them; without `tool_calls`, calls stay text."""
    messages = []
    for number, turn in enumerate(turns):
        speaker, content = turn.get("from"), turn.get("value")
        if speaker not in SHAREGPT_ROLES:
            names = ", ".join(SHAREGPT_ROLES)
            raise ValueError(f"message {number} is from {quote(speaker)}; rename it: {names}")
        message = {**turn, "role": SHAREGPT_ROLES[speaker], "content": content}
        if speaker == "function_call" and tool_calls and (calls := _calls(content)):
            message |= {"content": "", "tool_calls": calls}
        messages.append({key: message[key] for key in message if key not in ("from", "value")})
    return messages


def _value_in(text: Any) -> Any:
    """Return the value of JSON, None if it is none."""
    with suppress(TypeError, ValueError):
        return json.loads(text)
    return None


def _calls(value: Any) -> list[Message] | None:
    """Return the function calls in JSON, one or a list; None if `value` is something else."""
    calls = _value_in(value)
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        return None
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def tools_from_value(value: Any, *, sharegpt: bool = False) -> list[Any] | None:
    """Return the tools of a row, a list or JSON of one; with `sharegpt`, wrap bare functions."""
    if isinstance(value, str):
        with suppress(ValueError):
            value = json.loads(value.strip() or "null")
    tools = [] if value is None else value
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) or callable(t) for t in tools):
        raise ValueError(f"'tools' must be a list of dictionaries, got {in_short(value)}")
    if sharegpt:
        tools = [t if "function" in t else {"type": "function", "function": t} for t in tools]
    return tools or None


def is_plain(message: Any) -> bool:
    """Whether a message is nothing but a role and a content, both of them texts."""
    if type(message) is not dict or len(message) != 2:
        return False
    return type(message.get("role")) is type(message.get("content")) is str


def check_messages(messages: Any, chat_template: str, *, what: str = "messages") -> None:
    """Raise ValueError for the first message that a chat template would garble or leave out.

    Roles that the source of `chat_template` names are known; `what` is the name of the column.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"{what!r} must be a list of messages, got {in_short(messages)}")
    for number, message in enumerate(messages):
        if is_plain(message) and message["role"] in ROLES:  # most rows, and fast
            continue
        if fault := _fault(message, chat_template):
            raise ValueError(f"message {number} of {what!r} {fault}")


def _fault(message: Any, chat_template: str) -> str | None:
    if not isinstance(message, Mapping):
        return f"is {in_short(message)}, not a dictionary with 'role' and 'content'"
    # The key that OpenAI's API had before tool_calls.
    if message.get("function_call") and not re.search(r"\bfunction_call\b", chat_template):
        return (
            "has its call under 'function_call', which the chat template does not read; make it "
            "'tool_calls': [{'type': 'function', 'function': …}]"
        )
    role, content = message.get("role"), message.get("content")
    if role not in ROLES and not re.search(rf"(['\"]){re.escape(str(role))}\1", chat_template):
        return f"has the role {quote(role)}, which is none of {ROLES} or the template's; rename it"
    calls = message.get("tool_calls") or ()
    if not all(isinstance(call, Mapping) for call in calls):
        return f"({role}) has {in_short(calls)} as tool_calls; make it a list of calls"
    if content is None and not any(map(message.get, ("tool_calls", *REASONING_KEYS))):
        return f"({role}) has no content; remove the row, or set it to ''"
    parts = content if isinstance(content, (list, tuple)) else [content]
    are_parts = all(isinstance(part, Mapping) and "type" in part for part in parts)
    if not (are_parts or content is None or isinstance(content, str)):
        return f"({role}) has {in_short(content)} as content; give a string, or parts with a 'type'"
    return None


def without_flags(messages: Sequence[Message]) -> list[Message]:
    """Return `messages` for a chat template, without nulls, "train" and "weight"."""
    kept = []
    for message in messages:
        kept.append({k: x for k, x in message.items() if x is not None and k not in _FLAGS})
    return kept


def without_arrow_nulls(value: Any, feature: Any) -> Any:
    """Return `value` without null keys, which Arrow adds to a struct that lacks a key of another.

    `feature` is that of `datasets`: nulls in JSON were written by somebody, and stay.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        found = {}
        for key, each in value.items():
            if isinstance(each, (dict, list)):  # a call for each text would cost
                found[key] = without_arrow_nulls(each, feature.get(key))
            elif each is not None:
                found[key] = each
        return found
    if isinstance(value, list) and isinstance(feature, (List, LargeList)):
        return [without_arrow_nulls(each, feature.feature) for each in value]
    return value


def with_function(call: Any, change: Callable[[Row], Any]) -> Any:
    """Return a tool call with its function changed; some calls are a function themselves."""
    if call.get("function"):
        return {**call, "function": change(call["function"])}
    return change(call)


def with_arguments(messages: Sequence[Message], form: type | None) -> tuple[list[Message], int]:
    """Return messages whose tool calls have arguments of a form, and bits of `counts.HANDLED`.

    `form` is dict, str or None for both. Raises ValueError for text that should be a dictionary,
    and is no JSON object.
    """
    handled = number = 0

    def change(function: Row) -> Row:
        nonlocal handled
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping) and form is str:
            return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if not isinstance(arguments, str):
            return function
        value = _value_in(arguments.strip() or "{}")
        is_object = isinstance(value, dict)
        if form is dict and not is_object:
            raise ValueError(
                f"message {number} has {in_short(arguments)} as arguments of a tool call, but the "
                "chat template reads a dictionary; make it a JSON object"
            )
        if form is dict:
            handled |= PARSED
            return {**function, "arguments": value}
        if not is_object:
            handled |= NO_JSON
        return function

    found = list(messages)
    for number, message in enumerate(messages):
        if message.get("tool_calls"):
            calls = [with_function(call, change) for call in message["tool_calls"]]
            found[number] = {**message, "tool_calls": calls}
    return found, handled


def trained_messages(messages: Sequence[Row], train_on: str, *, first: int = 0) -> dict[int, float]:
    """Return the weights of the messages that are trained, by index.

    "train" and "weight" of a message count before `train_on`; `first` is the index of the first
    message behind the prompt. Raises ValueError for flags of other values.
    """
    assistants = [n for n, m in enumerate(messages) if n >= first and m["role"] == "assistant"]
    chosen = assistants[-1:] if train_on == "last_assistant" else assistants
    weights = {}
    for number, message in enumerate(messages):
        train, weight = message.get("train"), message.get("weight")
        weight = 1.0 if weight is None else weight
        if not isinstance(weight, (int, float)) or not 0 <= weight <= LARGEST_WEIGHT:
            raise ValueError(f"message {number} has {weight=}; give 0 or more, in float32")
        if train not in (None, True, False):
            raise ValueError(f"message {number} has {train=}; give true or false")
        if weight and (number in chosen if train is None else train):
            weights[number] = float(weight)
    return weights


MESSAGES = ("prompt", "completion", "messages", "conversations")  # columns that hold them


def has_flag(message: Any) -> bool:
    """Whether a message has a value of "train" or "weight"."""
    return isinstance(message, Mapping) and any(message.get(f) is not None for f in _FLAGS)


def has_flags(dataset: AnyDataset, first: Row) -> bool:
    """Return whether a message has "train" or "weight"; of a stream, one of its first row."""
    rows = [first] if isinstance(dataset, IterableDataset) else rows_with(dataset, _FLAGS)
    return any(has_flag(message) for row in rows for message in messages_in(row))


def messages_in(row: Row) -> list[Any]:
    """Return the messages in all columns of a row."""
    lists = [row.get(name) for name in MESSAGES]
    return [message for each in lists if isinstance(each, list) for message in each]


def rows_with(dataset: Dataset, keys: Collection[str]) -> Iterable[Row]:
    """Return the messages of all rows; no row if none of `keys` is a key in them."""
    columns = [name for name in MESSAGES if name in dataset.column_names]
    if not any(_may_hold(part, keys) for c in columns for part in dataset.data.column(c).chunks):
        return []
    return dataset.select_columns(columns).with_format(None)  # without rows that are left out


def _may_hold(values: pa.Array, keys: Collection[str]) -> bool:
    """Whether the type of some values has one of the keys, or JSON among them names one."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        quoted = f'"({"|".join(keys)})"'
        return bool(pc.any(pc.match_substring_regex(values.storage, quoted)).as_py())
    if pa.types.is_struct(kind):
        is_there = any(field.name in keys for field in kind)
        return is_there or any(_may_hold(part, keys) for part in values.flatten())
    return pa.types.is_nested(kind) and _may_hold(values.flatten(), keys)


def texts_of(content: Sequence[Message]) -> list[str]:
    """Return the texts in a list of parts."""
    return [part["text"] for part in content if isinstance(part.get("text"), str)]


def check_lists(
    messages: Sequence[Message], text: str, render: Callable[[list[Message]], str | None]
) -> None:
    """Raise ValueError for the first content that is a list and that `text` garbles or leaves out.

    `render` renders other messages, or returns None.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        if not content or isinstance(content, str):
            continue
        # Thoughts of earlier turns are left out.
        words = [each.rpartition("</think>")[2].strip() for each in texts_of(content)]
        missing = [each for each in words if each not in text]
        if missing:  # a template may leave out a message in any form
            texts = []
            for other in messages:
                parts = other.get("content")
                if isinstance(parts, (list, tuple)):
                    other = {**other, "content": "".join(texts_of(parts))}
                texts.append(other)
            as_texts = render(texts) or ""
            missing = [each for each in missing if each in as_texts]
        garbled = str(content) in text
        garbled |= json.dumps(content, ensure_ascii=False, default=str) in text
        if missing or (garbled and message["role"] not in _TOOL_ROLES):  # that write results so
            which = f"message {number} has a list as content"
            raise ValueError(f"{which}, which the chat template does not read; make it a string")
