"""Rows of every form → text, and the characters of it that are trained.

    row                                         trained
    {"text": …}                                 all; with a response template, what answers it
    {"prompt": …, "completion": …}              the completion
    {"query": …, "response": …}                 the response, after a prompt template
    {"messages": [user, assistant, …]}          all (TRL); with `train_on`, the assistant's turns
    {"prompt": [user], "completion": […]}       the completion; with `train_on`, its turns

A row is one document; with `train_on="every_turn"`, one for each turn (`turns.py`).
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from trl.data_utils import common_prefix_length

from trl_packing.data.chat_template import TEMPLATE_ERRORS, ChatTemplate, Conversation
from trl_packing.data.counts import FIRST, NO_REASONING, NO_WORDS, TURN
from trl_packing.data.left_out import check_thoughts, in_words, left_out, parts_of
from trl_packing.data.messages import (
    Row,
    check_messages,
    has_flag,
    is_sharegpt,
    messages_from_sharegpt,
    tools_from_value,
    trained_messages,
    with_arguments,
    without_flags,
)
from trl_packing.data.printable import in_short
from trl_packing.data.responses import ResponseTemplate
from trl_packing.data.spans import Rendered, Tokenized, WeightedSpan
from trl_packing.data.turns import render_every_turn, trained_spans

# Columns of data sets of other projects that hold a part of the conversation.
BESIDE = ("system", "system_prompt", "history", "tools", "functions", "documents")

# Messages as a CSV file stores them: JSON, or Python's own notation.
_TEXT_OF_MESSAGES = re.compile(r"""\s*\[\s*{\s*["'](role|content)["']\s*:""")


def one_text_each(formatting_func: Any, first: Row) -> Any:
    """Return a user's function from a row to its text, also of one that takes a batch of rows."""
    if formatting_func is None:
        return None

    def of_batch(row: Row) -> Any:
        texts = formatting_func({name: [value] for name, value in row.items()})
        return texts[0] if len(texts) == 1 else texts

    for function in (formatting_func, of_batch):
        with suppress(Exception):  # it may take the other kind
            if isinstance(function(first), str):
                return function
    return formatting_func


_TASK = "Below is an instruction that describes a task"
_REQUEST = (
    "Write a response that appropriately completes the request.\n\n### Instruction:\n{query}\n\n"
)
_CONTEXT = ", paired with an input that provides further context. "

# name -> template, template for rows with a non-empty "input" (tatsu-lab/stanford_alpaca)
NAMED: dict[str, tuple[str, str | None]] = {
    "alpaca": (
        f"{_TASK}. {_REQUEST}### Response:\n",
        f"{_TASK}{_CONTEXT}{_REQUEST}### Input:\n{{input}}\n\n### Response:\n",
    ),
    "qa": ("Question: {query}\nAnswer:\n", None),
}

# Columns of questions and of answers: the only one of them is taken where the first is missing.
_STANDS_FOR = {
    "query": ("instruction", "question"),
    "response": ("output", "answer", "completion"),
}


# A brace that is written twice, or the name of a column: "q.text", "q[0]", "the question".
_BRACES = re.compile(r"{{|}}|{([^{}]*)}")


@dataclass(frozen=True)
class PromptTemplate:
    """A prompt with names of columns in braces; {query} stands for `query_field`.

    Rows with a non-empty "input" may have a template of their own.
    """

    template: str
    with_input: str | None = None
    query_field: str = "query"

    @classmethod
    def from_setting(cls, given: str, query_field: str = "query") -> "PromptTemplate":
        """Return the template of a name, of a file, or of the text itself. May raise ValueError."""
        if given in NAMED:
            return cls(*NAMED[given], query_field)
        text = given.replace("\\n", "\n")  # a shell passes a line break as two characters
        if "{" not in given and os.path.isfile(given):
            text = Path(given).read_text(encoding="utf-8")
        template = cls(text, None, query_field)
        if not template.fields or "" in template.fields:
            why = f"has no columns in braces, and is no file or {[*NAMED]}"
            raise ValueError(f"prompt_template={given!r} {why}")
        return template

    @property
    def fields(self) -> list[str]:
        """The columns that the template needs, with {query} as `query_field`."""
        names = [found[1] for found in _BRACES.finditer(self.template) if found[1] is not None]
        return [self.query_field if name == "query" else name for name in names]

    def prompt(self, row: Row) -> str:
        """Return the prompt of a row. Raises ValueError for a missing column."""

        def written(found: re.Match[str]) -> str:
            if found[1] is None:
                return found[0][0]
            return str(value_of(row, self.query_field if found[1] == "query" else found[1]))

        template = self.with_input if self.with_input and row.get("input") else self.template
        return _BRACES.sub(written, template)


def column_among(columns: Iterable[str], name: str) -> str:
    """Return the column that "query" or "response" stands for; any other name is a column."""
    found = [other for other in _STANDS_FOR.get(name, ()) if other in columns]
    if name in columns or not found:
        return name
    if len(found) > 1:
        raise ValueError(f"prompt_template reads one of the columns {found}; rename it {name!r}")
    return found[0]


def value_of(row: Row, column: str) -> Any:
    """Return a field of a prompt template. Raises ValueError if it is missing or null."""
    column = column_among(row, column)
    if row.get(column) is None:
        has = f"it has {sorted(row)}" if column not in row else "it is null"
        raise ValueError(f"no value in the column {column!r} ({has})")
    return row[column]


@dataclass(frozen=True)
class RowFormat:
    """Rules that turn a row of any form into text and decide which of its tokens are trained.

    Attributes:
        chat: chat template of the run.
        eos_token: ends texts and completions that do not end in it.
        text_field: column of plain text.
        completion_only: prompts of prompt-completion rows are not trained.
        assistant_only: only what the chat template marks with ``{% generation %}`` is trained.
        train_on: None for TRL's meaning, or one of `config.TRAIN_ON`.
        flags_decide: without `train_on`, train the assistant if messages have "train" or "weight".
        answers: response (and instruction) template of texts and rendered conversations.
        prompt_template: for rows with raw fields; `response_field` is the column of the answer.
        trains_prompts: prompts made by the prompt template are trained too.
        formatting_func: the user's function from a row to its text.
        calls_tools: whether the chat template renders tool calls.
    """

    chat: ChatTemplate
    eos_token: str | None
    text_field: str = "text"
    completion_only: bool = True
    assistant_only: bool = False
    train_on: str | None = None
    flags_decide: bool = False
    answers: ResponseTemplate | None = None
    prompt_template: PromptTemplate | None = None
    response_field: str = "response"
    trains_prompts: bool = False
    formatting_func: Callable[[Row], str] | None = None
    calls_tools: bool = False

    @property
    def makes_turns(self) -> bool:
        """Whether a row is one document for each turn of the assistant."""
        return self.train_on == "every_turn"

    def form(self, row: Row) -> str:
        """Return "text", "prompt", "messages", "prompt messages" or "fields"."""
        if self.formatting_func is not None:
            return "text"
        if self.prompt_template is not None:
            return "fields"
        messages = _name_of_messages(row)
        prompt = row.get("prompt")
        # Rows of a mixed stream have nulls in the columns of other forms. A prompt beside a whole
        # conversation repeats its beginning (ultrachat_200k).
        if prompt is not None and (messages is None or row.get("completion") is not None):
            if isinstance(prompt, list):
                return "prompt messages"
            pair = ("prompt", "completion")
            if not all(_TEXT_OF_MESSAGES.match(str(row.get(name))) for name in pair):
                return "prompt"
        elif messages is not None:
            return "messages"
        elif row.get(self.text_field) is not None:
            return "text"
        contents = ", ".join(f"{column!r} is {in_short(row[column])}" for column in sorted(row))
        parse = "parse text that is JSON with json.loads, and Python with ast.literal_eval"
        raise ValueError(f"nothing to train on: {contents}; {parse}")

    def check(self, row: Row) -> None:
        """Raise ValueError if a setting cannot be used with this form of row."""
        form = self.form(row)
        conversational = form.endswith("messages")
        if conversational and not self.chat.exists:
            raise ValueError("the tokenizer has no chat template; set chat_template_path")
        if self.train_on not in (None, "all") and not conversational:
            raise ValueError(f"train_on={self.train_on!r} is about messages, but it holds {form}")
        if self.answers is not None and form not in ("text", "messages"):
            raise ValueError(f"it holds {form}; leave response_template out")
        if not conversational and self.eos_token is None:
            raise ValueError("the tokenizer has no eos_token; set eos_token in the config")

    def unread(self, row: Row) -> list[str]:
        """Return columns of a row that look like parts of a conversation, and are not read."""
        form = self.form(row)
        if form == "text":
            return []
        read = ["tools"] if form.endswith("messages") else []
        if self.prompt_template is not None:
            read = self.prompt_template.fields
        return [name for name in BESIDE if name in row and name not in read]

    def lacks(self, row: Row) -> str:
        """Return what the chat template does not render of the tools of a row; "" if nothing."""
        if not row.get("tools") or not self.form(row).endswith("messages"):
            return ""
        if not self.calls_tools:
            return "tool calls"
        template = self.chat.tokenizer.get_chat_template(self.chat.override, row["tools"])
        return "" if "tools" in template else "tools"

    def documents(self, row: Row, form: str) -> list[Rendered]:
        """Return the texts of a row of that form, with `train_on="every_turn"` one for each turn.

        A conversation without a trained turn is one document, of which nothing is trained.
        """
        found = self.form(row)
        if found != form:
            raise ValueError(f"it holds {found}, but the first row {form}; use one form")
        if form.endswith("messages"):
            return self._conversation(row, form)
        if form == "text":
            return [self._text(row)]
        if self.prompt_template is not None:
            prompt = self.prompt_template.prompt(row)
            completion = str(value_of(row, self.response_field))
            masks_prompt = not self.trains_prompts
        else:
            prompt = _string(row.get("prompt"), "its 'prompt'")
            completion = _string(row.get("completion"), "its 'completion'")
            masks_prompt = self.completion_only
        masked = prompt if masks_prompt and self.train_on != "all" else None
        return [Rendered(prompt + self._ended(completion), prompt=masked)]

    def _text(self, row: Row) -> Rendered:
        if self.formatting_func is None:
            text = _string(row.get(self.text_field), f"its {self.text_field!r}")
        else:
            text = _string(self.formatting_func(row), "the result of formatting_func")
        is_whole = self._is_rendered(text, row)
        text = text if is_whole else self._ended(text)
        return self._by_template(text, None, adds_special_tokens=not is_whole)

    def _is_rendered(self, text: str, row: Row) -> bool:
        """Whether a function has made the row's messages as the template writes them, complete."""
        if self.formatting_func is None or not row.get("messages") or not self.chat.exists:
            return False
        with suppress(ValueError, *TEMPLATE_ERRORS):  # it reads messages in another form
            whole = self._messages(row, "messages").conversation
            return text in map(self.chat.try_render, (whole, Conversation(whole.messages)))
        return False

    def _ended(self, text: str) -> str:
        eos_token = self.eos_token or ""
        return text if text.endswith(eos_token) else text + eos_token

    def _by_template(self, text: str, prompt: str | None, *, adds_special_tokens: bool) -> Rendered:
        """Return a document of which all is trained, or what answers the response template."""
        if self.answers is None:
            return Rendered(text, None, prompt, adds_special_tokens=adds_special_tokens)
        found = self.answers.answers(text) or ()
        spans = [(start, stop, 1.0) for start, stop in found]
        ends = [start for start, _ in found]
        return Rendered(text, spans, prompt, True, adds_special_tokens, prompt_ends=ends)

    def _conversation(self, row: Row, form: str) -> list[Rendered]:
        messages, size, conversation, handled = self._messages(row, form)
        weights = None
        if self.train_on in ("assistant", "last_assistant", "every_turn"):
            weights = trained_messages(messages, self.train_on, first=size)
        elif self.train_on is None and self.flags_decide and any(map(has_flag, messages)):
            raise ValueError(  # of a stream
                "a message has 'train' or 'weight', unlike those of the first row; set train_on="
                "'assistant', where it counts, or 'all'"
            )
        if len(messages) == size or (self.makes_turns and not weights):  # dropped and counted later
            text = (self.chat.try_render(conversation) if messages else "") or ""
            bits = FIRST if self.makes_turns else 0
            return [Rendered(text, [], adds_special_tokens=False, handled=bits)]
        if weights is None:
            documents = [self._as_trl(conversation, size)]
        elif self.makes_turns:
            documents = render_every_turn(self.chat, conversation, weights)
            conversation = conversation.of(conversation.messages[: max(weights) + 1])
        else:
            text, spans = trained_spans(self.chat, conversation, weights)
            documents = [self._by_spans(text, spans)]
        first = size if self.completion_only and self.train_on is None else 0
        handled |= self._left_out(conversation, documents[-1].text, weights, first)
        return self._marked(documents, handled)

    def _marked(self, documents: list[Rendered], handled: int) -> list[Rendered]:
        """Return documents with the bits of the column `HANDLED`."""
        if self.makes_turns:
            handled |= TURN
            documents[0] = replace(documents[0], handled=FIRST)
        if not handled:
            return documents
        return [replace(each, handled=each.handled | handled) for each in documents]

    def _by_spans(
        self, text: str, spans: Sequence[WeightedSpan], prompt: str | None = None
    ) -> Rendered:
        """Return a conversation of which these characters are trained."""
        ends = self.chat.prompt_ends(text, [start for start, *_ in spans])
        return Rendered(text, spans, prompt, False, False, prompt_ends=ends)

    def _as_trl(self, conversation: Conversation, size: int) -> Rendered:
        """Return a conversation as TRL trains it; its first `size` messages are the prompt."""
        first = untrained = None
        as_trl = self.train_on is None
        if size and self.completion_only and as_trl:
            first = conversation.of(conversation.messages[:size])
            untrained = self.chat.render(first, generation_prompt=True)
        if self.assistant_only and as_trl:
            text, marked = self.chat.render_marked(conversation)
            if not marked:
                why = "it has no assistant message that the template marks by {% generation %}"
                raise RuntimeError(f"assistant_only_loss=True, but {why}")
            spans = [(*span, 1.0) for span in marked]
            return self._by_spans(text, spans, untrained)
        text = self.chat.render(conversation)
        if conversation.sanitizes:
            ids = self.chat.sanitized_ids(conversation)
            prompt = []
            if first is not None:
                prompt = self.chat.sanitized_ids(first, generation_prompt=True)
            end = common_prefix_length(prompt, ids)
            weights = np.ones(len(ids), np.float32)
            weights[:end] = 0
            tokens = Tokenized(ids, weights, prompt[end:])
            return Rendered(text, adds_special_tokens=False, tokens=tokens)
        return self._by_template(text, untrained, adds_special_tokens=False)

    def _left_out(
        self,
        conversation: Conversation,
        text: str,
        weights: Mapping[int, float] | None,
        first: int,
    ) -> int:
        """Return bits for what the template leaves out; ValueError for what a run cannot lose.

        `weights` are those of the trained messages; None trains all from `first`, as TRL does.
        """
        if not self.makes_turns:
            check_thoughts(conversation.messages, text)
        missing = left_out(self.chat, conversation, text)
        handled = 0
        for part in missing:
            number = part.number
            is_trained = number >= first if weights is None else number in weights
            if part.name == "reasoning" and (self.makes_turns or not is_trained):
                continue  # a turn was compared alone, and prompts have none at inference
            parts = parts_of(conversation.messages[number], number)
            is_whole = all(each in missing for each in parts)
            if is_whole or part.name == "tool call" or (is_trained and weights is not None):
                raise ValueError(in_words(part, conversation.messages))
            handled |= NO_REASONING if part.name == "reasoning" else NO_WORDS
        return handled

    def _messages(self, row: Row, form: str) -> "_Messages":
        names = ["prompt", "completion"]
        if form == "messages":
            names = [_name_of_messages(row) or "messages"]
        given: list[Any] = []
        size = 0
        sharegpt = False
        for name in names:
            messages: Any = row.get(name)
            if is_sharegpt(messages):
                sharegpt = True
                messages = messages_from_sharegpt(messages, tool_calls=self.calls_tools)
            if messages != [] or name == "prompt":
                check_messages(messages, self.chat.source, what=name)
            size = len(given)
            given += messages
        tools = tools_from_value(row.get("tools"), sharegpt=sharegpt)
        kwargs = dict(row.get("chat_template_kwargs") or {})
        sanitizes = bool(kwargs.pop("sanitize_control_tokens", False))
        by_text = self.answers is not None or self.train_on in ("assistant", "last_assistant")
        if sanitizes and (by_text or self.makes_turns or self.assistant_only):
            raise ValueError(
                "sanitize_control_tokens=True in its 'chat_template_kwargs' makes tokens without "
                "places in the text, so no answer is found in them; leave it out, or train all"
            )
        handled = 0
        messages = without_flags(given)
        if any(message.get("tool_calls") for message in messages):
            form_of_arguments = self.chat.forms_of_arguments[tools is not None]
            messages, handled = with_arguments(messages, form_of_arguments)
        return _Messages(given, size, Conversation(messages, tools, kwargs, sanitizes), handled)


class _Messages(NamedTuple):
    """The messages of a row as they are given, and as a chat template reads them."""

    given: list[Any]
    size: int  # messages of the prompt
    conversation: Conversation
    handled: int  # bits of `counts.HANDLED`


def _name_of_messages(row: Row) -> str | None:
    """Return the column that holds the whole conversation of a row, or None."""
    names = ("messages", "conversations")
    return next((name for name in names if isinstance(row.get(name), list)), None)


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {in_short(value)}; make it a string")
    return value
