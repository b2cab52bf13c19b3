"""The parts of a rendered conversation that a model has to write, message by message.

    text          <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    span                                                                  [Hello<|im_end|>]

A span starts where the generation prompt ends, and ends with the stop token. Messages are found by
a mark in place of their contents. With `train_on="every_turn"`, each turn is a document as at
inference; docs/every-turn.md has the cases.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trl.data_utils import common_prefix_length

from trl_packing.data.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    Conversation,
)
from trl_packing.data.left_out import Part, in_words, missing_part
from trl_packing.data.messages import REASONING_KEYS, Message
from trl_packing.data.printable import quote
from trl_packing.data.spans import Rendered, Span, WeightedSpan


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation and its text, in which messages are located by rendering it again."""

    chat: ChatTemplate
    conversation: Conversation
    text: str

    @property
    def messages(self) -> list[Message]:
        return self.conversation.messages

    @cached_property
    def mark(self) -> str:
        """A character of the private use area that the text does not have."""
        return next(mark for mark in map(chr, range(0xF8FF, 0xE000, -1)) if mark not in self.text)

    def first(self, number: int, *, generation_prompt: bool = False) -> str | None:
        """Return the text of the first `number` messages; None if the template refuses them."""
        first = self.conversation.of(self.messages[:number])
        return self.chat.try_render(first, generation_prompt=generation_prompt)

    def with_marks(self, replaced: Mapping[int, Message]) -> str | None:
        """Return the text with `mark` as the content of these messages; None if refused."""
        messages = list(self.messages)
        for number, message in replaced.items():
            # A list stays a list, as some templates need it.
            is_list = isinstance(message.get("content"), (list, tuple))
            content = [{"type": "text", "text": self.mark}] if is_list else self.mark
            messages[number] = message | {"content": content}
        return self.chat.try_render(self.conversation.of(messages))

    def around(self, number: int) -> tuple[str, str]:
        """Return the texts around the content of a message, had it nothing else, or two marks."""
        message = self.messages[number]
        plain = {"role": message["role"], "content": message.get("content")}
        marked = self.with_marks({number: plain})
        if not marked:
            return self.mark, self.mark
        before, _, after = marked.partition(self.mark)
        return before, after


def _unknown(number: int) -> ValueError:
    """Return the error of a message that is not found in the text."""
    return ValueError(
        f"the chat template renders message {number} differently beside other messages; set "
        "train_on='every_turn' or 'all', or use one with {% generation %}"
    )


def trained_spans(
    chat: ChatTemplate, conversation: Conversation, weights: Mapping[int, float]
) -> tuple[str, list[WeightedSpan]]:
    """Return the text of a conversation, and its trained characters with their weights.

    Args:
        chat: renders the conversation.
        conversation: messages without "train" and "weight".
        weights: the weight of each message that is trained, by its number.
    """
    text, marked = chat.render_marked(conversation)
    rendered = RenderedConversation(chat, conversation, text)
    if marked is None:
        spans = _spans(rendered, [*weights])
        return text, [(*spans[number], weights[number]) for number in weights]
    assistants = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    found = [*_spans(rendered, [n for n in weights if n not in assistants]).items()]
    if len(marked) == len(assistants):
        found += zip(assistants, marked, strict=True)
    else:  # the last message that starts before the end of the span
        starts = {number: _start_and_after(rendered, number)[0] for number in assistants}
        for span in marked:
            before = [number for number, start in starts.items() if start < span[1]]
            found.append((max(before, default=min(starts)), span))
    return text, [(*span, weights[n]) for n in weights for owner, span in found if owner == n]


def _spans(rendered: RenderedConversation, wanted: Sequence[int]) -> dict[int, Span]:
    """Return the characters that a model has to write for each wanted message."""
    spans = _spans_at_once(rendered, [n for n in wanted if _is_plain(rendered.messages[n])])
    return spans | {n: _span_alone(rendered, n) for n in wanted if n not in spans}


