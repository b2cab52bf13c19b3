"""Which checkpoints are whole: one that is being written is marked until every rank has written.

    checkpoint-20/    model.safetensors, optimizer.pt, ...
    checkpoint-40/    model.safetensors, being_written    killed here: resume from checkpoint-20

Trainer writes checkpoints in place and resumes from the highest number, whatever it holds
(transformers 5.23). A checkpoint without the mark is whole, whoever wrote it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = get_logger(__name__)

MARK = "being_written"


@contextmanager
def marked_while_written(checkpoint: Path, accelerator: Any) -> Iterator[None]:
    """Mark `checkpoint` as half-written; on all ranks together, until all have left."""
    mark = checkpoint / MARK
    if accelerator.is_main_process:
        checkpoint.mkdir(parents=True, exist_ok=True)
        mark.touch()
    accelerator.wait_for_everyone()
    yield
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        mark.unlink(missing_ok=True)


def is_whole(checkpoint: Path) -> bool:
    """Return whether nobody was stopped while writing `checkpoint`."""
    return not (checkpoint / MARK).exists()


def last_whole_checkpoint(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the last whole checkpoint of a run, and the half-written ones after it."""
    skipped: list[Path] = []
    for checkpoint in sorted(folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step, reverse=True):
        if _step(checkpoint) < 0:
            continue
        if is_whole(checkpoint):
            return checkpoint, skipped
        skipped.append(checkpoint)
    return None, skipped


def checkpoint_to_resume(asked: Any, output_dir: str) -> Any:
    """Return what `Trainer.train` is to resume from: `asked`, or the last whole one for True.

    Raises ValueError for a half-written checkpoint, and if there are no others.
    """
    if asked is True:
        whole, skipped = last_whole_checkpoint(Path(output_dir))
        names = ", ".join(checkpoint.name for checkpoint in skipped)
        if skipped and whole is None:
            raise ValueError(
                f"no checkpoint in {output_dir} is whole: {names} was being written when its run "
                "stopped; start without resume_from_checkpoint"
            )
        if skipped:
            logger.warning(f"{names} is half-written: resuming from {whole}")
        return asked if whole is None else str(whole)
    if isinstance(asked, (str, Path)) and not is_whole(Path(asked)):
        raise ValueError(
            f"resume_from_checkpoint={str(asked)!r} is half-written (it has a file {MARK!r}): its "
            "run was stopped while saving; name an earlier one, or True for the last whole one"
        )
    return asked


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and checkpoint.is_dir() else -1
