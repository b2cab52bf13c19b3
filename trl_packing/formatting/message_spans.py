"""The characters of a rendered conversation that a model has to write, message by message.

    messages      user "Hi"               assistant "Hello"
    text          <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    span                                                                  [Hello<|im_end|>]

A span starts where the generation prompt ends: the model itself has to write everything that the
template puts between this prompt and the content (an empty <think> block, for example). It ends
with the stop token.

If the template marks the assistant's characters with ``{% generation %}``, these marks are used.
Otherwise the conversation is rendered again with placeholders instead of contents:

    all at once   every wanted content is replaced; the text must then be
                  piece  content  piece  content  piece           exactly, or this is not used
    one by one    where the template changes contents or the text around them, each message is
                  replaced alone; the text after the placeholder is the text after the message

A template may leave out part of a message, most often the reasoning of earlier turns. The model
would then be trained on something else than the data, so this is an error, unless the template has
``{% generation %}``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from trl.data_utils import common_prefix_length

from trl_packing.formatting.chat_template import ChatTemplate, Conversation, Span, absent_from
from trl_packing.formatting.messages import REASONING_KEYS, Message, texts_of
from trl_packing.formatting.printable import quote


def find_message_spans(
    chat: ChatTemplate,
    conversation: Conversation,
    wanted: Sequence[int],
    *,
    alike: bool = True,
) -> tuple[str, dict[int, list[Span]]]:
    """Return the text of a conversation, and the characters that each wanted message trains.

    Args:
        chat: renders the conversation.
        conversation: messages without "train" and "weight".
        wanted: numbers of the messages that are trained.
        alike: All are trained with the same weight. If all assistant messages are wanted, too, it
            does not matter which of them a ``{% generation %}`` span belongs to.

    Raises:
        ValueError: the template leaves out part of a message, or a message cannot be located.
    """
    if chat.marks_generations:
        return _marked_spans(chat, conversation, wanted, alike)
    rendered = RenderedConversation(chat, conversation, chat.render(conversation))
    return rendered.text, {number: [span] for number, span in rendered.spans(wanted).items()}


def _marked_spans(
    chat: ChatTemplate, conversation: Conversation, wanted: Sequence[int], alike: bool
) -> tuple[str, dict[int, list[Span]]]:
    text, marked = chat.render_marked(conversation)
    rendered = RenderedConversation(chat, conversation, text)
    assistants = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if len(marked) == len(assistants):
        owners = assistants
    elif alike and assistants and set(wanted) >= set(assistants):
        owners = [assistants[-1]] * len(marked)
    else:
        owners = rendered.messages_at(marked, assistants)
    spans: dict[int, list[Span]] = {number: [] for number in wanted}
    for owner, span in zip(owners, marked, strict=True):
        if owner in spans:
            spans[owner].append(span)
    others = rendered.spans([number for number in wanted if number not in assistants])
    return text, spans | {number: [span] for number, span in others.items()}


@dataclass(frozen=True)
class RenderedConversation:
    """A conversation and its text, in which messages are located by rendering it again."""

    chat: ChatTemplate
    conversation: Conversation
    text: str

    def spans(self, wanted: Sequence[int]) -> dict[int, Span]:
        """Return the characters that a model has to write for each wanted message."""
        spans = self._spans_at_once(wanted)
        for number in wanted:
            if number not in spans:
                start, stop = self._span_alone(number)
                _check_complete(number, self._messages[number], self.text[start:stop])
                spans[number] = start, stop
        return spans

    def messages_at(self, spans: list[Span], numbers: Sequence[int]) -> list[int]:
        """Return the message of each span: the last of `numbers` that starts before its end."""
        starts = {number: self._start_alone(number)[0] for number in numbers}
        return [
            max((n for n, start in starts.items() if start < stop), default=min(starts))
            for _, stop in spans
        ]

    @property
    def _messages(self) -> list[Message]:
        return self.conversation.messages

    @cached_property
    def _placeholder(self) -> str:
        return absent_from(self.text)

    def _render_first(self, number: int, *, generation_prompt: bool = False) -> str | None:
        """Return the text of the first `number` messages; None if the template refuses them."""
        first = self.conversation.with_messages(self._messages[:number])
        return self.chat.try_render(first, generation_prompt=generation_prompt)

    def _render_replaced(self, replaced: dict[int, Message]) -> str | None:
        messages = [replaced.get(number, m) for number, m in enumerate(self._messages)]
        return self.chat.try_render(self.conversation.with_messages(messages))

    # --- all at once ------------------------------------------------------------------------------

    def _spans_at_once(self, wanted: Sequence[int]) -> dict[int, Span]:
        """Return spans of plain messages, if nothing but their contents is between the pieces."""
        mark = self._placeholder
        plain = [number for number in wanted if _is_plain(self._messages[number])]
        marked = self._render_replaced({n: _with_text(self._messages[n], mark) for n in plain})
        pieces = (marked or "").split(mark)
        if len(pieces) != len(plain) + 1 or not self.text.startswith(pieces[0]):
            return {}
        spans, at = {}, len(pieces[0])
        for number, before, after in zip(plain, pieces, pieces[1:], strict=False):
            content = _text(self._messages[number]) or ""
            forms = (content, content.strip(), content.rstrip(), content.lstrip())
            size = next((len(f) for f in forms if self.text.startswith(f + after, at)), None)
            if size is None:
                return {}
            lead = self._lead(before, self._messages[number]["role"])
            if lead is not None:
                spans[number] = (at - len(lead), at + size + self.chat.stop_size(after))
            at += size + len(after)
        return spans if at == len(self.text) else {}

    def _lead(self, before: str, role: str) -> str | None:
        """Return the end of the piece `before` a content that a model writes; None if unknown."""
        if role != "assistant":
            return ""
        # With arguments, a template may choose another generation prompt.
        leads = [] if self.conversation.kwargs else [self.chat.around_answer[0]]
        prompt = self.chat.generation_prompt
        if prompt:
            leads.append("")
        return next((lead for lead in leads if before.endswith(prompt + lead)), None)

    # --- one by one -------------------------------------------------------------------------------

    def _span_alone(self, number: int) -> Span:
        start, after = self._start_alone(number)
        limit = self._next_content(number)
        stops = (
            len(self.text) - len(after) + self.chat.stop_size(after)
            if self.text.endswith(after)
            else None,
            self._end_of_first(number + 1),
        )
        stop = next((stop for stop in stops if stop is not None and start <= stop <= limit), None)
        if stop is None:
            raise ValueError(
                f"the chat template renders message {number} differently when more messages "
                "follow, so the place where the model has to stop is unknown; use a template with "
                "{% generation %}, or train_on='last_assistant' or 'all'"
            )
        return start, stop

    def _start_alone(self, number: int) -> tuple[int, str]:
        """Return where a message starts in the text, and the text after its content."""
        mark, role = self._placeholder, self._messages[number]["role"]
        # A template refuses this if a tool's message follows, since the tool call is replaced, too.
        # Then only the generation prompt can locate the message: the text holds no placeholder.
        alone = {"role": role, "content": self._messages[number].get("content")}
        marked = self._render_replaced({number: _with_text(alone, mark)})
        before, _, after = marked.partition(mark) if marked else (mark, mark, mark)
        start = self._start(number, before)
        if start is None:
            raise ValueError(
                "the chat template does not render its generation prompt before message "
                f"{number}, so the place where the model begins to write is unknown; use a "
                "template with {% generation %}, or train_on='all'"
            )
        return start, after

    def _start(self, number: int, before: str) -> int | None:
        """Return where the generation prompt of a message ends in the text."""
        is_answer = self._messages[number]["role"] == "assistant"
        if is_answer and number:
            prompt = self._render_first(number, generation_prompt=True)
            if prompt and self.text.startswith(prompt):
                return len(prompt)
        if not self.text.startswith(before):
            return None
        header = self.chat.generation_prompt if is_answer else ""  # other roles need none
        start = before.rindex(header) + len(header) if header in before else 0
        # Some templates continue the turn of the message before, whose header this then is.
        earlier = self._render_first(number) if number else None
        return start if start > common_prefix_length(earlier or "", self.text) else len(before)

    def _next_content(self, number: int) -> int:
        """Return where the content of the next message begins; it may be in the same turn."""
        following = number + 1
        if following == len(self._messages) or not _is_plain(self._messages[following]):
            return len(self.text)
        mark = self._placeholder
        marked = self._render_replaced({following: _with_text(self._messages[following], mark)})
        before = (marked or mark).partition(mark)[0]
        return len(before) if marked and self.text.startswith(before) else len(self.text)

    def _end_of_first(self, number: int) -> int | None:
        """Return where the first `number` messages end, if later ones do not change their text."""
        rendered = self._render_first(number)
        if not rendered or not self.text.startswith(rendered):
            return None
        stripped = rendered.rstrip()
        return len(stripped if stripped.endswith(self.chat.special_tokens) else rendered)


def _text(message: Message) -> str | None:
    """Return the content of a message that is a text, or a list of one text part; else None."""
    content = message.get("content")
    if isinstance(content, (list, tuple)) and len(content) == 1:
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content if isinstance(content, str) else None


def _with_text(message: Message, text: str) -> Message:
    """Return `message` with another text; a list stays a list, as some templates need it."""
    is_list = isinstance(message.get("content"), (list, tuple))
    return message | {"content": [{"type": "text", "text": text}] if is_list else text}


def _is_plain(message: Message) -> bool:
    content = _text(message)
    if not content or "</think>" in content:
        return False
    return not any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))


def _check_complete(number: int, message: Message, text: str) -> None:
    """Raise ValueError if `text` leaves out part of `message`."""
    missing = missing_part(message, text)
    if missing is not None:
        name, words = missing
        raise ValueError(
            f"the chat template leaves out the {name} of message {number} "
            f"({quote(words[:40])}), so the model would learn to leave it out. "
            "Use a template that keeps it or has {% generation %}, "
            "train_on='every_turn', which renders each turn as the last one, "
            "train_on='last_assistant' if it is kept there, or remove it from the data"
        )


def missing_part(message: Message, text: str) -> tuple[str, str] | None:
    """Return the name and the words of a part of `message` that `text` leaves out; None if none."""
    content = message.get("content")
    reasoning = {message[name] for name in REASONING_KEYS if isinstance(message.get(name), str)}
    parts = []
    for words in [content] if isinstance(content, str) else texts_of(content or ()):
        *thoughts, last = re.split(r"</?think>", words)
        parts.append(("content", last))
        reasoning |= set(thoughts[-1:])
    parts += [("reasoning", words) for words in reasoning]
    for call in message.get("tool_calls") or ():
        parts.append(("tool call", str((call.get("function") or call).get("name"))))
    # Each part needs a place of its own, long ones first: answers often repeat their reasoning.
    for name, words in sorted(parts, key=lambda part: -len(part[1])):
        before, found, after = text.partition(words.strip() or "\0")
        if words.strip() and not found:
            return name, words.strip()
        text = f"{before}\0{after}"
    return None
