"""The rules that shape the documents of a run, and as values that can be stored and compared.

Two runs with equal settings make the same documents of the same rows. Defaults that depend on the
rows, which a run on prepared documents does not have any more, are stored as they were decided.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.fitting import Overflow
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM, ResponseTemplate
from trl_packing.data.row_format import RowFormat
from trl_packing.data.stop_tokens import EosRule
from trl_packing.documents.arrow import AnyDataset


@dataclass(frozen=True)
class Rules:
    """Rules by which the data sets of one run become documents."""

    args: SFTConfig  # or ours
    processing_class: Any  # tokenizer or processor
    packing: bool
    keeps_columns: bool  # also those that training does not read
    row_format: RowFormat
    eos: EosRule
    # TRL's own preparation, of (dataset, formatting_func, name, completion_only): nothing is cut
    by_trl: Callable[[AnyDataset, Any, str, bool], AnyDataset]
    labeler: DataCollatorForCompletionOnlyLM | None = None  # its template finds trained tokens
    formatting_func: Any = None  # of the user, from a row, or several, to text

    @property
    def options(self) -> PackingOptions:
        return PackingOptions.of(self.args)

    @property
    def response_template(self) -> ResponseTemplate | None:
        """The template of a completion-only collator, or that of the settings."""
        return self.row_format.answers if self.labeler is None else self.labeler.templates

    @property
    def overflow(self) -> Overflow:
        return Overflow.from_args(self.args, self.packing)


def settings_of(rules: Rules, *, flagged: bool) -> dict[str, Any]:
    """Return what shapes documents, by the names of the settings, as JSON holds it.

    `flagged` says whether messages of the rows have "train" or "weight".
    """
    args = rules.args
    options = rules.options
    row_format = rules.row_format
    prompt = row_format.prompt_template
    chat = row_format.chat
    labeler = rules.labeler
    markers = None
    if labeler is not None:
        templates = labeler.templates
        markers = [
            each and [each.token_ids, each.text]
            for each in (templates.response, templates.instruction)
        ]
    settings = {
        "tokenizer": hash_of_tokenizer(chat.tokenizer),
        "chat_template": chat.source if chat.exists else None,
        "max_length": rules.overflow.capacity,
        "overflow": rules.overflow.policy,
        "packing": rules.packing,
        "train_on": "assistant" if flagged and row_format.flags_decide else options.train_on,
        "prompt_template": prompt and [prompt.template, prompt.with_input],
        "data_collator": markers,
        "seed": args.seed if args.shuffle_dataset else None,
        "stop tokens": sorted(rules.eos.stop_ids) if options.append_eos else None,
        **{name: getattr(options, name, getattr(args, name, None)) for name in _AS_SET},
    }
    # Lists and tuples are the same once they are stored.
    return json.loads(json.dumps(settings))


# Rows decide on the last, and documents may have a source that a run does not ask for.
MAY_BE_NONE = ("source_column", "completion_only_loss")
_AS_SET = (
    "assistant_only_loss",
    "shuffle_dataset",
    "dataset_text_field",
    *MAY_BE_NONE,
    "response_template",
    "instruction_template",
    "append_eos",
)


def hash_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that decides how `tokenizer` makes tokens of text."""
    # The padding token is none of a document's tokens.
    tokens = {k: v for k, v in tokenizer.special_tokens_map.items() if k != "pad_token"}
    special = [tokens, getattr(tokenizer, "split_special_tokens", False)]
    text = json.dumps(special, sort_keys=True, default=str)
    if getattr(tokenizer, "is_fast", False):  # without padding and truncation, which each call sets
        text += tokenizer.backend_tokenizer.to_str().partition('"added_tokens":')[2]
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
