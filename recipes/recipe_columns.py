"""Columns of a data set, by the names that the user gives, → columns for TRL.

    your columns                              options                          columns for TRL
    question, answer                          --prompt_column question         prompt, completion
                                              --completion_column answer
    instruction, input, output                --prompt_template "{instruction}\\n{input}\\n"
                                              --completion_column output       prompt, completion
    chat (role/content or from/value)         --messages_column chat           messages
    body                                      --dataset_text_field body        body
    prompt, completion | messages | text | input_ids           (nothing)       the same
    a folder of `trl-packing prepare`                         (nothing)       documents

An entry of `datasets:` has the same words for its own data set. Anything wrong with a data set
raises `InputError` with one sentence, before anything is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from trl.data_utils import get_dataset_column_names

from trl_packing.data.prepared import records_of
from trl_packing.formatting.prompt_template import PromptTemplate

KEPT_COLUMNS = ("tools", "chat_template_kwargs")  # TRL reads these beside a conversation

Row = dict[str, Any]
AnyDataset: TypeAlias = Dataset | IterableDataset

# Options that name columns. A document is made by those of one line.
_FORMS = (
    ("prompt_column", "prompt_template", "completion_column"),
    ("messages_column",),
    ("text_column",),
)


class InputError(ValueError):
    """A mistake in the user's options or data, in one sentence."""


