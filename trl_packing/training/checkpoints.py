"""Whole checkpoints: one that is being written is marked until every rank has written.

    checkpoint-20/    model.safetensors, optimizer.pt, ...
    checkpoint-40/    model.safetensors, being_written    killed here: resume from checkpoint-20

Trainer writes checkpoints in place and resumes from the highest number, whatever it holds
(transformers 5.23). A checkpoint without the mark is whole, whoever wrote it. Its files are checked
before anything is read: a full disk or a broken copy may have cut one short, and Trainer silently
replaces a missing optimizer by a new one.
"""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from safetensors import SafetensorError, safe_open
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from trl_packing.attention.state import temporarily

logger = get_logger(__name__)

MARK = "being_written"

_JSON_THAT_IS_READ = (
    TRAINER_STATE_NAME,
    "config.json",
    "adapter_config.json",
    "*.index.json",
    "stream_*.json",
)


@contextmanager
def write_whole(trainer: Any, trial: Any) -> Iterator[Path]:
    """Yield the checkpoint of this step, marked while the block writes it.

    It is uploaded, and older checkpoints are deleted, when it is whole.

    Args:
        trainer: of the run.
        trial: of a hyperparameter search; None without one.
    """
    args, limit = trainer.args, trainer.args.save_total_limit
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    checkpoint = Path(trainer._get_output_dir(trial=trial)) / name
    trainer._push_from_checkpoint = lambda folder: None  # the mark would go with it
    try:
        with temporarily(args, save_total_limit=None), mark_as_half_written(checkpoint, trainer):
            yield checkpoint
    finally:
        del trainer._push_from_checkpoint
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(checkpoint))
    if args.should_save:
        best = trainer.state.best_model_checkpoint
        rotate_checkpoints(str(checkpoint.parent), limit, best, use_mtime=True)


@contextmanager
def mark_as_half_written(checkpoint: Path, trainer: Any) -> Iterator[None]:
    """Mark `checkpoint` inside the block, on all ranks together, until all have left it.

    With `save_on_each_node`, each node marks its own.
    """
    mark, accelerator = checkpoint / MARK, trainer.accelerator
    if trainer.args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        mark.touch()
    accelerator.wait_for_everyone()
    yield
    accelerator.wait_for_everyone()
    if trainer.args.should_save:
        mark.unlink(missing_ok=True)


def is_whole(checkpoint: Path) -> bool:
    """Return whether `checkpoint` was written to its end."""
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


def checkpoint_to_resume(asked: Any, trainer: Any) -> Any:
    """Return the checkpoint to resume from: `asked`, or the last whole one for True.

    Raises:
        ValueError: before anything is read, if the checkpoint is half-written and so are all
            others, or if a part is missing or damaged.
    """
    checkpoint = _whole_checkpoint(asked, trainer.args.output_dir)
    if isinstance(checkpoint, (str, Path)):
        check_readable(Path(checkpoint))
        if not trainer.is_deepspeed_enabled:
            check_optimizer(Path(checkpoint), save_only_model=trainer.args.save_only_model)
    return checkpoint


def _whole_checkpoint(asked: Any, output_dir: str) -> Any:
    """Return `asked`, or the last whole checkpoint of the run for True."""
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


def check_readable(checkpoint: Path) -> None:
    """Raise ValueError naming a damaged file of `checkpoint`; tensors are not read."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} has no {TRAINER_STATE_NAME}, so it is no "
            f"checkpoint of a training; name one{_others(checkpoint)}"
        )
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and (problem := _damage(path)):
            raise ValueError(
                f"{path} is damaged ({problem}): it was cut short when it was written or copied. "
                f"Copy it again, or resume from another checkpoint{_others(checkpoint)}"
            )


def check_optimizer(checkpoint: Path, *, save_only_model: bool) -> None:
    """Raise ValueError if the optimizer or its schedule is missing: Trainer would make new ones.

    A checkpoint of the model alone, as `save_only_model` saves it, is resumed with a warning.
    DeepSpeed stores the optimizer in other files, and stops without them.
    """
    missing = [
        name
        for name, is_there in (
            ("optimizer.pt", _has_optimizer(checkpoint)),
            ("scheduler.pt", (checkpoint / "scheduler.pt").is_file()),
        )
        if not is_there
    ]
    if not missing:
        return
    words = " and no ".join(missing)
    # `save_only_model` leaves out the states of random generators too.
    if save_only_model or (len(missing) == 2 and not list(checkpoint.glob("rng_state*.pth"))):
        logger.warning(
            f"{checkpoint} has no {words}, as save_only_model=True saves it: the optimizer and the "
            "learning rate's schedule restart"
        )
        return
    raise ValueError(
        f"{checkpoint} has no {words}: the optimizer and the learning rate's schedule would "
        f"restart. Resume from another checkpoint{_others(checkpoint)}, or set "
        "save_only_model=True to continue with new ones"
    )


def _has_optimizer(checkpoint: Path) -> bool:
    """Return whether there is an optimizer: a file, one file a rank, or a folder of shards."""
    return any("optimizer" in path.name for path in checkpoint.iterdir())


def _damage(path: Path) -> str | None:
    """Return what is wrong with the header or the end of a file; None if nothing is."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt"):
                return None
        if any(path.match(name) for name in _JSON_THAT_IS_READ):
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, OSError, ValueError) as problem:
        return str(problem)
    if path.suffix in (".bin", ".npz", ".pt", ".pth") and path.name != "training_args.bin":
        with path.open("rb") as file:
            is_archive = file.read(2) in (b"PK", b"")  # other formats do not mark their end
        if is_archive and not zipfile.is_zipfile(path):
            return "its end is missing"
    return None


def _others(checkpoint: Path) -> str:
    """Return the other whole checkpoints beside `checkpoint`, in words."""
    beside = sorted(checkpoint.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*"), key=_step)
    names = [p.name for p in beside if _step(p) >= 0 and is_whole(p) and p.name != checkpoint.name]
    return f" ({', '.join(names[-3:])})" if names else ""


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and checkpoint.is_dir() else -1
