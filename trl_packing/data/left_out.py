"""Parts of a conversation that a chat template leaves out of its text.

    {"role": "developer", "content": "Be brief."}      Qwen3's text has it nowhere
    {"reasoning_content": "Two twos.", …}              the text has it in the last turn only

Each sequence of messages is rendered once with a mark in place of every part: templates drop parts
by role, key and place. The words of each row are looked for in its text as well.
"""

import re
from collections.abc import Callable, Collection, Sequence
from itertools import count
from typing import NamedTuple

from trl_packing.data.chat_template import ChatTemplate, Conversation
from trl_packing.data.messages import REASONING_KEYS, Message, Row, is_plain, with_function
from trl_packing.data.printable import quote


class Part(NamedTuple):
    """Words of a message, by its number; `name` is "content", "reasoning" or "tool call"."""

    number: int
    name: str
    words: str


def _rewritten(message: Message, write: Callable[[str, str], str]) -> Message:
    """Return a message in which `write` has replaced each part, given its name and its words."""
    found = dict(message)
    keys = [key for key in REASONING_KEYS if isinstance(message.get(key), str)]
    if keys:  # several have the same words
        found |= dict.fromkeys(keys, write("reasoning", message[keys[0]]))
    is_answer = message.get("role") == "assistant"

    def in_text(text: str) -> str:
        pieces = re.split(r"(</?think>)", text) if is_answer else [text]
        if len(pieces) > 1:
            pieces[-3] = write("reasoning", pieces[-3])
        pieces[-1] = write("content", pieces[-1])
        return "".join(pieces)

    def named(function: Row) -> Message:
        return {**function, "name": write("tool call", str(function.get("name")))}

    content = message.get("content")
    if isinstance(content, str):
        found["content"] = in_text(content)
    elif content:
        found["content"] = parts = [dict(part) for part in content]
        for part in parts:
            if isinstance(part.get("text"), str):
                part["text"] = in_text(part["text"])
    if message.get("tool_calls"):
        found["tool_calls"] = [with_function(call, named) for call in message["tool_calls"]]
    return found


def parts_of(message: Message, number: int = 0) -> list[Part]:
    """Return the parts of a message that have words."""
    if is_plain(message) and "think>" not in message["content"]:
        content = message["content"]
        return [Part(number, "content", content)] if content.strip() else []
    parts: list[Part] = []

    def write(name: str, words: str) -> str:
        if words.strip():
            parts.append(Part(number, name, words))
        return words

    _rewritten(message, write)
    return parts


def missing_part(message: Message, text: str) -> tuple[str, str] | None:
    """Return the name and the words of a part of `message` that `text` leaves out; None if none."""
    parts = {(part.name, part.words.strip()) for part in parts_of(message)}
    # Each part needs a place of its own, long ones first: answers often repeat their reasoning.
    for name, words in sorted(parts, key=lambda part: -len(part[1])):
        before, found, after = text.partition(words)
        if not found:
            return name, words
        text = f"{before}\0{after}"
    return None


def left_out(chat: ChatTemplate, conversation: Conversation, text: str) -> list[Part]:
    """Return the parts of a conversation that its text leaves out."""
    messages = conversation.messages
    parts = [part for number, each in enumerate(messages) for part in parts_of(each, number)]
    names = tuple((part.number, part.name) for part in parts)
    roles = tuple(message["role"] for message in messages)
    given = tuple((name, bool(value)) for name, value in conversation.kwargs.items())
    shape = (roles, names, conversation.tools is None, given)
    hidden = chat.hidden_parts.get(shape)
    if hidden is None:
        hidden = chat.hidden_parts[shape] = _hidden(chat, conversation, range(len(parts)))
    if hidden:  # other words may decide on these
        hidden = _hidden(chat, conversation, hidden)
    return [p for n, p in enumerate(parts) if n in hidden or not _shows(text, p.words.strip())]


def _hidden(chat: ChatTemplate, conversation: Conversation, chosen: Collection[int]) -> set[int]:
    """Return which of the `chosen` parts, counted over all messages, do not reach the text."""
    numbers = count()

    def write(name: str, words: str) -> str:
        if words.strip() and (number := next(numbers)) in chosen:
            return f"qz{number}zq"
        return words

    text = chat.try_render(conversation.of([_rewritten(m, write) for m in conversation.messages]))
    if text is None:
        return set()
    shown = text.casefold()
    return {number for number in chosen if f"qz{number}zq" not in shown}


def _shows(text: str, words: str) -> bool:
    """Whether `text` has these words, which a template may escape or write in other cases."""
    if words in text:
        return True
    shown = text.casefold()
    return all(word in shown for word in re.findall(r"\w+", words.casefold()))


def in_words(part: Part, messages: Sequence[Message]) -> str:
    """Return a sentence that names a part that a template leaves out, and the way out."""
    role = messages[part.number]["role"]
    remedy = (
        ", so the model would learn to leave it out; set train_on='every_turn' or "
        "'last_assistant', or use a template that keeps it"
    )
    if role != "assistant":
        remedy = f", whose role is {role!r}; rename the role, or use a template that writes it"
    elif part.name == "tool call":
        remedy = "; use a template that writes tool calls"
    elif part.number == len(messages) - 1:  # no other turn would show it
        remedy = (
            ", so the model would learn to leave it out; use a template that keeps it, or write "
            "reasoning into the content (<think>…</think>)"
        )
    words = quote(part.words.strip()[:40])
    return (
        f"the chat template leaves out the {part.name} of message {part.number} ({words}){remedy}"
    )


def check_thoughts(messages: Sequence[Message], text: str) -> None:
    """Raise ValueError if a template has written its own thoughts before those in a content."""
    if "</think>" not in text:
        return
    for number, message in enumerate(messages):
        content = str(message.get("content"))
        if message["role"] != "assistant" or "</think>" not in content:
            continue
        before, found, _ = text.partition(content.strip())
        if found and before.rstrip().endswith("</think>"):
            raise ValueError(
                "the chat template writes thoughts of its own before those in the content of "
                f"message {number} ({quote(content[:40])}); move them into 'reasoning_content'"
            )
