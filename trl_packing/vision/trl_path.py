"""Gives a built run with images back to TRL: its rows, its collator, its padded micro-batches.

The constructor of `PackedSFTTrainer` has replaced images by numbers, so TRL's constructor has seen
a data set of text. Two things are found out later: that the processor makes other tokens than were
computed from image sizes, and that no attention backend is exact with images.
"""

from collections.abc import Iterable
from typing import Any

from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.documents.labels import WEIGHT_COLUMNS


def collator_of_trl(
    args: Any,
    processor: Any,
    *,
    completion_only: bool,
    assistant_only: bool,
    chat_template: str | None,
    max_length: int | None = None,
) -> DataCollatorForVisionLanguageModeling:
    """Return TRL's collator for images, as its constructor makes it.

    Args:
        args: settings of the run.
        processor: of the model.
        completion_only: train completions only.
        assistant_only: train the assistant's turns only.
        chat_template: replaces the processor's; None: the processor's.
        max_length: of a row; None keeps all of its tokens.
    """
    return DataCollatorForVisionLanguageModeling(
        processor,
        max_length=max_length,
        completion_only_loss=completion_only,
        pad_to_multiple_of=None if max_length is None else args.pad_to_multiple_of,
        dataset_text_field=args.dataset_text_field,
        assistant_only_loss=assistant_only,
        chat_template=chat_template,
    )


def check_nothing_is_weighted(datasets: Iterable[Any], reason: str) -> None:
    """Raise ValueError for weights in data sets with images, which TRL would silently ignore.

    Args:
        datasets: those of the run; None among them is left out.
        reason: why the run takes TRL's path.
    """
    for dataset in datasets:
        for column in WEIGHT_COLUMNS:
            if column in (getattr(dataset, "column_names", None) or ()):
                raise ValueError(
                    f"the data set has {column!r}, but {reason}, which takes TRL's path, where "
                    f"weights do nothing; drop the column: dataset.remove_columns({column!r})"
                )


def check_trl_can_train(args: Any, reason: str) -> None:
    """Raise ValueError for settings of the run that TRL refuses for data sets with images.

    Args:
        args: settings of the run.
        reason: why it takes TRL's path.
    """
    refused = {"packing": args.packing, "padding_free": args.padding_free}
    refused["truncation_mode"] = args.max_length is not None and args.truncation_mode == "keep_end"
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"{name}={getattr(args, name)!r}, but {reason}, which takes TRL's path, where it "
                f"is not available with images; leave {name} out"
            )


def show_images_to_trl(trainer: SFTTrainer, train_dataset: Any, eval_dataset: Any) -> None:
    """Make `trainer` train rows with images as TRL does.

    Args:
        trainer: was built on data sets without their images.
        train_dataset: as the user passed it to the constructor.
        eval_dataset: the same.
    """
    args = trainer.args
    trainer.train_dataset, trainer.eval_dataset = train_dataset, eval_dataset
    trainer.data_collator = collator_of_trl(
        args,
        trainer.processing_class,
        completion_only=trainer.completion_only_loss,
        assistant_only=args.assistant_only_loss,
        chat_template=trainer.chat_template,
        max_length=args.max_length,
    )
    trainer._is_vision_dataset = trainer._skip_prepare_dataset = True
    trainer._signature_columns = None  # TRL finds them again for images
    trainer.padding_free = False
