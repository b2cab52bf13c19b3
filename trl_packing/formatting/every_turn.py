"""A conversation → one document for each turn of the assistant, as the turn is made at inference.

    messages      user "Hi"   assistant (thinks) "Hello"   user "Why?"   assistant (thinks) "So."
    document 1    user "Hi"  [thinks "Hello" stop]
    document 2    user "Hi"   assistant "Hello"            user "Why?"  [thinks "So." stop]

A document is the generation prompt of the messages before a turn, then what the model writes, up to
the stop token; only this is trained. So a template may drop the reasoning of earlier turns: each
turn is rendered as the last message, where its reasoning is kept, after the history that the model
reads at inference.

The text of the finished turn should begin with the generation prompt. If it does not:

    white space differs        the model writes what comes after the white space
    the history is rendered    the document has the history of the generation prompt, and the
    differently                template's text of the turn
    the template drops the     the model writes the content as it stands in the data, without the
    thoughts in a content,     words at its start that the generation prompt has written for it
    or thinks once more
    anything else              refused: the model would write something that the data do not hold
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from trl.data_utils import common_prefix_length

from trl_packing.formatting.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    Conversation,
    Span,
    absent_from,
)
from trl_packing.formatting.message_spans import missing_part
from trl_packing.formatting.messages import Message
from trl_packing.formatting.printable import quote
from trl_packing.formatting.tokenize import Rendered

# --- the texts around a turn ----------------------------------------------------------------------


@dataclass(frozen=True)
class TurnTexts:
    """The texts of the last message of a conversation, each rendered once.

    Attributes:
        chat: renders the conversation.
        conversation: ends in the turn.
    """

    chat: ChatTemplate
    conversation: Conversation

    @property
    def number(self) -> int:
        """The number of the message."""
        return len(self.conversation.messages) - 1

    @property
    def message(self) -> Message:
        """The message itself."""
        return self.conversation.messages[-1]

    @cached_property
    def prompt(self) -> str:
        """The text that a model reads at inference before it writes the turn."""
        if not self.number:
            raise ValueError(
                "message 0 is the assistant's, and a model cannot be asked to write without a "
                "message before; put a system message there, or set its 'train' to false"
            )
        with self._names("the messages before message"):
            return self.chat.render(self.history, generation_prompt=True)

    @cached_property
    def finished(self) -> tuple[str, list[Span] | None]:
        """The text of the history and the turn, and its marks, if the template has any."""
        with self._names("the conversation up to message"):
            if self.chat.marks_generations:
                return self.chat.render_marked(self.conversation)
            return self.chat.render(self.conversation), None

    @cached_property
    def around(self) -> tuple[str, str]:
        """The texts before and after the content, had the turn nothing but a content."""
        mark = absent_from(self.finished[0])
        answer: Message = {"role": "assistant", "content": mark}
        conversation = self.conversation.with_messages([*self.history.messages, answer])
        before, _, after = (self.chat.try_render(conversation) or "").partition(mark)
        return before, after

    @property
    def history(self) -> Conversation:
        """The messages before it."""
        return self.conversation.with_messages(self.conversation.messages[:-1])

    @contextmanager
    def _names(self, words: str) -> Iterator[None]:
        """Name the message in errors of the template."""
        try:
            yield
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template cannot render {words} {self.number} ({error}), but "
                "train_on='every_turn' needs it; set 'train' of this message to false, or use "
                "another template"
            ) from error

    def stop_size(self, after: str) -> int:
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

    def stop_of_next(self) -> str:
        """Return the token with which the next turn begins, where this is how turns end (GLM)."""
        if not self.message.get("tool_calls"):
            return self.chat.start_of_user
        text = self.finished[0]
        answer: Message = {"role": "tool", "content": "a"}
        both = self.conversation.with_messages([*self.conversation.messages, answer])
        rendered = self.chat.try_render(both) or ""
        return self.chat.first_token(rendered[len(text) :]) if rendered.startswith(text) else ""


# --- the turn -------------------------------------------------------------------------------------


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
        first = conversation.with_messages(conversation.messages[: number + 1])
        documents.append(Turn(TurnTexts(chat, first)).document(weight))
    return documents


@dataclass(frozen=True)
class Turn:
    """The last message of a conversation, which the assistant writes."""

    texts: TurnTexts

    def document(self, weight: float) -> Rendered:
        """Return the generation prompt and what the model writes, trained with `weight`."""
        written, marked = self.written()
        prompt = self.texts.prompt
        size = len(prompt)
        spans = [(size + start, size + stop, weight) for start, stop in marked]
        return Rendered(
            prompt + written,
            spans,
            prompt,
            adds_special_tokens=False,
            keeps_prompt_tokens=True,
        )

    def written(self) -> tuple[str, list[Span]]:
        """Return what the model writes after the generation prompt, and the trained parts of it.

        All of it is trained, unless the template marks parts with ``{% generation %}``.
        """
        start, reason = self._start(), None
        if start is not None:
            written, marked = self._rendered(start)
            reason = self._problem(written)
            if reason is None:
                return written, marked
        raw = self._raw()
        if raw is None:
            raise ValueError(reason or self._other_prompt())
        return raw, [(0, len(raw))]

    # --- the turn as the template renders it ------------------------------------------------------

    def _start(self) -> int | None:
        """Return where the model's part begins in the finished text; None if it is not known."""
        text, prompt = self.texts.finished[0], self.texts.prompt
        if text.startswith(prompt):
            return len(prompt)
        words = prompt.rstrip()
        if words and text.startswith(words):
            rest = text[len(words) :]
            return len(text) - len(rest.lstrip())
        return self._start_in_other_history()

    def _start_in_other_history(self) -> int | None:
        """Return where the turn begins if the template renders the messages before differently.

        The end of the generation prompt, from the content of the last message on, must stand there.
        """
        content, prompt = self.texts.history.messages[-1].get("content"), self.texts.prompt
        content = content.strip() if isinstance(content, str) else ""
        if not content or content not in prompt:
            return None
        ending = prompt[prompt.rindex(content) :]
        before = self.texts.around[0]
        if ending not in before:
            return None
        start = before.rindex(ending) + len(ending)
        is_known = before[start:] in ("", self.texts.chat.around_answer[0])
        return start if is_known and self.texts.finished[0].startswith(before[:start]) else None

    def _rendered(self, start: int) -> tuple[str, list[Span]]:
        text, marked = self.texts.finished
        stop = self._stop(start)
        written = text[start:] + self.texts.stop_of_next() if stop is None else text[start:stop]
        if marked is None:
            return written, [(0, len(written))]
        ends = [(max(a - start, 0), min(b - start, len(written))) for a, b in marked]
        inside = [(a, b) for a, b in ends if a < b]
        if not inside:
            raise ValueError(
                f"the chat template marks nothing of message {self.texts.number} with "
                "{% generation %}, so nothing of it would be trained; set its 'train' to false, or "
                "correct the template"
            )
        return written, inside

    def _stop(self, start: int) -> int | None:
        """Return where the stop token of the turn ends; None if the template writes none."""
        text, after = self.texts.finished[0], self.texts.chat.around_answer[1]
        size = self.texts.stop_size(after)
        if size and text.endswith(after) and len(text) - len(after) >= start:
            return len(text) - len(after) + size
        words, content = text.rstrip(), self.texts.message.get("content")
        if isinstance(content, str) and content.strip() and words.endswith(content.strip()):
            return None  # a special token there is one of the data
        is_stop = words.endswith(self.texts.chat.special_tokens) and len(words) > start
        return len(words) if is_stop else None

    # --- the turn as it stands in the data --------------------------------------------------------

    def _raw(self) -> str | None:
        """Return the content and its stop, if the template fails only at thoughts at its start."""
        content, prompt = self.texts.message.get("content"), self.texts.prompt
        text, (before, after) = self.texts.finished[0], self.texts.around
        if not isinstance(content, str) or not (before and after and "</" in content):
            return None
        given = prompt[common_prefix_length(before, prompt) :]
        if before.startswith(prompt):
            given = "".join(match[0] for match in _OPENED.finditer(prompt))
        elif not prompt.startswith(before):
            return None
        if not text.startswith(before) or not text.endswith(after):
            return None
        shown = text[len(before) : len(text) - len(after)]
        if not content.rstrip().endswith(shown.rstrip()):
            return None
        content = content if content.endswith(shown) else content.rstrip()
        written = _after(given, content)
        if written is None:
            return None
        written += after[: self.texts.stop_size(after)]
        return written if missing_part(self.texts.message, written) is None else None

    # --- refusals ---------------------------------------------------------------------------------

    def _problem(self, written: str) -> str | None:
        """Return why the rendered turn is not what a model should write; None if it is."""
        missing, number = missing_part(self.texts.message, written), self.texts.number
        if missing is not None:
            name, words = missing
            return (
                f"the chat template leaves out the {name} of message {number} "
                f"({quote(words[:40])}) even where it is the last one, so the model would learn to "
                "leave it out; use a template that keeps it, remove it from the data, or write "
                "reasoning into the content as the model does (<think>…</think>)"
            )
        opened = _OPENED.search(self.texts.prompt)
        if opened is not None and opened[0].strip() in written:
            return (
                f"the generation prompt ends in {quote(opened[0])}, and message {number} has it "
                "once more; put the reasoning at the start of its content, or under "
                "'reasoning_content'"
            )
        return None

    def _other_prompt(self) -> str:
        """Return why the prompt cannot be continued by the finished turn."""
        text, prompt = self.texts.finished[0], self.texts.prompt
        at = common_prefix_length(text, prompt)
        return (
            f"at inference the model reads {quote(prompt[at:][-40:])} at the end of its prompt "
            f"before message {self.texts.number}, but the chat template writes "
            f"{quote(text[at : at + 40])} there in the finished turn, so no text of the data "
            "continues the prompt; give the message the reasoning that the prompt asks for, pass "
            "chat_template_kwargs that fit it (enable_thinking), set its 'train' to false, or use "
            "another template"
        )


# A prompt that opens the thoughts of the model.
_OPENED = re.compile(r"<(\w+)>\s*\Z")


def _after(given: str, content: str) -> str | None:
    """Return what a model writes of `content` if its prompt ends in `given`; None if unknown.

    Examples:
        >>> _after("<think>\\n", "<think>\\nHm\\n</think>\\n\\nSo.")
        'Hm\\n</think>\\n\\nSo.'
        >>> _after("<think>\\n", "Hm\\n</think>\\n\\nSo.")
        'Hm\\n</think>\\n\\nSo.'
    """
    if content.startswith(given):
        return content[len(given) :]
    opening = re.fullmatch(r"\s*<(\w+)>\s*", given)
    if opening is None or f"<{opening[1]}>" in content or f"</{opening[1]}>" not in content:
        return None
    return content
