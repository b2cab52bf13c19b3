"""The rules that shape the documents of a run, as values that can be stored and compared.

    tokenizer    a hash of each of its parts
    template     the text of the chat template, where it renders rows
    settings     max_length 2048, overflow "truncate", train_on "assistant", …

Two runs with equal rules make the same documents of the same rows. Some defaults depend on the
rows: `completion_only_loss=None` is True for prompts with completions. A run on prepared documents
does not have the rows any more, so `RowFacts` keeps what the defaults depend on.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from datasets import Dataset

from trl_packing.config import PackedSFTConfig
from trl_packing.data.overflow import Overflow
from trl_packing.data.rules import Preparation
from trl_packing.formatting.message_flags import has_flags
from trl_packing.formatting.printable import quote

# Parts of a tokenizer that change how text becomes tokens. A decoder does not.
_PARTS = ("model", "added_tokens", "normalizer", "pre_tokenizer", "post_processor")


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

    @property
    def are_rendered(self) -> bool:
        """Whether the chat template renders them."""
        return self.form.endswith("messages")


@dataclass(frozen=True)
class DocumentRules:
    """The rules that shape the documents of one data set.

    Attributes:
        facts: about its rows.
        tokenizer: hash of each part of the tokenizer, and of "all" of them.
        settings: values that JSON can hold, by the names of the settings.
        template: the chat template; None where it renders no row.
    """

    facts: RowFacts
    tokenizer: Mapping[str, str]
    settings: Mapping[str, Any]
    template: str | None = None

    @classmethod
    def of(cls, rules: Preparation, facts: RowFacts) -> "DocumentRules":
        """Return the rules of a run on rows with these facts."""
        chat = rules.row_format.chat
        template = chat.source if facts.are_rendered and chat.exists else None
        tokenizer = chat.tokenizer
        hashes = hashes_of_parts(tokenizer) | {"all": hash_of_tokenizer(tokenizer)}
        return cls(facts, hashes, _settings(rules, facts), template)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "DocumentRules":
        """Return the rules that `asdict` has stored."""
        return cls(**{**stored, "facts": RowFacts(**stored["facts"])})

    def for_any_packing(self) -> "DocumentRules":
        """Return rules that fit runs with and without packing, which may drop other documents."""
        settings = {name: value for name, value in self.settings.items() if name != "packing"}
        return replace(self, settings=settings)

    def differences(self, rules: Preparation) -> Iterator[str]:
        """Yield each difference between these stored rules and those of a run."""
        tokenizer = rules.row_format.chat.tokenizer
        if hash_of_tokenizer(tokenizer) != self.tokenizer["all"]:
            now = hashes_of_parts(tokenizer)
            parts = [name for name, stored in self.tokenizer.items() if now.get(name) != stored]
            names = ", ".join(name.replace("_", " ") for name in parts if name != "all")
            yield f"another tokenizer ({names or 'of another class'} differs)"
        if self.template is not None:
            yield from _other_template(self.template, rules)
        now = _settings(rules, self.facts)
        for name in {**self.settings, **now}:
            stored, value = self.settings.get(name), now.get(name)
            # Documents may have a source that the run does not ask for.
            is_unused = name == "source_column" and value is None
            is_both = name == "packing" and name not in self.settings
            if stored != value and not (is_unused or is_both):
                yield f"{name}={_short(stored)} there and {_short(value)} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]} … {text[-10:]}"


def _other_template(stored: str, rules: Preparation) -> Iterator[str]:
    chat = rules.row_format.chat
    now = chat.source if chat.exists else ""
    if now == stored:
        return
    matcher = SequenceMatcher(None, stored.splitlines(), now.splitlines(), autojunk=False)
    line = next(a for tag, a, *_ in matcher.get_opcodes() if tag != "equal") + 1
    before, after = (_line(text, line) for text in (stored, now))
    yield f"another chat template (line {line} is {before} there and {after} here)"


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return f"{quote(lines[number - 1]):.60}" if number <= len(lines) else "missing"


# --- settings -------------------------------------------------------------------------------------


def _settings(rules: Preparation, facts: RowFacts) -> dict[str, Any]:
    """Return the settings that shape documents, by name, with their defaults resolved."""
    args, options = rules.args, rules.options
    policy = Overflow.from_args(args, rules.packing)
    overflow = asdict(policy) | {"overlap_tokens": policy.overlap}
    del overflow["running_text"], overflow["drops_as_padded"]  # for messages; follows from packing
    completion_only = args.completion_only_loss
    settings = {
        "max_length": overflow.pop("capacity"),
        "overflow": overflow.pop("policy"),
        **overflow,
        "packing": rules.packing,
        "train_on": options.train_on,
        "completion_only_loss": facts.are_completions
        if completion_only is None
        else completion_only,
        "response_template": options.response_template,
        "instruction_template": options.instruction_template,
        "append_eos": options.append_eos,
        "source_column": options.source_column,
        "shuffle_dataset": args.shuffle_dataset,
    }
    if args.shuffle_dataset:
        settings["seed"] = args.seed
    if facts.form == "text" and not facts.are_formatted:
        settings["dataset_text_field"] = args.dataset_text_field
    if facts.are_flagged and options.train_on is None:
        settings["args"] = "PackedSFTConfig" if isinstance(args, PackedSFTConfig) else "SFTConfig"
    if args.assistant_only_loss:  # no prepared data have it
        settings["assistant_only_loss"] = True
    if options.append_eos:
        settings["stop tokens"] = sorted(rules.eos.stop_ids)
    if rules.row_format.prompt_template is not None:
        template = rules.row_format.prompt_template
        settings["prompt_template"] = [template.template, template.with_input]
        settings["query_field"] = options.query_field
        settings["response_field"] = options.response_field
    if rules.labeler is not None:
        markers = rules.labeler.templates.response, rules.labeler.templates.instruction
        settings["data_collator"] = [
            marker and [marker.token_ids, marker.texts] for marker in markers
        ]
    return json.loads(json.dumps(settings))  # lists and tuples are the same once they are stored


# --- tokenizers -----------------------------------------------------------------------------------


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides how `tokenizer` makes tokens of text."""
    return _hash(f"{_special(tokenizer)}\n{_without_state(tokenizer)}")


def hashes_of_parts(tokenizer: Any) -> dict[str, str]:
    """Return the hash of each part of `tokenizer`, to name the part that differs."""
    content = json.loads("{" + _without_state(tokenizer))
    parts = {name: json.dumps(content.get(name), sort_keys=True) for name in _PARTS}
    return {
        name: _hash(part) for name, part in {**parts, "special_tokens": _special(tokenizer)}.items()
    }


def _without_state(tokenizer: Any) -> str:
    """Return the JSON of a tokenizer without padding and truncation, which each call sets."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        model = {"class": type(tokenizer).__name__, "vocab": sorted(tokenizer.get_vocab().items())}
        return json.dumps({"model": model}).removeprefix("{")
    text = backend.to_str()
    return text[text.index('"added_tokens":') :]


def _special(tokenizer: Any) -> str:
    """Return the special tokens that text can hold. Padding is none of a document's tokens."""
    tokens = {**tokenizer.special_tokens_map}
    tokens.pop("pad_token", None)
    splits = getattr(tokenizer, "split_special_tokens", False)
    return json.dumps([tokens, splits], sort_keys=True, default=str)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