@dataclass(frozen=True)
class RowColumns:
    """The columns of one data set to train on, and the form of its documents.

    Attributes:
        prompt_column: holds the prompt; None: "prompt", or `prompt_template`.
        completion_column: holds the completion; None: "completion".
        messages_column: holds conversations, of which nothing else is a part.
        prompt_template: makes prompts from raw columns.
        query_field: the column that {query} in `prompt_template` stands for.
        chat: make conversations of prompts and completions; None: if there is a chat template, and
            no `prompt_template`.
        text_field: the column of plain text in the documents of the run.
        text_column: that of this data set, if it is named for it alone.
        has_chat_template: whether conversations can be rendered.
        kept: columns that stay beside a conversation.
        source: the name of the data set, if it is one of several.
    """

    prompt_column: str | None = None
    completion_column: str | None = None
    messages_column: str | None = None
    prompt_template: str | None = None
    query_field: str = "query"
    chat: bool | None = None
    text_field: str = "text"
    text_column: str | None = None
    has_chat_template: bool = False
    kept: tuple[str, ...] = KEPT_COLUMNS
    source: str | None = None

    def of_source(self, source: str, rows: AnyDataset, named: Mapping[str, Any]) -> "RowColumns":
        """Return the columns of one of several data sets.

        A name that is given for all data sets counts for those that have the column. If the entry
        of a data set names columns of one form, names of other forms do not count for it.

        Args:
            source: its name.
            rows: its rows.
            named: the attributes that its entry sets.

        Raises:
            InputError: the entry names a query_field, and there is no prompt_template.
        """
        query_field = named.get("query_field", self.query_field)
        own = replace(self, source=source, query_field=query_field)
        columns = set(get_dataset_column_names(rows))
        named_form = next((form for form in _FORMS if not named.keys().isdisjoint(form)), None)
        changes: dict[str, Any] = {}
        for form in _FORMS:
            for option in form:
                is_absent = not columns.issuperset(own.columns_of(option))
                if is_absent or named_form not in (None, form):
                    changes[option] = None
        if "prompt_column" in named or "prompt_template" in named:
            changes |= {"prompt_column": None, "prompt_template": None}
        own = replace(own, **(changes | dict(named)))
        if "query_field" in named and own.prompt_template is None:
            raise own._error("query_field names a column of a prompt_template, and it has none")
        return own

    def columns_of(self, option: str) -> list[str]:
        """Return the columns that an option names."""
        if option == "prompt_template":
            return self._template.fields if self._template else []
        name = getattr(self, option)
        return [] if name is None else [name]

    def convert(self, dataset: AnyDataset) -> AnyDataset:
        """Return `dataset` with columns for TRL, as the table at the top of this file shows.

        Raises:
            InputError: a column is missing, or the names contradict each other.
        """
        if records_of(dataset):
            return dataset
        self._check_chat()
        columns = get_dataset_column_names(dataset)
        whole = self.messages_column or self.text_column
        makes_prompts = self.prompt_column or self.prompt_template or self.completion_column
        if whole and makes_prompts:
            option = "messages_column" if self.messages_column else "dataset_text_field"
            word = self._word(option)
            raise self._error(f"{word} is the whole document: name no prompt beside it")
        rewrite: Callable[[Row, int], Row]
        if self.messages_column:
            self._require(columns, self.messages_column, "messages_column")
            rewrite = self._conversation
        elif self.text_column:
            self._require(columns, self.text_column, "dataset_text_field")
            return self._renamed(dataset.select_columns([self.text_column]))
        elif makes_prompts or ("prompt" in columns and "input_ids" not in columns):
            rewrite = self._prompt_completion(columns)
        elif "input_ids" in columns:
            return dataset
        else:
            forms = ("messages", "conversations", self.text_field)
            form = next((form for form in forms if form in columns), None)
            if form is None:
                raise self._no_form(columns)
            return dataset.select_columns([*(c for c in self.kept if c in columns), form])
        dropped = [column for column in columns if column not in self.kept]
        options = {} if isinstance(dataset, IterableDataset) else {"desc": "Naming columns"}
        return dataset.map(rewrite, with_indices=True, remove_columns=dropped, **options)

    def notes(self, row: Row, document: Row) -> list[str]:
        """Return notes on surprises in the first row and the document made from it."""
        prompt, completion = document.get("prompt"), document.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if prompt[-1:].isspace() or completion[:1].isspace() or not (prompt and completion):
                return []
            return [
                f"the model reads {prompt[-12:] + completion[:12]!r} where prompt and completion "
                f"meet; {self._word('prompt_template')} can put a space or a line break there"
            ]
        was_conversation = isinstance(row.get(self.prompt_column or "prompt"), list)
        if prompt is None or was_conversation or self.chat:
            return []
        off = "--chat false" if self.source is None else "chat: false in its entry"
        return [
            "prompt and completion become a user and an assistant message, because the tokenizer "
            f"has a chat template; {off} trains on the plain text"
        ]

    # --- rows -----------------------------------------------------------------------------------

    def _conversation(self, row: Row, index: int) -> Row:
        """Return the row's messages (role and content, or ShareGPT's from and value)."""
        column = str(self.messages_column)
        messages = row[column]
        if messages is None or messages == []:
            raise self._error(f"row {index} has no message in the column {column!r}")
        if not isinstance(messages, list):
            kind = type(messages).__name__
            raise self._error(f"row {index} has {kind} in the column {column!r}, not messages")
        return {"messages": messages}

    def _prompt_completion(self, columns: list[str]) -> Callable[[Row, int], Row]:
        """Return the function that makes a prompt and a completion from a row."""
        template, completion = self._template, self.completion_column or "completion"
        if self.prompt_column and template:
            one, other = self._word("prompt_column"), self._word("prompt_template")
            raise self._error(f"give {one} or {other}, not both")
        fields = template.fields if template else [self.prompt_column or "prompt"]
        for column in fields:
            self._require(columns, column, "prompt_template" if template else "prompt_column")
        self._require(columns, completion, "completion_column")
        chat = self._makes_chats

        def rewrite(row: Row, index: int) -> Row:
            for column in (*fields, completion):
                if row[column] is None:
                    raise self._error(f"row {index} has no value in the column {column!r}")
            document = {
                "prompt": template.prompt(row) if template else row[fields[0]],
                "completion": row[completion],
            }
            if chat and not isinstance(document["prompt"], list):
                roles = {"prompt": "user", "completion": "assistant"}
                return {k: [{"role": roles[k], "content": str(v)}] for k, v in document.items()}
            return {k: v if isinstance(v, list) else str(v) for k, v in document.items()}

        return rewrite

    def _renamed(self, texts: AnyDataset) -> AnyDataset:
        """Return texts in the column that all data sets of the run have for them."""
        if self.text_column == self.text_field:
            return texts
        return texts.rename_column(str(self.text_column), self.text_field)

    @property
    def _makes_chats(self) -> bool:
        if self.chat is None:
            return self.has_chat_template and self.prompt_template is None
        return self.chat

    @property
    def _template(self) -> PromptTemplate | None:
        if self.prompt_template is None:
            return None
        try:
            template = PromptTemplate.from_setting(self.prompt_template, self.query_field)
            _ = template.fields  # raises for braces that cannot be read
        except ValueError as error:
            raise self._error(str(error)) from error
        return template

    # --- mistakes -------------------------------------------------------------------------------

    def _check_chat(self) -> None:
        if self.chat and not self.has_chat_template:
            raise self._error(
                f"{self._word('chat')} needs a chat template: set one with --chat_template_path"
            )

    def _no_form(self, columns: list[str]) -> InputError:
        words = [self._word(o) for o in ("prompt_column", "completion_column", "messages_column")]
        where = "" if self.source is None else "in its entry "
        return self._error(
            f"no column to train on among {', '.join(columns)}: name yours {where}with {words[0]} "
            f"and {words[1]}, {words[2]} or {self._word('dataset_text_field')}"
        )

    def _require(self, columns: list[str], column: str, option: str) -> None:
        if column not in columns:
            raise self._error(
                f"no column {column!r} among {', '.join(columns)}: name yours with "
                f"{self._word(option)}"
            )

    def _word(self, option: str) -> str:
        """Return an option as the user writes it: in an entry of `datasets`, without dashes."""
        return option if self.source is not None else f"--{option}"

    def _error(self, sentence: str) -> InputError:
        return InputError(
            sentence if self.source is None else f"the data set {self.source}: {sentence}"
        )
