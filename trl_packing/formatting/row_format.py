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
from dataclasses import dataclass
from functools import partial
from typing import Any

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset
from trl import SFTConfig
from trl.chat_template_utils import supports_tool_calling

from trl_packing.config import PackedSFTConfig, PackingOptions
from trl_packing.formatting.chat_template import ChatTemplate, Conversation
from trl_packing.formatting.message_spans import find_message_spans
from trl_packing.formatting.messages import (
    check_messages,
    is_sharegpt,
    messages_from_sharegpt,
    tools_from_value,
    trained_messages,
    without_flags,
)
from trl_packing.formatting.printable import quote
from trl_packing.formatting.prompt_template import PromptTemplate, field_text
from trl_packing.formatting.response_template import ResponseTemplate
from trl_packing.formatting.tokenize import Rendered

Row = Mapping[str, Any]


@dataclass(frozen=True)
class RowFormat:
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
    answers: ResponseTemplate | None = None
    prompt_template: PromptTemplate | None = None
    response_field: str = "response"
    formatting_func: Callable[[Row], str] | None = None
    calls_tools: bool = False

    @classmethod
    def from_args(
        cls,
        args: SFTConfig,
        tokenizer: Any,
        first: dict[str, Any],
        *,
        chat_template: str | None,
        completion_only: bool,
        formatting_func: Callable[[Any], str] | None = None,
        flagged: bool | None = None,
    ) -> "RowFormat":
        """Return what `args` say about which tokens of rows like `first` are trained.

        chat_template, completion_only: what TRL has made of `args` and the training set.
        flagged: whether messages say whether they are trained; None: as those of `first` do.
        Raises ValueError for templates that are empty or cannot be read.
        """
        options = PackingOptions.of(args)
        answers = prompt_template = None
        if options.response_template is not None:
            answers = ResponseTemplate.from_settings(
                tokenizer, options.response_template, options.instruction_template
            )
        if options.prompt_template is not None:
            prompt_template = PromptTemplate.from_setting(
                options.prompt_template, options.query_field
            )
            completion_only = args.completion_only_loss is not False
        train_on = options.train_on
        flagged = says_what_is_trained(first) if flagged is None else flagged
        if train_on is None and isinstance(args, PackedSFTConfig) and flagged:
            train_on = "assistant"
        return cls(
            ChatTemplate(tokenizer, chat_template),
            tokenizer.eos_token,
            text_field=args.dataset_text_field,
            completion_only=completion_only,
            assistant_only=args.assistant_only_loss,
            train_on=train_on,
            answers=answers,
            prompt_template=prompt_template,
            response_field=options.response_field,
            formatting_func=formatting_func,
            calls_tools=_calls_tools(tokenizer),
        )

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
        own = self.form(row)
        if own != form:
            raise ValueError(
                f"it holds {_WORDS[own]}, but the first row {_WORDS[form]}; a data set "
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
            completion = field_text(row, self.response_field)
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
        prompt, completion, tools = self._messages(row)
        kwargs = row.get("chat_template_kwargs") or {}
        conversation = Conversation(without_flags([*prompt, *completion]), tools, kwargs)
        if not completion:  # nothing to train: dropped, and counted, with other such documents
            text = self.chat.render(conversation) if prompt else ""
            return Rendered(text, [], adds_special_tokens=False)
        if self.train_on in ("assistant", "last_assistant"):
            weights = trained_messages([*prompt, *completion], self.train_on, first=len(prompt))
            alike = len(set(weights.values())) < 2
            text, found = find_message_spans(self.chat, conversation, list(weights), alike=alike)
            spans = [(*span, weights[number]) for number in weights for span in found[number]]
            return Rendered(text, spans, adds_special_tokens=False)
        if self.assistant_only and self.train_on is None:
            text, marked = self.chat.render_marked(conversation)
            if not marked:
                raise RuntimeError(
                    "assistant_only_loss=True, but it has no assistant tokens: it has no assistant "
                    "message, or the chat template marks none with {% generation %}"
                )
            spans = [(*span, 1.0) for span in marked]
            untrained = self._untrained(conversation, len(prompt))
            return Rendered(text, spans, untrained, False, False)
        text = self.chat.render(conversation)
        answers, only_whole = self._answers(text), self.answers is not None
        untrained = self._untrained(conversation, len(prompt))
        return Rendered(text, answers, untrained, only_whole, False)

    def _untrained(self, conversation: Conversation, prompt_size: int) -> str | None:
        """Return the text of the first messages, a prompt, if they are not trained."""
        if prompt_size and self.completion_only and self.train_on is None:
            prompt = conversation.with_messages(conversation.messages[:prompt_size])
            return self.chat.render(prompt, generation_prompt=True)
        return None

    def _messages(self, row: Row) -> tuple[list[Any], list[Any], list[Any] | None]:
        """Return the messages of the prompt, the messages after it, and the tools."""
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
        *prompt, last = lists
        tools = tools_from_value(row.get("tools"), sharegpt=sharegpt)
        return [message for part in prompt for message in part], last, tools


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
    """Return whether a message of `row` has a "train" or "weight" that is not null."""
    return any(message.get(flag) is not None for message in _all_messages(row) for flag in _FLAGS)


def has_flags(dataset: datasets.Dataset | datasets.IterableDataset, first: Row) -> bool:
    """Return whether any message of a data set has a "train" or "weight" that is not null.

    Of a stream, whether those of its `first` row have such keys, null or not: later ones may say.
    """
    named = any(flag in message for message in _all_messages(first) for flag in _FLAGS)
    if not named or isinstance(dataset, datasets.IterableDataset):
        return named
    columns = [name for name in _MESSAGE_COLUMNS if name in dataset.column_names]
    return any(_has_flags(chunk) for name in columns for chunk in dataset.data.column(name).chunks)


def _has_flags(chunk: pa.Array) -> bool:
    kind = chunk.type
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return not pa.types.is_string(kind)  # JSON, say, where a look at all rows would be slow
    if not pa.types.is_struct(kind.value_type):
        return False
    messages = chunk.flatten()
    names = {field.name for field in kind.value_type} & set(_FLAGS)
    return any(messages.field(name).null_count < len(messages) for name in names)


_FLAGS = ("train", "weight")
_MESSAGE_COLUMNS = ("prompt", "completion", "messages", "conversations")


def _all_messages(row: Row) -> list[Mapping[str, Any]]:
    lists = [row.get(name) for name in _MESSAGE_COLUMNS]
    messages = [m for each in lists if isinstance(each, list) for m in each]
    return [message for message in messages if isinstance(message, dict)]


def _string(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        got = "nothing (null)" if value is None else f"{type(value).__name__} {quote(value):.60}"
        raise ValueError(f"its {column!r} is {got}; make it a string, or remove the row")
    return value


def format_per_example(
    formatting_func: Callable[[Any], Any] | None, dataset: Dataset | IterableDataset
) -> Callable[[Any], Any] | None:
    """Return `formatting_func` as TRL calls it now: one example in, one text out.

    Once TRL called it with a batch: lists in, a list of texts out. The first example tells which.
    """
    if formatting_func is None or isinstance(_tried(formatting_func, next(iter(dataset))), str):
        return formatting_func
    texts = _tried(formatting_func, _batch_of_one(next(iter(dataset))))
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return partial(_format_one, formatting_func)
    return formatting_func  # TRL's own call says what is wrong with it


def _tried(formatting_func: Callable[[Any], Any], example: Any) -> Any:
    """Return what the function makes of `example`, or None if it fails: it may take batches."""
    try:
        return formatting_func(example)
    except Exception:
        return None


def _batch_of_one(example: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in example.items()}


def _format_one(formatting_func: Callable[[Any], Any], example: dict[str, Any]) -> str:
    texts = formatting_func(_batch_of_one(example))
    if len(texts) != 1:
        raise ValueError(
            f"formatting_func made {len(texts)} texts of one example; it must make one of each "
            "(map the data set before, to make more or fewer)"
        )
    return texts[0]


def _calls_tools(tokenizer: Any) -> bool:
    """Return whether the chat template renders tool calls."""
    try:
        return bool(tokenizer.chat_template) and supports_tool_calling(tokenizer)
    except Exception:  # a template raises what its author likes, and rows will say so
        return False
