"""The rules that shape the documents of a run, as values that can be stored and compared.

    tokenizer    a hash of all of it that makes tokens of text
    settings     max_length 2048, overflow "truncate", train_on "assistant", a chat template, …

Two runs with equal rules make the same documents of the same rows. Some defaults depend on the
rows: `completion_only_loss=None` is True for prompts with completions. A run on prepared documents
does not have the rows any more, so `RowFacts` keeps what the defaults depend on.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from datasets import Dataset

from trl_packing.config import PackedSFTConfig
from trl_packing.data.overflow import Overflow
from trl_packing.data.rules import Preparation
from trl_packing.formatting.messages import has_flags


@dataclass(frozen=True)
class RowFacts:
    """Facts of the rows on which defaults of settings depend.

    Attributes:
        form: "tokens", "text", "prompt", "messages", "prompt messages" or "fields".
        are_completions: whether prompts are not trained by default.
        are_flagged: whether messages have "train" or "weight".
        are_formatted: whether a formatting function makes their text.
    """

    form: str
    are_completions: bool = False
    are_flagged: bool = False
    are_formatted: bool = False

    @classmethod
    def of(cls, rows: Dataset, rules: Preparation, formatting_func: Any = None) -> "RowFacts":
        """Return the facts about the rows of a training set, whose first row decides them."""
        first = next(iter(rows.with_format(None)))
        completions = "prompt" in first and "completion" in first
        if "input_ids" in first:
            return cls("tokens", completions)
        row_format = replace(rules.row_format, formatting_func=formatting_func)
        try:
            form = row_format.form(first)
        except ValueError:  # preparation will name the row and the way out
            form = "unknown"
        is_formatted = formatting_func is not None
        return cls(form, completions, has_flags(rows, first), is_formatted)


@dataclass(frozen=True)
class DocumentRules:
    """The rules that shape the documents of one data set.

    Attributes:
        facts: about its rows.
        settings: values that JSON can hold, by the names of the settings.
    """

    facts: RowFacts
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, rules: Preparation, facts: RowFacts) -> "DocumentRules":
        """Return the rules of a run on rows with these facts."""
        return cls(facts, _settings(rules, facts))

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "DocumentRules":
        """Return the rules that `asdict` has stored."""
        return cls(RowFacts(**stored["facts"]), stored["settings"])

    def for_any_packing(self) -> "DocumentRules":
        """Return rules that fit runs with and without packing, which may drop other documents."""
        settings = {name: value for name, value in self.settings.items() if name != "packing"}
        return replace(self, settings=settings)

    def differences(self, rules: Preparation) -> Iterator[str]:
        """Yield each difference between these stored rules and those of a run."""
        now = _settings(rules, self.facts)
        for name, stored in self.settings.items():
            # A setting that is missing here depends on one that differs, too.
            value = now.get(name, stored)
            # Documents may have a source that the run does not ask for.
            if stored == value or (name == "source_column" and value is None):
                continue
            words = [repr(each) for each in (stored, value)]
            if name in _BY_NAME or max(map(len, words)) > 60:
                yield f"another {name.replace('_', ' ')}"
            else:
                yield f"{name}={words[0]} there and {words[1]} here"


_BY_NAME = ("tokenizer", "chat_template", "data_collator")


def _settings(rules: Preparation, facts: RowFacts) -> dict[str, Any]:
    """Return the settings that shape documents, by name, with their defaults resolved."""
    args, options, row_format = rules.args, rules.options, rules.row_format
    policy = Overflow.from_args(args, rules.packing)
    overflow = asdict(policy) | {"overlap_tokens": policy.overlap}
    del overflow["running_text"], overflow["drops_as_padded"]  # for messages; follows from packing
    completion_only, train_on = args.completion_only_loss, options.train_on
    if train_on is None and facts.are_flagged and isinstance(args, PackedSFTConfig):
        train_on = "assistant"
    prompt, labeler, chat = row_format.prompt_template, rules.labeler, row_format.chat
    markers = labeler and (labeler.templates.response, labeler.templates.instruction)
    settings = {
        "tokenizer": hash_of_tokenizer(chat.tokenizer),
        "chat_template": chat.source if facts.form.endswith("messages") and chat.exists else None,
        "max_length": overflow.pop("capacity"),
        "overflow": overflow.pop("policy"),
        **overflow,
        "packing": rules.packing,
        "train_on": train_on,
        "completion_only_loss": facts.are_completions
        if completion_only is None
        else completion_only,
        "assistant_only_loss": args.assistant_only_loss,
        "response_template": options.response_template,
        "instruction_template": options.instruction_template,
        "prompt_template": prompt and [prompt.template, prompt.with_input],
        "data_collator": markers and [each and [each.token_ids, each.text] for each in markers],
        "append_eos": options.append_eos,
        "source_column": options.source_column,
        "shuffle_dataset": args.shuffle_dataset,
    }
    if args.shuffle_dataset:
        settings["seed"] = args.seed
    if facts.form == "text" and not facts.are_formatted:
        settings["dataset_text_field"] = args.dataset_text_field
    if options.append_eos:
        settings["stop tokens"] = sorted(rules.eos.stop_ids)
    return json.loads(json.dumps(settings))  # lists and tuples are the same once they are stored


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides how `tokenizer` makes tokens of text."""
    tokens = {**tokenizer.special_tokens_map}
    tokens.pop("pad_token", None)  # none of a document's tokens
    special = [tokens, getattr(tokenizer, "split_special_tokens", False)]
    text = json.dumps(special, sort_keys=True, default=str) + _without_state(tokenizer)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _without_state(tokenizer: Any) -> str:
    """Return the JSON of a tokenizer without padding and truncation, which each call sets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        return json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    text = backend.to_str()
    return text[text.index('"added_tokens":') :]
