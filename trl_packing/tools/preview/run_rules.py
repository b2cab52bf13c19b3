"""The rules by which a run that has not started prepares its rows, as its trainer would make them.

The trainer's own belong to a trainer, which has a model.
"""

from typing import Any

from datasets import Dataset
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import is_conversational

from trl_packing.data.eos import EosRule
from trl_packing.data.rules import Preparation
from trl_packing.documents.labels import IMAGE_COLUMNS
from trl_packing.formatting.row_format import RowFormat


def first_row(rows: Dataset) -> dict[str, Any]:
    """Return the first row without its images, which need not be readable."""
    images = [column for column in IMAGE_COLUMNS if column in rows.column_names]
    texts = rows.remove_columns(images)
    return texts[0] if texts.column_names else {}


def training_template(args: Any, tokenizer: Any, first: dict[str, Any]) -> str | None:
    """Return the chat template that TRL's trainer takes instead of the tokenizer's, or None."""
    if not args.assistant_only_loss:
        return None
    if not is_conversational(first):
        raise ValueError(
            "assistant_only_loss=True needs conversations in a column 'messages', as TRL reads "
            f"them, but the columns are {sorted(first)}; set train_on='assistant' instead"
        )
    if has_generation_markers(tokenizer.chat_template):
        return None
    return get_training_chat_template(tokenizer)


def rules_of(
    args: Any,
    tokenizer: Any,
    first: dict[str, Any],
    template: str | None,
    generation_config: Any,
    labeler: Any,
) -> Preparation:
    """Return the rules of preparation.

    Args:
        args: the settings of the run.
        tokenizer: or a processor.
        first: the first row.
        template: replaces the chat template of the tokenizer; None leaves it.
        generation_config: of the model; None if it is not known.
        labeler: of a completion-only collator; None without one.
    """
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in first and "completion" in first
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return Preparation(
        args,
        tokenizer,
        packing=args.packing,
        row_format=RowFormat.from_args(
            args, inner, chat_template=template, completion_only=completion_only
        ),
        eos=EosRule.from_args(args, inner, tokenizer, generation_config),
        by_trl=_refuse,
        labeler=labeler,
    )


def _refuse(dataset: Any, formatting_func: Any, name: str) -> Any:
    raise ValueError("TRL's own code prepares data for this tokenizer; it cannot be shown here")
