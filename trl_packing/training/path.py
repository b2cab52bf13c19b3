"""The path of a run: ours, or TRL's unchanged path where rows cannot be packed.

The constructor of the trainer chooses it once. What a user sets on a built trainer does not change
it: another training set is prepared as the first was, and another collator is refused.
"""

from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_packing.config import PackingOptions
from trl_packing.training.arguments import (
    check_loss_options,
    packs_by_default,
    reason_for_trl_path,
    refuse_options,
    refuse_prepared,
)

logger = get_logger(__name__)


@dataclass
class RunPath:
    """The path that a run takes.

    Attributes:
        reason: why it is TRL's; None if it is ours.
    """

    reason: str | None

    def in_words(self, *, packs: bool) -> str:
        """Return the path in words; `packs` if documents are packed on ours."""
        if self.reason:
            return f"TRL's path: {self.reason}"
        return "packed" if packs else "padding-free"


def leave_packing(
    args: Any, reason: str, *, compute_loss_func: Any = None, train_dataset: Any = None
) -> None:
    """Make the settings of a run those of TRL's path, with a warning.

    Args:
        args: the settings; `packing` is turned off if it has our default.
        reason: for TRL's path.
        compute_loss_func: a user's loss, which may be None.
        train_dataset: is refused if it was prepared for packing.

    Raises:
        ValueError: a setting would be ignored there, or nothing checks that prepared data fit.
    """
    options = PackingOptions.of(args)
    refuse_options(options, reason)
    check_loss_options(options, compute_loss_func, reason)
    refuse_prepared([train_dataset], reason)
    if packs_by_default(args):
        args.packing = False
    logger.warning(f"{reason}: taking TRL's path unchanged, without packing by us")


def check_set_afterwards(collator: Any, ours: Any, dataset: Any, *, packs_images: bool) -> None:
    """Raise ValueError for a collator or a training set that a built trainer cannot take.

    Args:
        collator: `data_collator` of the trainer.
        ours: the one that the trainer was built with.
        dataset: `train_dataset` of the trainer.
        packs_images: rows with images are packed.
    """
    if collator is not ours:
        raise ValueError(
            f"data_collator was set to a {type(collator).__name__} on a built trainer, whose rows "
            "are packed by its own. To train on answers alone, set train_on='assistant' or "
            "response_template in the config (labels of a data set are kept); to change batches, "
            "pass a subclass of PackedCollator to the constructor, or any other collator for TRL's "
            "padded rows"
        )
    if dataset is None:
        return
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"train_dataset was set to a {type(dataset).__name__} on a built trainer; set a "
            "Dataset or an IterableDataset of `datasets`, or pass it to the constructor"
        )
    if reason := reason_for_trl_path(dataset, None, packs_images=packs_images):
        raise ValueError(
            f"train_dataset was set on a built trainer, but {reason}: pass it to the constructor, "
            "which takes TRL's path for it"
        )
