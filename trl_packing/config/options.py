"""The settings that packing adds to those of TRL."""

from dataclasses import dataclass, field, fields
from typing import Any

from trl_packing.documents.weights import LOSS_WEIGHTINGS
from trl_packing.packing.draw import LENGTH, column_of

OVERFLOWS = ("truncate", "truncate_prompt", "drop", "split", "overlap", "error")
PREFIX_SHARING = ("off", "bin", "group")
ISOLATION_CHECKS = ("error", "warn", "off")
TRAIN_ON = ("assistant", "last_assistant", "every_turn", "all")
MIXTURE_UNITS = ("documents", "tokens", "trained_tokens")


def choice(default: Any, help: str, choices: tuple[str, ...]) -> Any:
    """Return a field of a configuration that takes one of `choices`."""
    return field(default=default, metadata={"help": help, "choices": list(choices)})


@dataclass
class PackingOptions:
    """The settings that packing adds to those of TRL, each with its one default."""

    overflow: str | None = choice(
        None,
        "Documents longer than max_length: 'truncate', 'truncate_prompt' (cut the prompt from the "
        "left, keep the completion whole), 'drop', 'split', 'overlap' (split into pieces that "
        "begin with the last tokens of the one before) or 'error'. Default: TRL's behavior, "
        "'truncate', or 'split' with packing_strategy='bfd_split'.",
        OVERFLOWS,
    )
    overlap_tokens: int | None = field(
        default=None,
        metadata={
            "help": "With overflow='overlap': tokens that a piece repeats of the one before it, as "
            "context that is not trained again. Default: an eighth of max_length."
        },
    )
    train_on: str | None = choice(
        None,
        "Trained messages of a conversation: 'assistant' (all of its turns), 'last_assistant', "
        "'every_turn' (all of its turns, each a document of its own, as at inference: for "
        "reasoning models) or 'all'. 'train' and 'weight' of a message take precedence. "
        "Works with any chat template. Default: TRL's behavior, by completion_only_loss and "
        "assistant_only_loss; 'assistant' if messages have 'train' or 'weight'.",
        TRAIN_ON,
    )
    response_template: str | None = field(
        default=None,
        metadata={
            "help": "Train the text after this template, e.g. '### Answer:', in plain text or in a "
            "rendered conversation; for a tokenized data set, it may be a list of token ids."
        },
    )
    instruction_template: str | None = field(
        default=None,
        metadata={
            "help": "With response_template: train every answer, up to the next instruction, "
            "instead of the text after the last response_template."
        },
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Make prompts from raw fields: 'alpaca', 'qa', a file, or text with columns in "
            "braces, 'Question: {question}\\nAnswer: '. {query} is the column query, instruction "
            "or question; the answer is the column response, output, answer or completion."
        },
    )
    append_eos: bool = field(
        default=False,
        metadata={
            "help": "Append the tokenizer's EOS, trained, to documents that are trained to their "
            "end but do not end in a stop token (tokenized data, templates without one)."
        },
    )
    documents_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Use exactly this many documents in every optimizer step, over all ranks and "
            "accumulated micro-batches (the last step of an epoch may be smaller), divided into "
            "micro-batches of equal cost. Default: the documents in the bins of a step; with "
            "packing=False, those of a padded run."
        },
    )
    loss_weighting: str = choice(
        "token",
        "Weight of a token in the loss of an optimizer step: 'token' (all tokens equal), "
        "'document' (all documents equal: the mean of the documents' means) or 'sqrt' (divided by "
        "the square root of its document's trained tokens). The columns loss_weight (per document) "
        "and loss_weights (per token) multiply it.",
        LOSS_WEIGHTINGS,
    )
    source_column: str | None = field(
        default=None,
        metadata={
            "help": "A column of the data sets, e.g. 'source': evaluation also reports "
            "eval_loss_<source> and eval_num_documents_<source> for each of its values. If the "
            "training set has it, the training log has loss_<source> and the documents and tokens "
            "of each."
        },
    )
    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "The share of each source in an epoch: {'math': {'weight': 3}, 'chat': "
            "{'weight': 1}} or {'math': {'epochs': 2}, 'chat': {'epochs': 0.5}}. Sources are the "
            "names of a train_dataset that is a dictionary, or the values of source_column. "
            "Those with a weight divide what they hold together, in mixture_unit; the others are "
            "drawn once. Nothing is copied."
        },
    )
    mixture_unit: str = choice(
        "documents",
        "With weights in mixture, or mixture_temperature: count shares in 'documents', 'tokens' or "
        "'trained_tokens'.",
        MIXTURE_UNITS,
    )
    mixture_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Draw each source with a share of the epoch in proportion to size^(1/T), in "
            "mixture_unit: 1 draws every document once, larger values draw small sources more "
            "often. Instead of weights."
        },
    )
    curriculum: str | None = field(
        default=None,
        metadata={
            "help": "Order the documents of an epoch by their tokens ('length'), or by a column of "
            "numbers, in up to 64 stages; each stage is drawn at random. The smallest numbers come "
            "first, with a minus before the name ('-length') the largest. Default: no order."
        },
    )
    static_shapes: bool = field(
        default=False,
        metadata={
            "help": "Keep the shape of packed micro-batches constant, for torch_compile: "
            "per_device_train_batch_size × max_length tokens, filled with masked documents, and "
            "equally many boundaries. Needs packing=True. Losses and gradients stay the same."
        },
    )
    max_patches: int | None = field(
        default=None,
        metadata={
            "help": "With images: most patches of the vision tower in a bin, beside the tokens of "
            "max_length, so that no micro-batch needs much more memory than others. Default: no "
            "limit."
        },
    )
    prefix_sharing: str = choice(
        "off",
        "Compute tokens with which documents of a micro-batch begin alike (a system prompt, many "
        "answers to a question) once: 'off', 'bin' (no document moves, no step changes) or 'group' "
        "(bins and steps are made of groups of documents with a long common prefix). "
        "Losses and gradients of a step stay those of its documents. Models that cannot share "
        "train as with 'off'.",
        PREFIX_SHARING,
    )
    prefix_group_size: int = field(
        default=8,
        metadata={
            "help": "With prefix_sharing='group': most documents of a group. Larger groups compute "
            "less, smaller ones bring more different prefixes into a step."
        },
    )
    attention: str = field(
        default="auto",
        metadata={
            "help": "Attention backend that keeps documents apart: 'auto', or one of "
            "'flash_attention_2' (3, 4), 'varlen', 'documents', 'model'. A named backend that "
            "cannot be exact raises an error."
        },
    )
    isolation_check: str = choice(
        "error",
        "Check on this model, before the first step, that no document affects another: 'error' "
        "stops if one does, 'warn' continues, 'off' skips the check.",
        ISOLATION_CHECKS,
    )

    run_page: bool = field(
        default=True,
        metadata={
            "help": "Write run.html (curves, report, settings) and run.json into output_dir while "
            "training. Nothing that is trained depends on it."
        },
    )

    @staticmethod
    def of(args: Any) -> "PackingOptions":
        """Return the options that `args` has now; defaults for those that a plain config lacks."""
        given: dict[str, Any] = {
            option.name: getattr(args, option.name, option.default)
            for option in fields(PackingOptions)
        }
        return PackingOptions(**given)

    def named_columns(self) -> list[str]:
        """Return the columns of a data set that settings name, with a value for each document."""
        order = self.curriculum and column_of(self.curriculum)
        named = (self.source_column, None if order == LENGTH else order)
        return [name for name in named if name is not None]
