"""Contents that are lists of parts, which some chat templates cannot read.

    content     [{"type": "text", "text": "Hi"}]
    llama3      [{'type': 'text', 'text': 'Hi'}]      as Python writes it
    lfm2        [{"type": "text", "text": "Hi"}]      as JSON, which is right for results of tools
    qwen3                                             left out

No template raises an error, so a model would be trained on this text.
"""

import json
from collections.abc import Callable, Sequence

from trl_packing.formatting.messages import Message
from trl_packing.formatting.printable import quote

_TOOL_ROLES = ("tool", "function", "ipython")


def check_lists(
    messages: Sequence[Message], text: str, render: Callable[[list[Message]], str | None]
) -> None:
    """Raise ValueError for the first content that is a list and that `text` garbles or leaves out.

    Args:
        messages: of a conversation.
        text: the conversation as the chat template renders it.
        render: renders other messages; None if the template refuses them.
    """
    for number, message in enumerate(messages):
        content = message.get("content")
        if not content or not isinstance(content, (list, tuple)):
            continue
        for garbled in _garbled(content) if message["role"] not in _TOOL_ROLES else ():
            if garbled in text:
                raise ValueError(_refusal(number, f"writes it as {quote(garbled[:30])}"))
        missing = [words for words in texts_of(content) if _end_of(words) not in text]
        # A template may leave out a message or its thoughts in any form.
        as_texts = render([*map(_joined, messages)]) if missing else None
        if any(_end_of(words) in (as_texts or "") for words in missing):
            raise ValueError(_refusal(number, f"leaves out {quote(missing[0][:40])}"))


def _joined(message: Message) -> Message:
    """Return `message` with the texts of its parts as one text."""
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    return {**message, "content": "".join(texts_of(content))}


def texts_of(content: Sequence[Message]) -> list[str]:
    """Return the texts in a list of parts."""
    return [part["text"] for part in content if isinstance(part.get("text"), str)]


def _garbled(content: Sequence[Message]) -> tuple[str, ...]:
    """Return `content` as Python writes it, and as JSON."""
    return str(content), json.dumps(content, ensure_ascii=False, default=str)


def _end_of(words: str) -> str:
    """Return `words` without thoughts, which templates leave out of earlier turns."""
    return words.rpartition("</think>")[2].strip()


def _refusal(number: int, fault: str) -> str:
    return (
        f"message {number} has a list as content, which the chat template does not read: it "
        f"{fault}; make the content a string, or use a template that reads lists"
    )
