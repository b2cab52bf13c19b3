"""Whole checkpoints: one that is being written is marked until every rank has written.

    checkpoint-20/    model.safetensors, optimizer.pt, ...
    checkpoint-40/    model.safetensors, being_written    killed here: resume from checkpoint-20

Trainer writes checkpoints in place, resumes from the highest number, whatever it holds, and makes a
new optimizer for a missing one (transformers 5.23). So files are checked before it reads them.
"""

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from trl_packing.attention.model_facts import unwrap_model
from trl_packing.attention.state import temporarily

logger = get_logger(__name__)

MARK = "being_written"


@contextmanager
def write_whole(trainer: Any, trial: Any) -> Iterator[Path]:
    """Yield the checkpoint of this step, marked on all ranks together until all have written it.

    It is uploaded, and older checkpoints are deleted, when it is whole.
    """
    args, limit = trainer.args, trainer.args.save_total_limit
    name = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
    checkpoint = Path(trainer._get_output_dir(trial=trial)) / name
    if args.should_save:
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / MARK).touch()
    trainer.accelerator.wait_for_everyone()
    trainer._push_from_checkpoint = lambda folder: None  # the mark would go with it
    try:
        with temporarily(args, save_total_limit=None):
            yield checkpoint
    finally:
        del trainer._push_from_checkpoint
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        (checkpoint / MARK).unlink(missing_ok=True)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(checkpoint))
    if args.should_save:
        best = trainer.state.best_model_checkpoint
        rotate_checkpoints(str(checkpoint.parent), limit, best, use_mtime=True)


def last_whole_checkpoint(folder: Path) -> tuple[Path | None, list[Path]]:
    """Return the last whole checkpoint of a run, and the half-written ones after it."""
    paths = folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    found = {path.name.rpartition("-")[2]: path for path in paths}
    skipped: list[Path] = []
    for number in sorted(map(int, filter(str.isdecimal, found)), reverse=True):
        checkpoint = found[str(number)]
        if not (checkpoint / MARK).exists():
            return checkpoint, skipped
        skipped.append(checkpoint)
    return None, skipped


def checkpoint_to_resume(asked: Any, trainer: Any) -> Any:
    """Return the checkpoint to resume from: `asked`, or the last whole one for True.

    Raises:
        ValueError: it is half-written, or a part is missing or damaged.
    """
    if asked is True:
        whole, skipped = last_whole_checkpoint(Path(trainer.args.output_dir))
        if whole is not None and skipped:
            logger.warning(f"{skipped[0].name} is half-written: resuming from {whole}")
        asked = whole or (skipped[0] if skipped else True)
    if not isinstance(asked, (str, Path)):
        return asked
    checkpoint = Path(asked)
    if (checkpoint / MARK).exists():
        raise _refused(checkpoint, f"is half-written (it has a file {MARK!r})")
    check_readable(checkpoint)
    if not trainer.is_deepspeed_enabled:  # it stops by itself without its optimizer files
        check_optimizer(checkpoint, save_only_model=trainer.args.save_only_model)
    return str(asked)


def _refused(checkpoint: Path, problem: str) -> ValueError:
    return ValueError(f"{checkpoint} {problem}; resume from another checkpoint, or start anew")


def check_readable(checkpoint: Path) -> None:
    """Raise ValueError naming a damaged file of `checkpoint`; tensors are not read."""
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise _refused(checkpoint, f"has no {TRAINER_STATE_NAME}, so it is no checkpoint of a run")
    for path in sorted(each for each in checkpoint.iterdir() if each.is_file()):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "pt"):
                    continue
            if path.suffix == ".json":
                json.loads(path.read_text(encoding="utf-8"))
            if path.suffix in (".bin", ".npz", ".pt", ".pth") and path.name != "training_args.bin":
                with path.open("rb") as file:
                    is_archive = file.read(2) in (b"PK", b"")  # others do not mark their end
                if is_archive and not zipfile.is_zipfile(path):
                    raise ValueError("its end is missing")
        except (SafetensorError, OSError, ValueError) as problem:
            raise _refused(checkpoint, f"has a damaged {path.name} ({problem})") from problem


def check_optimizer(checkpoint: Path, *, save_only_model: bool) -> None:
    """Raise ValueError if the optimizer or its schedule is missing: Trainer would make new ones.

    A checkpoint of the model alone, as `save_only_model` saves it, is resumed with a warning.
    """
    # An optimizer is a file, one file a rank, or a folder of shards.
    files = [path.name for path in checkpoint.iterdir()]
    missing = [] if any("optimizer" in name for name in files) else ["optimizer.pt"]
    missing += [] if "scheduler.pt" in files else ["scheduler.pt"]
    problem = f"has no {' and no '.join(missing)}: new ones begin (save_only_model=True allows it)"
    # `save_only_model` leaves out the states of random generators too.
    is_model_alone = len(missing) == 2 and not list(checkpoint.glob("rng_state*.pth"))
    if missing and not (save_only_model or is_model_alone):
        raise _refused(checkpoint, problem)
    if missing:
        logger.warning(f"{checkpoint} {problem}")


@torch.no_grad()
def load_renamed(trainer: Any, checkpoint: Any) -> None:
    """Load the weights of `checkpoint` into the model if they have other names there.

    `from_pretrained` translates older names of vision-language models; `Trainer` does not when it
    resumes or loads the best model (5.23), and trains on with the weights from before.
    """
    model, is_sharded = trainer.model, trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if is_sharded or not isinstance(checkpoint, (str, Path)):
        return
    index, single = Path(checkpoint) / SAFE_WEIGHTS_INDEX_NAME, Path(checkpoint) / SAFE_WEIGHTS_NAME
    saved: set[str] = set()
    if index.is_file():
        saved = set(json.loads(index.read_text())["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            saved = set(file.keys())
    if isinstance(model, PreTrainedModel) and not saved <= model.state_dict().keys():
        inner: Any = unwrap_model(model)
        inner.load_state_dict(
            type(inner).from_pretrained(checkpoint, dtype=inner.dtype).state_dict()
        )