def _spans_at_once(rendered: RenderedConversation, plain: Sequence[int]) -> dict[int, Span]:
    """Return spans of plain messages, if nothing but their contents is between the pieces."""
    chat = rendered.chat
    text = rendered.text
    messages = rendered.messages
    pieces = (rendered.with_marks({n: messages[n] for n in plain}) or "").split(rendered.mark)
    if len(pieces) != len(plain) + 1 or not text.startswith(pieces[0]):
        return {}
    # With arguments, a template may choose another generation prompt.
    leads = [] if rendered.conversation.kwargs else [chat.around_answer[0]]
    prompt = chat.generation_prompt
    if prompt:
        leads.append("")
    spans = {}
    at = len(pieces[0])
    for number, before, after in zip(plain, pieces, pieces[1:], strict=False):
        content = _text(messages[number]) or ""
        forms = (content, content.strip(), content.rstrip(), content.lstrip())
        size = next((len(f) for f in forms if text.startswith(f + after, at)), None)
        if size is None:
            return {}
        lead: str | None = ""
        if messages[number]["role"] == "assistant":
            lead = next((lead for lead in leads if before.endswith(prompt + lead)), None)
        if lead is not None:
            spans[number] = (at - len(lead), at + size + chat.stop_size(after))
        at += size + len(after)
    return spans if at == len(text) else {}


def _span_alone(rendered: RenderedConversation, number: int) -> Span:
    chat, text = rendered.chat, rendered.text
    start, after = _start_and_after(rendered, number)
    stops = []
    if text.endswith(after):
        stops.append(len(text) - len(after) + chat.stop_size(after))
    first = rendered.first(number + 1)
    if first and text.startswith(first):  # later messages do not change its text
        stops.append(len(chat.up_to_stop(first)))
    limit = len(text)  # the content of the next message, which may be in the turn of this one
    if number + 1 < len(rendered.messages) and _is_plain(rendered.messages[number + 1]):
        marked = rendered.with_marks({number + 1: rendered.messages[number + 1]}) or ""
        before = marked.partition(rendered.mark)[0]
        if before and text.startswith(before):
            limit = len(before)
    stop = next((stop for stop in stops if start <= stop <= limit), None)
    if stop is None:
        raise _unknown(number)
    if missing := missing_part(rendered.messages[number], text[start:stop]):
        raise ValueError(in_words(Part(number, *missing), rendered.messages))
    return start, stop


def _start_and_after(rendered: RenderedConversation, number: int) -> tuple[int, str]:
    """Return where a message starts in the text, and the text after its content."""
    before, after = rendered.around(number)
    if rendered.messages[number]["role"] == "assistant" and number:  # other roles need no prompt
        prompt = rendered.first(number, generation_prompt=True)
        if prompt and rendered.text.startswith(prompt):
            return len(prompt), after
    if not rendered.text.startswith(before):
        raise _unknown(number)
    return len(before), after


def _text(message: Message) -> str | None:
    """Return the content of a message that is a text, or a list of one text part; else None."""
    content = message.get("content")
    if isinstance(content, (list, tuple)) and len(content) == 1:
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content if isinstance(content, str) else None


def _is_plain(message: Message) -> bool:
    has_more = any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))
    return _text(message) is not None and not has_more


def render_every_turn(
    chat: ChatTemplate, conversation: Conversation, weights: Mapping[int, float]
) -> list[Rendered]:
    """Return one document for each trained message of a conversation; arguments as above."""
    documents = []
    for number, weight in weights.items():
        if conversation.messages[number]["role"] != "assistant" or number == 0:
            raise ValueError(
                f"message {number} is no answer of the assistant; set its 'train' to false, or "
                "use train_on='assistant'"
            )
        turn = conversation.of(conversation.messages[: number + 1])
        prompt, written, trained = _written(chat, turn)
        spans = [(len(prompt) + start, len(prompt) + stop, weight) for start, stop in trained]
        documents.append(Rendered(prompt + written, spans, prompt, False, False, True))
    return documents


# A prompt that opens the thoughts of the model, and one that opens or closes them.
_OPENED = re.compile(r"<(\w+)>\s*\Z")
_ASKS = re.compile(r"</?\w+>\s*\Z")


