"""The trainer whose epochs train every document once, also where one is resumed otherwise.

    a checkpoint within an epoch, resumed with
    the same settings          the same micro-batches follow
    other settings             the same, if the first optimizer steps hold the same documents,
                               otherwise a new plan of the documents that are left to train
    other documents or seed    refused, unless no document of the epoch is trained yet

`Trainer` computes epoch and steps from the number of optimizer steps alone, as if the whole run had
been planned with the settings of now. Here they come from the record in the checkpoint.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.sampler import PackedBatchSampler, ResumedEpoch
from trl_packing.training.epoch_record import FILE, DocumentMarks, EpochRecord
from trl_packing.training.metrics import MeasuredTrainer

logger = get_logger(__name__)


class Resumption(NamedTuple):
    """Where a run goes on: in which epoch, and behind how many steps of its sampler, or its rest.

    is_planned_anew: for documents that other steps would have held.
    """

    epoch: int
    steps: int
    is_planned_anew: bool = False


class ResumingTrainer(MeasuredTrainer):
    """`MeasuredTrainer` that trains what an epoch has left, if settings changed within it."""

    _record: EpochRecord | None = None  # of the checkpoint that `train` resumes from
    _sampler: PackedBatchSampler | None = None  # of the training that runs
    _sampled: ArrowDocuments  # by it
    _marks: DocumentMarks | None = None
    _resumed: Resumption | None = None
    _epoch = 0
    _epoch_began = 0  # the step of the run before the first of the epoch, or of its rest

    def _training_sampler(
        self, documents: ArrowDocuments, subset: np.ndarray | None = None
    ) -> PackedBatchSampler:
        raise NotImplementedError

    def _plan_settings(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(resume_from_checkpoint, (str, Path)):
            path = Path(resume_from_checkpoint) / FILE
            self._record = EpochRecord.load(path) if path.is_file() else None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._record = None

    # --- where an epoch goes on ---------------------------------------------------------------

    def _follow_epochs(self, sampler: Any, documents: Any) -> None:
        """Let `sampler`, which trains now, go on with the epoch that a checkpoint has recorded."""
        self._sampler = self._marks = self._resumed = None
        if not isinstance(sampler, PackedBatchSampler):
            return
        self._sampler, self._sampled = sampler, documents
        record = self._record
        if record is None:
            return
        if self.args.ignore_data_skip:
            if record.epoch != record.global_step // self._num_steps(len(sampler)):
                self._resumed = Resumption(record.epoch, 0)
        else:
            self._resumed = self._place_in_epoch(record, sampler)

    def _place_in_epoch(self, record: EpochRecord, sampler: PackedBatchSampler) -> Resumption:
        """Return where the run goes on; `sampler` is given the rest of that epoch, if need be."""
        sampler.set_epoch(record.epoch)
        if not record.trained.any():
            return Resumption(record.epoch, 0)
        record.check(self._plan_settings(), self._marks_of_documents())
        began_whole = not record.before.any()
        rest = None if began_whole else self._rest(record.epoch, record.before)
        running = sampler if rest is None else rest.sampler
        trained = record.trained[~record.before]
        if (began_whole or rest) and _holds(running, record.steps, trained):
            sampler.resumed_epoch = rest
            return Resumption(record.epoch, record.steps)
        sampler.resumed_epoch = self._rest(record.epoch, record.trained)
        epoch = record.epoch + (sampler.resumed_epoch is None)
        return Resumption(epoch, 0, is_planned_anew=True)

    def _rest(self, epoch: int, trained: np.ndarray) -> ResumedEpoch | None:
        """Return what `epoch` has left where it has `trained` those, None if that is nothing."""
        left = np.flatnonzero(~trained)
        if not len(left) or not self._fills_a_micro_batch(len(left)):
            return None
        sampler = self._training_sampler(self._sampled, left)
        sampler.set_epoch(epoch)
        share = trained.sum() / len(left)
        behind = round(self._num_steps(len(sampler)) * share) * sampler.accumulation
        return ResumedEpoch(epoch, left, sampler, behind)

    def _fills_a_micro_batch(self, num_documents: int) -> bool:
        """Whether something is left of so many documents, as `dataloader_drop_last` asks."""
        assert self._sampler is not None
        return num_documents >= self._sampler.documents_multiple_of

    def _num_steps(self, num_micro_batches: int) -> int:
        """Return the optimizer steps of so many micro-batches of a rank."""
        return -(-num_micro_batches // self.args.gradient_accumulation_steps)

    def _rest_of(self, epoch: int) -> ResumedEpoch | None:
        rest = None if self._sampler is None else self._sampler.resumed_epoch
        return rest if rest is not None and rest.epoch == epoch else None

    # --- what `Trainer` counts by itself ------------------------------------------------------

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count the epochs and steps that are left from where the resumed epoch goes on."""
        found = super().set_initial_training_values(args, dataloader)
        if self._resumed is None:
            return found
        num_epochs, per_epoch, *others, max_steps = found
        num_epochs, max_steps = self._schedule(num_epochs, per_epoch, max_steps)
        assert self._record is not None
        changed = self._record.changed(self._plan_settings())
        if changed or self._resumed.is_planned_anew:
            logger.warning(
                f"resumed with {changed or 'another order of documents'}: "
                f"{self._what_follows(max_steps)}; training ends after step {max_steps:,}"
            )
        return (num_epochs, per_epoch, *others, max_steps)

    def _schedule(self, num_epochs: int, per_epoch: int, max_steps: int) -> tuple[int, int]:
        """Return the number of epochs and of optimizer steps of the whole run."""
        assert self._record is not None
        assert self._resumed is not None
        epoch, behind, _ = self._resumed
        step, rest = self._record.global_step, self._rest_of(epoch)
        if rest is None and step == epoch * per_epoch + behind:
            return num_epochs, max_steps  # as `Trainer` counts
        in_epoch = per_epoch
        if rest is not None:
            in_epoch = self._num_steps(len(rest))
            behind += self._num_steps(rest.num_skipped)
        if self.args.max_steps > 0:
            later = max(max_steps - step - (in_epoch - behind), 0)
            num_epochs = epoch + 1 + -(-later // per_epoch)
        else:
            asked = self.args.num_train_epochs - epoch
            left = max(_ceil(min(asked, 1) * in_epoch) - behind, 0)
            max_steps = step + left + max(_ceil((asked - 1) * per_epoch), 0)
        return (num_epochs if max_steps > step else epoch), max_steps

    def _what_follows(self, max_steps: int) -> str:
        assert self._record is not None
        assert self._resumed is not None
        if max_steps <= self._record.global_step:
            return "nothing is left to train"
        rest = self._rest_of(self._resumed.epoch)
        if rest is not None:
            left, number = len(rest.documents), len(self._sampled)
            return f"the epoch goes on with the {left:,} of {number:,} documents that it had left"
        if self.args.ignore_data_skip:
            return "the epoch begins anew, as ignore_data_skip=True asks"
        if self._resumed.steps == 0:
            return "a whole epoch begins"
        return "the optimizer steps hold the same documents as then, and go on"

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Go on where the record in the checkpoint says."""
        epoch, skipped = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._resumed is not None:
            epoch, behind, _ = self._resumed
            rest = self._rest_of(epoch)
            skipped = behind * self.args.gradient_accumulation_steps
            return epoch, skipped + (0 if rest is None else rest.num_skipped)
        if skipped and self._record is not None and self._record.trained.any():
            raise ValueError(
                "the checkpoint was saved within an epoch that was packed by its lengths; on a "
                "stream, or on TRL's path, documents come in another order, so those left to train "
                "cannot be told. Resume as then, or set ignore_data_skip=True to begin the epoch "
                "anew"
            )
        if skipped and self._sampler is not None:
            logger.warning(
                f"{resume_from_checkpoint} has no {FILE}: an earlier version or another trainer "
                f"wrote it. The first {skipped:,} micro-batches of epoch {epoch} are skipped as if "
                "data and settings were those of now, which cannot be verified; documents are lost "
                "and repeated if they were not"
            )
        return epoch, skipped

    def _run_epoch(
        self,
        model: Any,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        **kwargs: Any,
    ) -> None:
        """Run an epoch, or its rest, which has other numbers of micro-batches and steps."""
        rest = self._rest_of(epoch)
        if rest is not None:
            steps_in_epoch = len(rest)
            num_update_steps_per_epoch = self._num_steps(steps_in_epoch)
        self._epoch, self._epoch_began = epoch, self.state.global_step
        if self._resumed is not None and self._resumed.epoch == epoch:
            self._epoch_began -= self._resumed.steps
        elif kwargs["epochs_trained"] == epoch and not self.args.ignore_data_skip:
            self._epoch_began -= self._num_steps(kwargs["steps_trained_in_current_epoch"])
        super()._run_epoch(
            model=model,
            epoch=epoch,
            train_dataloader=train_dataloader,
            steps_in_epoch=steps_in_epoch,
            num_update_steps_per_epoch=num_update_steps_per_epoch,
            **kwargs,
        )

    # --- saving -------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save which documents of the epoch are trained, before the checkpoint may be uploaded."""
        if self._sampler is not None and self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = Path(self._get_output_dir(trial=trial)) / name
            folder.mkdir(parents=True, exist_ok=True)
            self._record_of_now(self._sampler).save(folder / FILE)
        super()._save_checkpoint(model, trial)

    def _record_of_now(self, sampler: PackedBatchSampler) -> EpochRecord:
        rest, epoch = self._rest_of(self._epoch), self._epoch
        steps = self.state.global_step - self._epoch_began
        before = np.zeros(len(self._sampled), bool)
        trained = before.copy()
        running = sampler if rest is None else rest.sampler
        running.set_epoch(epoch)  # a callback may have asked for a dataloader of its own
        if steps >= self._num_steps(len(running)):
            epoch, steps = epoch + 1, 0
        elif rest is None:
            trained[sampler.documents_in_first_steps(steps)] = True
        else:
            before[:] = True
            before[rest.documents] = False
            trained[before] = True
            trained[rest.documents[rest.sampler.documents_in_first_steps(steps)]] = True
        return EpochRecord(
            global_step=self.state.global_step,
            epoch=epoch,
            steps=steps,
            steps_per_epoch=self._num_steps(len(sampler)),
            settings=self._plan_settings(),
            marks=self._marks_of_documents(),
            before=before,
            trained=trained,
        )

    def _marks_of_documents(self) -> DocumentMarks:
        if self._marks is None:
            self._marks = DocumentMarks.of(self._sampled)
        return self._marks


def _holds(sampler: PackedBatchSampler, steps: int, trained: np.ndarray) -> bool:
    """Whether the first `steps` optimizer steps of `sampler` hold the `trained` documents alone."""
    found = np.zeros(len(trained), bool)
    found[sampler.documents_in_first_steps(steps)] = True
    return np.array_equal(found, trained)


def _ceil(number: float) -> int:
    """Round up, but not what is whole but for the rounding of floats."""
    return math.ceil(number - 1e-9)
