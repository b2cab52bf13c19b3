"""The rules that shape the documents of a run, and as values that can be stored and compared.

Two runs with equal settings make the same documents of the same rows. Some defaults depend on the
rows: `completion_only_loss=None` is True for prompts with completions. A run on prepared documents
does not have the rows any more, so `RowFacts` keeps what the defaults depend on.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset
from trl import SFTConfig

from trl_packing.config import PackedSFTConfig, PackingOptions
from trl_packing.data.fitting import Overflow
from trl_packing.data.messages import has_flags
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM, ResponseTemplate
from trl_packing.data.row_format import RowFormat
from trl_packing.data.stop_tokens import EosRule, stop_token_ids
from trl_packing.data.tokenize_rows import can_prepare

AnyDataset: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True)
class Rules:
    """Rules by which the data sets of one run become documents.

    Attributes:
        args: TRL's config, or ours.
        processing_class: tokenizer or processor.
        packing: documents will be packed, so columns that training does not read are dropped.
        row_format: rules that render rows and choose the trained tokens.
        eos: tokens that end a document, and whether EOS is appended.
        by_trl: TRL's own preparation, of (dataset, formatting_func, name), nothing cut or packed.
        labeler: a completion-only collator, whose template finds trained tokens.
    """

    args: SFTConfig
    processing_class: Any
    packing: bool
    row_format: RowFormat
    eos: EosRule
    by_trl: Callable[[AnyDataset, Any, str], AnyDataset]
    labeler: DataCollatorForCompletionOnlyLM | None = None

    @classmethod
    def of_run(
        cls,
        args: SFTConfig,
        processing_class: Any,
        tokenizer: Any,
        *,
        packing: bool,
        chat_template: str | None,
        completion_only: bool,
        generation_config: Any,
        by_trl: Callable[[AnyDataset, Any, str], AnyDataset],
        labeler: DataCollatorForCompletionOnlyLM | None,
    ) -> "Rules":
        """Return the rules of a run that has started or not; `tokenizer` is in `processing_class`.

        `chat_template` None leaves that of the tokenizer; with `completion_only`, only completions
        of prompts are trained; `generation_config` is the model's, which may be None.
        """
        row_format = RowFormat.from_args(
            args, tokenizer, chat_template=chat_template, completion_only=completion_only
        )
        own = None if processing_class is tokenizer else processing_class
        template = getattr(own, "chat_template", None)  # of a processor
        stop_ids = stop_token_ids(tokenizer, generation_config, template)
        eos = EosRule(tokenizer, stop_ids, PackingOptions.of(args).append_eos)
        return cls(args, processing_class, packing, row_format, eos, by_trl, labeler)

    @property
    def options(self) -> PackingOptions:
        return PackingOptions.of(self.args)

    @property
    def response_template(self) -> ResponseTemplate | None:
        """The template of a completion-only collator, or that of the settings."""
        return self.row_format.answers if self.labeler is None else self.labeler.templates

    @property
    def needs_trl(self) -> bool:
        """Whether TRL must prepare rows: the class renders or tokenizes in its own way."""
        return not can_prepare(self.processing_class)


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
    def of(cls, rows: Dataset, rules: Rules, formatting_func: Any = None) -> "RowFacts":
        """Return the facts about the rows of a training set, whose first row decides them."""
        first = next(iter(rows.with_format(None)))
        completions = "prompt" in first and "completion" in first
        if "input_ids" in first:
            return cls("tokens", completions)
        try:
            form = replace(rules.row_format, formatting_func=formatting_func).form(first)
        except ValueError:  # preparation will name the row and the way out
            form = "unknown"
        return cls(form, completions, has_flags(rows, first), formatting_func is not None)


def settings_of(rules: Rules, facts: RowFacts) -> dict[str, Any]:
    """Return what shapes the documents of rows with these facts, by the names of the settings.

    Defaults are resolved, and the values are those that JSON can hold.
    """
    args, options, row_format = rules.args, rules.options, rules.row_format
    overflow, train_on = Overflow.from_args(args, rules.packing), options.train_on
    if train_on is None and facts.are_flagged and isinstance(args, PackedSFTConfig):
        train_on = "assistant"
    completions, labeler = args.completion_only_loss, rules.labeler
    prompt, chat = row_format.prompt_template, row_format.chat
    is_chat = facts.form.endswith("messages") and chat.exists
    markers = labeler and (labeler.templates.response, labeler.templates.instruction)
    settings = {
        "tokenizer": hash_of_tokenizer(chat.tokenizer),
        "chat_template": chat.source if is_chat else None,
        "max_length": overflow.capacity,
        "overflow": overflow.policy,
        "packing": rules.packing,
        "train_on": train_on,
        "completion_only_loss": facts.are_completions if completions is None else completions,
        "prompt_template": prompt and [prompt.template, prompt.with_input],
        "data_collator": markers and [each and [each.token_ids, each.text] for each in markers],
        **{name: getattr(options, name, getattr(args, name, None)) for name in _AS_SET},
    }
    if args.shuffle_dataset:
        settings["seed"] = args.seed
    if facts.form == "text" and not facts.are_formatted:
        settings["dataset_text_field"] = args.dataset_text_field
    if options.append_eos:
        settings["stop tokens"] = sorted(rules.eos.stop_ids)
    # Lists and tuples are the same once they are stored.
    found: dict[str, Any] = json.loads(json.dumps(settings))
    return found


_AS_SET = (
    *("assistant_only_loss", "shuffle_dataset"),
    *("response_template", "instruction_template", "append_eos", "source_column"),
)


def differences(stored: Mapping[str, Any], facts: RowFacts, rules: Rules) -> Iterator[str]:
    """Yield each difference between stored settings and those of a run on rows with `facts`."""
    now = settings_of(rules, facts)
    for name, before in stored.items():
        # A setting that is missing here depends on one that differs, too.
        value = now.get(name, before)
        # Documents may have a source that the run does not ask for.
        if before == value or (name == "source_column" and value is None):
            continue
        is_long = name == "tokenizer" or max(len(repr(before)), len(repr(value))) > 60
        words = f"{name}={before!r} there and {value!r} here"
        yield f"another {name.replace('_', ' ')}" if is_long else words


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides how `tokenizer` makes tokens of text."""
    tokens = {**tokenizer.special_tokens_map}
    tokens.pop("pad_token", None)  # none of a document's tokens
    special = [tokens, getattr(tokenizer, "split_special_tokens", False)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python
        state = json.dumps([type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())])
    else:  # without padding and truncation, which each call sets
        state = backend.to_str()
        state = state[state.index('"added_tokens":') :]
    text = json.dumps(special, sort_keys=True, default=str) + state
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