def _written(chat: ChatTemplate, conversation: Conversation) -> tuple[str, str, Iterable[Span]]:
    """Return the generation prompt, the last message as it follows, and the trained parts of it."""
    *history, message = conversation.messages
    number = len(history)
    try:
        prompt = chat.render(conversation.of(history), generation_prompt=True)
        text, marked = chat.render_marked(conversation)
    except TEMPLATE_ERRORS as error:
        raise ValueError(
            f"the chat template cannot render the conversation before message {number}, or up to "
            f"it ({error}); set its 'train' to false, or use another template"
        ) from error
    turn = RenderedConversation(chat, conversation, text)
    start = _start_behind(turn, prompt)
    missing = None
    if start is not None:
        written = _turn_from(turn, start)
        missing = missing_part(message, written)
        opened = _OPENED.search(prompt)
        if missing is None and not (opened and opened[0].strip() in written):
            size = len(written)
            spans = [(start, start + size)] if marked is None else marked
            trained = [(max(a - start, 0), min(b - start, size)) for a, b in spans]
            return prompt, written, [(a, b) for a, b in trained if a < b]
    raw = _as_in_the_data(turn, prompt)
    if raw is not None:
        return prompt, raw, [(0, len(raw))]
    if missing is not None:
        name, words = missing
        raise ValueError(
            f"the chat template leaves out the {name} of message {number} ({quote(words[:40])}) "
            "even where it is the last one; use a template that keeps it, or write reasoning into "
            "the content (<think>…</think>)"
        )
    at = common_prefix_length(text, prompt)
    remedy = "use another template, or set its 'train' to false"
    if conversation.kwargs or _ASKS.search(prompt):
        remedy = (
            "give the message the reasoning that the prompt asks for, or chat_template_kwargs "
            "that fit it (enable_thinking)"
        )
    raise ValueError(
        f"at inference the model reads {quote(prompt[-40:])} at the end of its prompt before "
        f"message {number}, but the chat template writes {quote(text[at : at + 40])} there in "
        f"the finished turn; {remedy}"
    )


def _start_behind(turn: RenderedConversation, prompt: str) -> int | None:
    """Return where the last message goes on from `prompt`; None if it begins in another way."""
    text, words = turn.text, prompt.rstrip()
    if text.startswith(prompt):
        return len(prompt)
    if words and text.startswith(words):  # white space may differ
        return len(text) - len(text[len(words) :].lstrip())
    # An answer may change the messages before it: gpt-oss drops the thoughts of a tool call.
    header = turn.chat.generation_prompt
    before = turn.around(len(turn.messages) - 1)[0].removesuffix(turn.chat.around_answer[0])
    is_turn = header and all(each.endswith(header) for each in (prompt, before))
    return len(before) if is_turn and text.startswith(before) else None


def _turn_from(turn: RenderedConversation, start: int) -> str:
    """Return the text of the last message from `start` on, with the stop that it ends in."""
    chat, text = turn.chat, turn.text
    after = chat.around_answer[1]
    size = len(chat.stop)
    end = len(text) - len(after)
    if size and text.endswith(after) and end >= start:
        return text[start : end + size]
    written = chat.up_to_stop(text)[start:]
    if size:
        return written
    # Turns end as the next one begins (GLM).
    return written + chat.start_of("tool" if turn.messages[-1].get("tool_calls") else "user")


def _as_in_the_data(turn: RenderedConversation, prompt: str) -> str | None:
    """Return the content and its stop, if the template fails only at thoughts at its start."""
    message = turn.messages[-1]
    text = turn.text
    content = message.get("content")
    before, after = turn.around(len(turn.messages) - 1)
    opened = _OPENED.search(prompt)
    given, tag = (opened[0], opened[1]) if opened else ("", "")
    shown = text[len(before) : len(text) - len(after)]
    if (
        not isinstance(content, str)
        or not (before and after and "</" in content)
        or not (before.startswith(prompt) or prompt == before + given)
        or text != before + shown + after
        or not content.rstrip().endswith(shown.rstrip())
    ):
        return None
    content = content if content.endswith(shown) else content.rstrip()
    if content.startswith(given):
        content = content[len(given) :]
    elif f"<{tag}>" in content or f"</{tag}>" not in content:
        return None  # it does not begin inside of the thoughts that the prompt has opened
    written = content + after[: turn.chat.stop_size(after)]
    return written if missing_part(message, written) is None else None
