"""The texts around a turn of the assistant, as the chat template renders them.

    prompt      user "Hi" [assistant             the model reads this at inference
    finished    user "Hi" [assistant "Hello" ]   the history and the turn
    around      user "Hi" [assistant  …  ]       before and after the content

`every_turn.py` makes a document of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from trl_packing.formatting.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    Conversation,
    Span,
    absent_from,
)
from trl_packing.formatting.messages import Message


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
