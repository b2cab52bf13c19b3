"""The path of a run: ours, or TRL's unchanged path where rows cannot be packed.

    trainer.data_collator =     a PackedCollator           ours, with its rows
                                one around ours            ours, with what it makes of the rows
                                any other                  TRL's, on padded rows
    trainer.train_dataset =     rows of any form           ours: documents, and another report
                                not of `datasets`          TRL's

The constructor of the trainer chooses the path. A user may set another collator or data set later,
and the next `train`, `evaluate` or data loader then chooses again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from trl import SFTTrainer

from trl_packing.config import PackingOptions
from trl_packing.data.prepared import records_of
from trl_packing.packing.collator import PackedCollator
from trl_packing.training.arguments import (
    check_loss_options,
    packs_by_default,
    reason_for_trl_path,
    refuse_options,
    refuse_prepared,
)
from trl_packing.training.collators import RunCollators
from trl_packing.training.columns import columns_of
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_report import RunReport
from trl_packing.training.user_collator import calls

logger = get_logger(__name__)


@dataclass
class RunPath:
    """The path that a run takes.

    Attributes:
        reason: why it is TRL's; None if it is ours.
        is_fixed: whether nothing that a user sets on the trainer can change it.
    """

    reason: str | None
    is_fixed: bool = False

    def fix(self, reason: str) -> None:
        """Take TRL's path, whatever a user sets on the trainer."""
        self.reason, self.is_fixed = reason, True

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


class UserChanges:
    """Follows what a user sets on a built trainer: `data_collator` and `train_dataset`.

    Args:
        trainer: these attributes are read and may be replaced.
        path: is changed.
        collators: use the collator that was set.
        epochs: follow nothing on TRL's path.
        report: is made again for another data set.
        prepare: turns rows into the training documents.
        takes_count: whether the model class takes the number of trained tokens of a step.
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        path: RunPath,
        collators: RunCollators,
        epochs: ResumedEpochs,
        report: RunReport,
        prepare: Callable[[Any], Any],
        *,
        takes_count: bool,
    ):
        self.trainer = trainer
        self.path = path
        self.collators = collators
        self.epochs = epochs
        self.report = report
        self.options = collators.options
        self.prepare = prepare
        self.takes_count = takes_count
        self._planned = trainer.train_dataset  # the training set of the report
        self._warned_of: set[str] = set()

    def follow(self) -> None:
        """Choose the path that the collator and the training set now ask for."""
        self._take_our_path()
        ours, now = self.collators.packed, self.trainer.data_collator
        if isinstance(now, PackedCollator):
            if now is not ours:
                self.collators.use(now)
        elif calls(now, ours):
            self._check_wrapped(now)
            ours.host_row = False  # the CPU copy of a row would not have the user's changes
        else:
            self._take_trl_path(f"data_collator is your own ({type(now).__name__})")
            return
        self._follow_dataset()

    def _follow_dataset(self) -> None:
        dataset = self.trainer.train_dataset
        if dataset is self._planned or dataset is None:
            return
        if isinstance(dataset, dict):
            raise ValueError(
                "train_dataset was set to a dictionary of data sets; pass it to the constructor of "
                "the trainer, which prepares each"
            )
        packs_images = self.collators.packed.images is not None
        reason = reason_for_trl_path(dataset, None, packs_images=packs_images)
        if not isinstance(dataset, (Dataset, IterableDataset)):
            reason = f"train_dataset is a {type(dataset).__name__}"
        if reason:
            self._take_trl_path(reason)
            return
        # Tokens without packing are trained as they are, as in TRL; bins have a capacity.
        is_tokenized = "input_ids" in columns_of(dataset) and not records_of(dataset)
        if self.collators.sampling.packing or not is_tokenized:
            dataset = self.prepare(dataset)
        self.trainer.train_dataset = self._planned = dataset
        self.collators.hold_shapes()
        self.report.plan()

    def _take_trl_path(self, reason: str) -> None:
        """Train padded rows, as TRL does, from now on.

        Raises:
            ValueError: a setting would be ignored there.
        """
        check_loss_options(self.options, None, reason)
        for name in ("documents_per_step", "static_shapes", "mixture", "mixture_temperature"):
            if value := getattr(self.options, name):
                raise ValueError(
                    f"{name}={value!r}, but {reason}, which takes TRL's path, where it does "
                    f"nothing; leave {name} out"
                )
        trainer = self.trainer
        self.path.reason, trainer.padding_free = reason, False
        if trainer.data_collator is self.collators.packed:
            trainer.data_collator = self.collators.padded
        self.stop_packing()
        if reason not in self._warned_of:
            self._warned_of.add(reason)
            logger.warning(
                f"{reason}: taking TRL's path unchanged, on padded rows; to train packed "
                "documents, leave data_collator as it was (labels of a data set are kept), and "
                "pass data sets of `datasets`"
            )

    def stop_packing(self) -> None:
        """Give TRL its count of tokens, and forget the plan of packed steps."""
        self.trainer.model_accepts_loss_kwargs = self.takes_count
        self.epochs.forget()
        self.report.forget()

    def _take_our_path(self) -> None:
        if self.path.reason is None:
            return
        trainer = self.trainer
        self.path.reason, trainer.padding_free = None, True
        trainer.model_accepts_loss_kwargs = True
        self._planned = None
        if trainer.data_collator is self.collators.padded:
            trainer.data_collator = self.collators.packed

    def _check_wrapped(self, collator: Any) -> None:
        if self.options.static_shapes:
            raise ValueError(
                "static_shapes=True holds the shape of data_collator's rows, but it is now a "
                f"{type(collator).__name__} around it, which may change them; leave static_shapes "
                "out"
            )
