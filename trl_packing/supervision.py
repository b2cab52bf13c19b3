"""Which tokens of a row are trained: every form of row → text, and the characters that count.

    row                                         trained
    {"text": …}                                 all; with a response template, what answers it
    {"prompt": …, "completion": …}              the completion
    {"query": …, "response": …}                 the response, after a prompt template
    {"messages": [user, assistant, …]}          all (TRL); with `train_on`, the assistant's turns
    {"prompt": [user], "completion": […]}       the completion; with `train_on`, its turns

Without `train_on` and the templates it is TRL's meaning, token by token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trl_packing.conversations import (
    check_messages,
    is_sharegpt,
    messages_from_sharegpt,
    tools_of,
    trained_messages,
    without_flags,
)
from trl_packing.printable import quote
from trl_packing.prompt_templates import PromptTemplate, field_of
from trl_packing.templates import Templates
from trl_packing.tokenization import Rendered
from trl_packing.turns import ChatTemplate, Context

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Supervision:
    """What the settings of a run say about which tokens are trained.

    completion_only, assistant_only, text_field: as TRL's config has them.
    train_on: None, for TRL's meaning, or one of `config.TRAIN_ON`.
    answers: response (and instruction) templates to look for in texts and rendered conversations.
    prompt_template, response_field: for rows with raw fields.
    calls_tools: whether the chat template renders tool calls.
    """

    chat: ChatTemplate
    eos_token: str | None
    text_field: str = "text"
    completion_only: bool = True
    assistant_only: bool = False
    train_on: str | None = None
    answers: Templates | None = None
    prompt_template: PromptTemplate | None = None
    response_field: str = "response"
    formatting_func: Callable[[Row], str] | None = None
    calls_tools: bool = False

    def form(self, row: Row) -> str:
        """Return what kind of row it is.

        "text", "prompt", "messages", "prompt messages" or "fields". Raises ValueError for none.
        """
        if self.formatting_func is not None:
            return "text"
        if self.prompt_template is not None:
            return "fields"
        messages = _name_of_messages(row)
        # A stream of mixed rows fills them up with nulls; a prompt beside a whole conversation
        # repeats its beginning (ultrachat_200k).
        if row.get("prompt") is not None and (
            messages is None or row.get("completion") is not None
        ):
            return "prompt messages" if isinstance(row["prompt"], list) else "prompt"
        if messages is not None:
            return "messages"
        if row.get(self.text_field) is not None:
            return "text"
        raise ValueError(f"it has nothing to train on: {_contents(row)}")

    def check(self, row: Row) -> None:
        """Raise ValueError if a setting does not go with this kind of row."""
        form = self.form(row)
        conversational = form.endswith("messages")
        if conversational and not self.chat.exists:
            raise ValueError(
                "it holds conversations, but the tokenizer has no chat template; set "
                "chat_template_path='...' in the config, or tokenizer.chat_template"
            )
        if self.train_on not in (None, "all") and not conversational:
            raise ValueError(
                f"train_on={self.train_on!r} is about messages, but it holds {_WORDS[form]}; leave "
                "train_on out, or name a response_template for plain text"
            )
        if self.answers is not None and form not in ("text", "messages"):
            raise ValueError(
                f"response_template is for texts and conversations, but it holds {_WORDS[form]}; "
                "leave it out: the completion is trained"
            )
        if not conversational and self.eos_token is None:
            raise ValueError(
                "the tokenizer has no eos_token, so its documents would not end; set "
                "eos_token='...' in the config, or tokenizer.eos_token"
            )

    def render(self, row: Row, form: str) -> Rendered:
        """Return the text of a row of that form. Raises ValueError for what is wrong with it."""
        if self.form(row) != form:
            raise ValueError(
                f"it holds {_WORDS[self.form(row)]}, but the first row {_WORDS[form]}; a data set "
                "must be of one form"
            )
        if form == "text":
            return self._text(row)
        if form.endswith("messages"):
            return self._conversation(row)
        return self._prompt_completion(row)

    # --- text -------------------------------------------------------------------------------------

    def _text(self, row: Row) -> Rendered:
        if self.formatting_func is not None:
            text = self.formatting_func(row)
            if not isinstance(text, str):
                raise ValueError(f"formatting_func returned {type(text).__name__}, not a string")
        else:
            text = _string(row, self.text_field)
        text = self._ended(text)
        return Rendered(text, self._answers(text), only_whole=True)

    def _prompt_completion(self, row: Row) -> Rendered:
        if self.prompt_template is not None:
            prompt = self.prompt_template.prompt(row)
            completion = field_of(row, self.response_field)
        else:
            prompt, completion = _string(row, "prompt"), _string(row, "completion")
        text = prompt + self._ended(completion)
        masks_prompt = self.completion_only and self.train_on != "all"
        return Rendered(text, prompt=prompt if masks_prompt else None)

    def _ended(self, text: str) -> str:
        eos_token = self.eos_token or ""
        return text if text.endswith(eos_token) else text + eos_token

    def _answers(self, text: str) -> list[tuple[int, int, float]] | None:
        if self.answers is None:
            return None
        return [(start, stop, 1.0) for start, stop in self.answers.answers(text) or ()]

    # --- conversations ----------------------------------------------------------------------------

    def _conversation(self, row: Row) -> Rendered:
        prompt, completion, context = self._messages(row)
        if not completion:  # nothing to train: dropped, and counted, with other such documents
            text = self.chat.render(without_flags(prompt), context) if prompt else ""
            return Rendered(text, [], adds_special_tokens=False)
        if self.train_on in ("assistant", "last_assistant"):
            weights = trained_messages([*prompt, *completion], self.train_on, first=len(prompt))
            messages = without_flags([*prompt, *completion])
            alike = len(set(weights.values())) < 2
            text, turns = self.chat.turns(messages, context, list(weights), alike=alike)
            spans = [(*span, weights[number]) for number in weights for span in turns[number]]
            return Rendered(text, spans, adds_special_tokens=False)
        prompt, messages = without_flags(prompt), without_flags([*prompt, *completion])
        if self.assistant_only and self.train_on is None:
            text, marked = self.chat.render_marked(messages, context)
            if not marked:
                raise RuntimeError(
                    "assistant_only_loss=True, but it has no assistant tokens: it has no assistant "
                    "message, or the chat template marks none with {% generation %}"
                )
            return self._after(prompt, context, Rendered(text, [(*span, 1.0) for span in marked]))
        text = self.chat.render(messages, context)
        rendered = Rendered(text, self._answers(text), only_whole=self.answers is not None)
        return self._after(prompt, context, rendered)

    def _after(self, prompt: list[Any], context: Context, rendered: Rendered) -> Rendered:
        """Return `rendered` with its prompt, if that is not trained."""
        text = None
        if prompt and self.completion_only and self.train_on is None:
            text = self.chat.render(prompt, context, generation_prompt=True)
        return replace(rendered, prompt=text, adds_special_tokens=False)

    def _messages(self, row: Row) -> tuple[list[Any], list[Any], Context]:
        """Return the messages of the prompt, those after it, and what the template gets beside."""
        names: tuple[str, ...] = ("prompt", "completion")
        if self.form(row) == "messages":
            names = (_name_of_messages(row) or "messages",)
        lists, sharegpt = [], False
        for name in names:
            messages: Any = row.get(name)
            if is_sharegpt(messages):
                sharegpt = True
                messages = messages_from_sharegpt(messages, tool_calls=self.calls_tools)
            if messages != [] or name == "prompt":
                check_messages(messages, self.chat.source, what=name)
            lists.append(list(messages))
        context = Context(
            tools_of(row.get("tools"), sharegpt=sharegpt), row.get("chat_template_kwargs") or {}
        )
        *prompt, rest = lists
        return [message for part in prompt for message in part], rest, context


_WORDS = {
    "text": "text",
    "prompt": "prompts and completions",
    "messages": "conversations",
    "prompt messages": "prompts and completions of messages",
    "fields": "raw fields",
}


def _name_of_messages(row: Row) -> str | None:
    names = ("messages", "conversations")
    return next((name for name in names if isinstance(row.get(name), list)), None)


def _contents(row: Row) -> str:
    return ", ".join(
        f"{name!r} is {'null' if row[name] is None else type(row[name]).__name__}"
        for name in sorted(row)
    )


def says_what_is_trained(row: Row) -> bool:
    """Return whether messages of `row` have the keys "train" or "weight", null or not."""
    lists = [row.get(name) for name in ("prompt", "completion", "messages", "conversations")]
    messages = [m for each in lists if isinstance(each, list) for m in each]
    return any("train" in m or "weight" in m for m in messages if isinstance(m, dict))


def _string(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        got = "nothing (null)" if value is None else f"{type(value).__name__} {quote(value):.60}"
        raise ValueError(f"its {column!r} is {got}; make it a string, or remove the row")
    return value
