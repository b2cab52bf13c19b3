"""The parts of a rendered conversation that a model has to write, message by message.

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

With `train_on="every_turn"`, a conversation is one document for each turn, as at inference:

    messages      user "Hi"   assistant (thinks) "Hello"   user "Why?"   assistant (thinks) "So."
    document 1    user "Hi"  [thinks "Hello" stop]
    document 2    user "Hi"   assistant "Hello"            user "Why?"  [thinks "So." stop]

A document is the generation prompt of the messages before a turn, then what the model writes, up to
the stop token; only this is trained. So a template may drop the reasoning of earlier turns: each
turn is rendered as the last message, where its reasoning is kept, after the history that the model
reads at inference. The text of the finished turn should begin with the generation prompt. If not:

    white space differs        the model writes what comes after the white space
    the history is rendered    the document has the history of the generation prompt, and the
    differently                template's text of the turn
    the template drops the     the model writes the content as it stands in the data, without the
    thoughts in a content,     words at its start that the generation prompt has written for it
    or thinks once more
    anything else              refused: the model would write something that the data do not hold
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trl.data_utils import common_prefix_length

from trl_packing.data.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    Conversation,
    Span,
    absent_from,
)
from trl_packing.data.messages import REASONING_KEYS, Message, texts_of
from trl_packing.data.printable import quote
from trl_packing.data.tokenize import Rendered


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
        """A character that the text does not have."""
        return absent_from(self.text)

    def first(self, number: int, *, generation_prompt: bool = False) -> str | None:
        """Return the text of the first `number` messages; None if the template refuses them."""
        first = self.conversation.with_messages(self.messages[:number])
        return self.chat.try_render(first, generation_prompt=generation_prompt)

    def with_marks(self, replaced: Mapping[int, Message]) -> str | None:
        """Return the text with `mark` as the content of these messages; None if refused."""
        messages = list(self.messages)
        for number, message in replaced.items():
            # A list stays a list, as some templates need it.
            is_list = isinstance(message.get("content"), (list, tuple))
            content = [{"type": "text", "text": self.mark}] if is_list else self.mark
            messages[number] = message | {"content": content}
        return self.chat.try_render(self.conversation.with_messages(messages))

    def around(self, number: int) -> tuple[str, str]:
        """Return the texts before and after the content of a message, had it nothing else.

        A template refuses this if a tool's message follows, since the tool call is replaced, too.
        Then they are the mark, which the text does not hold.
        """
        message = self.messages[number]
        plain = {"role": message["role"], "content": message.get("content")}
        marked = self.with_marks({number: plain})
        if not marked:
            return self.mark, self.mark
        before, _, after = marked.partition(self.mark)
        return before, after


# --- spans of one text ----------------------------------------------------------------------------


def trained_spans(
    chat: ChatTemplate, conversation: Conversation, weights: Mapping[int, float]
) -> tuple[str, list[tuple[int, int, float]]]:
    """Return the text of a conversation, and its trained characters with their weights.

    Args:
        chat: renders the conversation.
        conversation: messages without "train" and "weight".
        weights: the weight of each message that is trained, by its number.

    Raises:
        ValueError: the template leaves out part of a message, or a message cannot be located.
    """
    if chat.marks_generations:
        text, found = _marked_spans(chat, conversation, weights)
    else:
        text = chat.render(conversation)
        rendered = RenderedConversation(chat, conversation, text)
        found = {number: [span] for number, span in _spans(rendered, [*weights]).items()}
    return text, [(*span, weights[number]) for number in weights for span in found[number]]


def _marked_spans(
    chat: ChatTemplate, conversation: Conversation, weights: Mapping[int, float]
) -> tuple[str, dict[int, list[Span]]]:
    text, marked = chat.render_marked(conversation)
    rendered = RenderedConversation(chat, conversation, text)
    assistants = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
    if len(marked) == len(assistants):
        owners = assistants
    elif assistants and set(weights) >= set(assistants) and len(set(weights.values())) == 1:
        owners = [assistants[-1]] * len(marked)  # it does not matter which
    else:  # the last message that starts before the end of the span
        starts = {number: _start_and_after(rendered, number)[0] for number in assistants}
        owners = [
            max((n for n, start in starts.items() if start < stop), default=min(starts))
            for _, stop in marked
        ]
    spans: dict[int, list[Span]] = {number: [] for number in weights}
    for owner, span in zip(owners, marked, strict=True):
        if owner in spans:
            spans[owner].append(span)
    others = _spans(rendered, [number for number in weights if number not in assistants])
    return text, spans | {number: [span] for number, span in others.items()}


def _spans(rendered: RenderedConversation, wanted: Sequence[int]) -> dict[int, Span]:
    """Return the characters that a model has to write for each wanted message."""
    spans = _spans_at_once(rendered, [n for n in wanted if _is_plain(rendered.messages[n])])
    for number in wanted:
        if number in spans:
            continue
        start, stop = spans[number] = _span_alone(rendered, number)
        missing = missing_part(rendered.messages[number], rendered.text[start:stop])
        if missing is not None:
            name, words = missing
            raise ValueError(
                f"the chat template leaves out the {name} of message {number} "
                f"({quote(words[:40])}), so the model would learn to leave it out. "
                "Use a template that keeps it or has {% generation %}, "
                "train_on='every_turn', which renders each turn as the last one, "
                "train_on='last_assistant' if it is kept there, or remove it from the data"
            )
    return spans


def _spans_at_once(rendered: RenderedConversation, plain: Sequence[int]) -> dict[int, Span]:
    """Return spans of plain messages, if nothing but their contents is between the pieces."""
    chat, text, messages = rendered.chat, rendered.text, rendered.messages
    pieces = (rendered.with_marks({n: messages[n] for n in plain}) or "").split(rendered.mark)
    if len(pieces) != len(plain) + 1 or not text.startswith(pieces[0]):
        return {}
    # With arguments, a template may choose another generation prompt.
    leads = [] if rendered.conversation.kwargs else [chat.around_answer[0]]
    prompt = chat.generation_prompt
    if prompt:
        leads.append("")
    spans, at = {}, len(pieces[0])
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
        words = first.rstrip()
        stops.append(len(words if words.endswith(chat.special_tokens) else first))
    limit = _start_of_content(rendered, number + 1)
    stop = next((stop for stop in stops if start <= stop <= limit), None)
    if stop is None:
        raise ValueError(
            f"the chat template renders message {number} differently when more messages "
            "follow, so the place where the model has to stop is unknown; use a template with "
            "{% generation %}, or train_on='last_assistant' or 'all'"
        )
    return start, stop


def _start_and_after(rendered: RenderedConversation, number: int) -> tuple[int, str]:
    """Return where a message starts in the text, and the text after its content."""
    text = rendered.text
    before, after = rendered.around(number)
    is_answer = rendered.messages[number]["role"] == "assistant"
    if is_answer and number:
        prompt = rendered.first(number, generation_prompt=True)
        if prompt and text.startswith(prompt):
            return len(prompt), after
    if not text.startswith(before):
        raise ValueError(
            "the chat template does not render its generation prompt before message "
            f"{number}, so the place where the model begins to write is unknown; use a "
            "template with {% generation %}, or train_on='all'"
        )
    header = rendered.chat.generation_prompt if is_answer else ""  # other roles need none
    start = before.rindex(header) + len(header) if header in before else 0
    # Some templates continue the turn of the message before, whose header this then is.
    earlier = rendered.first(number) if number else None
    is_own = start > common_prefix_length(earlier or "", text)
    return start if is_own else len(before), after


def _start_of_content(rendered: RenderedConversation, number: int) -> int:
    """Return where the content of a message begins; it may be in the turn of the one before."""
    text = rendered.text
    if number < len(rendered.messages) and _is_plain(rendered.messages[number]):
        marked = rendered.with_marks({number: rendered.messages[number]}) or rendered.mark
        before = marked.partition(rendered.mark)[0]
        if before and text.startswith(before):
            return len(before)
    return len(text)


def _text(message: Message) -> str | None:
    """Return the content of a message that is a text, or a list of one text part; else None."""
    content = message.get("content")
    if isinstance(content, (list, tuple)) and len(content) == 1:
        content = content[0].get("text") if content[0].get("type") == "text" else None
    return content if isinstance(content, str) else None


def _is_plain(message: Message) -> bool:
    content = _text(message)
    if not content or "</think>" in content:
        return False
    return not any(message.get(key) for key in ("tool_calls", *REASONING_KEYS))


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


# --- every turn -----------------------------------------------------------------------------------


def render_every_turn(
    chat: ChatTemplate, conversation: Conversation, weights: Mapping[int, float]
) -> list[Rendered]:
    """Return one document for each trained message of a conversation, in order.

    Args:
        chat: renders the conversation.
        conversation: messages without "train" and "weight".
        weights: the weight of each message that is trained, by its number.

    Raises:
        ValueError: the message, and the way out, if it is not known what a model would write.
    """
    documents = []
    for number, weight in weights.items():
        if conversation.messages[number]["role"] != "assistant":
            raise ValueError(
                f"message {number} is trained but is not the assistant's: train_on='every_turn' "
                "trains what a model writes; take its 'train' out, or use train_on='assistant'"
            )
        turn = _Turn(chat, conversation.with_messages(conversation.messages[: number + 1]))
        written, trained = turn.written()
        size = len(turn.prompt)
        spans = [(size + start, size + stop, weight) for start, stop in trained]
        documents.append(
            Rendered(
                turn.prompt + written,
                spans,
                turn.prompt,
                adds_special_tokens=False,
                keeps_prompt_tokens=True,
            )
        )
    return documents


class _Turn:
    """The last message of a conversation, which the assistant writes.

    Attributes:
        prompt: the text that a model reads at inference before it writes the turn.
        text: that of the history and the finished turn.
        marked: parts of it that the template marks with ``{% generation %}``; None without marks.
    """

    def __init__(self, chat: ChatTemplate, conversation: Conversation):
        *history, self.message = conversation.messages
        self.chat, self.conversation, self.number = chat, conversation, len(history)
        if not history:
            raise ValueError(
                "message 0 is the assistant's, and a model cannot be asked to write without a "
                "message before; put a system message there, or set its 'train' to false"
            )
        self.marked: list[Span] | None = None
        words = "the messages before message"
        try:
            self.prompt = chat.render(conversation.with_messages(history), generation_prompt=True)
            words = "the conversation up to message"
            if chat.marks_generations:
                self.text, self.marked = chat.render_marked(conversation)
            else:
                self.text = chat.render(conversation)
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template cannot render {words} {self.number} ({error}), but "
                "train_on='every_turn' needs it; set 'train' of this message to false, or use "
                "another template"
            ) from error

    @cached_property
    def around(self) -> tuple[str, str]:
        """The texts before and after the content, had the turn nothing but a content."""
        return RenderedConversation(self.chat, self.conversation, self.text).around(self.number)

    def written(self) -> tuple[str, list[Span]]:
        """Return what the model writes after the generation prompt, and the trained parts of it.

        All of it is trained, unless the template marks parts with ``{% generation %}``.
        """
        start, reason = self._start(), None
        if start is not None:
            written, trained = self._rendered(start)
            reason = self._problem(written)
            if reason is None:
                return written, trained
        raw = self._raw()
        if raw is None:
            raise ValueError(reason or self._other_prompt())
        return raw, [(0, len(raw))]

    # --- the turn as the template renders it ------------------------------------------------------

    def _start(self) -> int | None:
        """Return where the model's part begins in the finished text; None if it is not known."""
        text, words = self.text, self.prompt.rstrip()
        if text.startswith(self.prompt):
            return len(self.prompt)
        if words and text.startswith(words):
            return len(text) - len(text[len(words) :].lstrip())
        # Where the history is rendered differently, the end of the generation prompt, from the
        # content of the last message on, must stand before the turn.
        content = self.conversation.messages[-2].get("content")
        content = content.strip() if isinstance(content, str) else ""
        if not content or content not in self.prompt:
            return None
        ending, before = self.prompt[self.prompt.rindex(content) :], self.around[0]
        if ending not in before:
            return None
        start = before.rindex(ending) + len(ending)
        is_known = before[start:] in ("", self.chat.around_answer[0])
        return start if is_known and text.startswith(before[:start]) else None

    def _rendered(self, start: int) -> tuple[str, list[Span]]:
        stop = self._stop(start)
        written = self.text[start:stop] + (self._stop_of_next() if stop is None else "")
        if self.marked is None:
            return written, [(0, len(written))]
        ends = [(max(a - start, 0), min(b - start, len(written))) for a, b in self.marked]
        inside = [(a, b) for a, b in ends if a < b]
        if not inside:
            raise ValueError(
                f"the chat template marks nothing of message {self.number} with "
                "{% generation %}, so nothing of it would be trained; set its 'train' to false, or "
                "correct the template"
            )
        return written, inside

    def _stop(self, start: int) -> int | None:
        """Return where the stop token of the turn ends; None if the template writes none."""
        after, content = self.chat.around_answer[1], self.message.get("content")
        size, end = self._stop_size(after), len(self.text) - len(after)
        if size and self.text.endswith(after) and end >= start:
            return end + size
        words = self.text.rstrip()
        if isinstance(content, str) and content.strip() and words.endswith(content.strip()):
            return None  # a special token there is one of the data
        is_stop = words.endswith(self.chat.special_tokens) and len(words) > start
        return len(words) if is_stop else None

    def _stop_size(self, after: str) -> int:
        """Return how many characters of `after` are the stop: one special token, or several.

        Of tokens that follow each other directly (Command A's end of a response and of a turn), the
        tokenizer's EOS is the last.
        """
        size, eos = self.chat.stop_size(after), self.chat.tokenizer.eos_token
        while size and not (eos and after[:size].endswith(eos)):
            following = (t for t in self.chat.special_tokens if t and after.startswith(t, size))
            token = next(following, None)
            if token is None:
                break
            size += len(token)
        return size

    def _stop_of_next(self) -> str:
        """Return the token with which the next turn begins, where this is how turns end (GLM)."""
        if not self.message.get("tool_calls"):
            return self.chat.start_of_user
        answer: Message = {"role": "tool", "content": "a"}
        both = self.conversation.with_messages([*self.conversation.messages, answer])
        text = self.chat.try_render(both) or ""
        return self.chat.first_token(text[len(self.text) :]) if text.startswith(self.text) else ""

    # --- the turn as it stands in the data --------------------------------------------------------

    def _raw(self) -> str | None:
        """Return the content and its stop, if the template fails only at thoughts at its start."""
        content, prompt, text = self.message.get("content"), self.prompt, self.text
        before, after = self.around
        if not isinstance(content, str) or not (before and after and "</" in content):
            return None
        if before.startswith(prompt):
            given = "".join(match[0] for match in _OPENED.finditer(prompt))
        elif prompt.startswith(before):
            given = prompt[len(before) :]
        else:
            return None
        shown = text[len(before) : len(text) - len(after)]
        if text != before + shown + after or not content.rstrip().endswith(shown.rstrip()):
            return None
        content = content if content.endswith(shown) else content.rstrip()
        if content.startswith(given):
            content = content[len(given) :]
        else:  # it may begin inside of the thoughts that the prompt has opened
            opening = re.fullmatch(r"\s*<(\w+)>\s*", given)
            if opening is None or f"<{opening[1]}>" in content:
                return None
            if f"</{opening[1]}>" not in content:
                return None
        written = content + after[: self._stop_size(after)]
        return written if missing_part(self.message, written) is None else None

    # --- refusals ---------------------------------------------------------------------------------

    def _problem(self, written: str) -> str | None:
        """Return why the rendered turn is not what a model should write; None if it is."""
        missing = missing_part(self.message, written)
        if missing is not None:
            name, words = missing
            return (
                f"the chat template leaves out the {name} of message {self.number} "
                f"({quote(words[:40])}) even where it is the last one, so the model would learn to "
                "leave it out; use a template that keeps it, remove it from the data, or write "
                "reasoning into the content as the model does (<think>…</think>)"
            )
        opened = _OPENED.search(self.prompt)
        if opened is not None and opened[0].strip() in written:
            return (
                f"the generation prompt ends in {quote(opened[0])}, and message {self.number} has "
                "it once more; put the reasoning at the start of its content, or under "
                "'reasoning_content'"
            )
        return None

    def _other_prompt(self) -> str:
        """Return why the prompt cannot be continued by the finished turn."""
        at = common_prefix_length(self.text, self.prompt)
        return (
            f"at inference the model reads {quote(self.prompt[at:][-40:])} at the end of its "
            f"prompt before message {self.number}, but the chat template writes "
            f"{quote(self.text[at : at + 40])} there in the finished turn, so no text of the data "
            "continues the prompt; give the message the reasoning that the prompt asks for, pass "
            "chat_template_kwargs that fit it (enable_thinking), set its 'train' to false, or use "
            "another template"
        )


# A prompt that opens the thoughts of the model.
_OPENED = re.compile(r"<(\w+)>\s*\Z")
