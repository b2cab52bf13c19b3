"""Whole checkpoints: one that is being written is marked until every rank has written.

    checkpoint-20/    model.safetensors, optimizer.pt, ...
    checkpoint-40/    model.safetensors, being_written    killed here: resume from checkpoint-20

Trainer writes checkpoints in place, resumes from the highest number, whatever it holds, and makes a
new optimizer for a missing one (transformers 5.23).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers import PreTrainedModel
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    get_last_checkpoint,
    rotate_checkpoints,
)

from trl_packing.attention.model_facts import temporarily, unwrap_model

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
    with (
        temporarily(args, save_total_limit=None),
        temporarily(trainer, _push_from_checkpoint=lambda folder: None),  # the mark would go along
    ):
        yield checkpoint
    trainer.accelerator.wait_for_everyone()
    if args.should_save:
        (checkpoint / MARK).unlink(missing_ok=True)
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(checkpoint))
    if args.should_save:
        rotate_checkpoints(
            str(checkpoint.parent), limit, trainer.state.best_model_checkpoint, use_mtime=True
        )


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint of a run that is not half-written; None if there is none."""
    steps = {p.name.rpartition("-")[2]: p for p in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    whole = [n for n, path in steps.items() if n.isdecimal() and not (path / MARK).exists()]
    return steps[max(whole, key=int)] if whole else None


def checkpoint_to_resume(asked: Any, trainer: Any) -> Any:
    """Return the checkpoint to resume from: `asked`, or the last whole one for True.

    Raises:
        ValueError: there is none, it is half-written, or its optimizer is missing.
    """
    if asked in ("True", "true", "False", "false"):  # of a command line
        asked = asked in ("True", "true")
    if asked is True:
        folder = trainer.args.output_dir
        found = Path(folder).is_dir() and get_last_checkpoint(folder)
        asked = last_whole_checkpoint(Path(folder)) or found
        if not asked:
            raise ValueError(
                f"resume_from_checkpoint=True, but output_dir={folder!r} has no checkpoint; name "
                "the output_dir of the run that was interrupted, or leave it out to start anew"
            )
    if not isinstance(asked, (str, Path)):
        return asked
    if not Path(asked).is_dir():
        raise ValueError(
            f"resume_from_checkpoint={str(asked)!r} is no folder; name one ('outputs/checkpoint-N')"
            ", or True for the last one in output_dir"
        )
    if inside := last_whole_checkpoint(Path(asked)):
        raise ValueError(
            f"resume_from_checkpoint={str(asked)!r} is a folder of checkpoints; name one of them: "
            f"{str(inside)!r}"
        )
    # DeepSpeed stops by itself without the files of its optimizer.
    may_lack_optimizer = trainer.args.save_only_model or trainer.is_deepspeed_enabled
    if problem := _problem_of(Path(asked), may_lack_optimizer):
        raise ValueError(f"{asked} {problem}; resume from another checkpoint, or start anew")
    return str(asked)


def _problem_of(checkpoint: Path, may_lack_optimizer: bool) -> str:
    """Return why nobody can resume from a folder, "" if it is whole."""
    # An optimizer is a file, one file a rank, or a folder of shards.
    names = [path.name for path in checkpoint.iterdir()]
    if MARK in names:
        return f"is half-written (it has a file {MARK!r})"
    is_complete = "scheduler.pt" in names and any("optimizer" in name for name in names)
    if not (is_complete or may_lack_optimizer):
        return "has no optimizer or no scheduler: new ones begin (save_only_model=True allows it)"
    if "optimizer.pt" in names:  # GaLore and APOLLO save objects of their own
        for name in get_unsafe_globals_in_checkpoint(checkpoint / "optimizer.pt"):
            return (
                f"has {name} in its optimizer, which torch.load refuses: pass the class to "
                "torch.serialization.add_safe_globals before train()"
            )
    return ""


@torch.no_grad()
def load_renamed(trainer: Any, checkpoint: Any) -> None:
    """Load the weights of `checkpoint` into the model if they have other names there.

    `from_pretrained` translates older names of vision-language models; `Trainer` does not when it
    resumes or loads the best model (5.23), and trains on with the weights from before.
    """
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if is_sharded or not isinstance(checkpoint, (str, Path)):
        return
    saved: set[str] = set()
    for path in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            saved |= {*file.keys()}
    model = trainer.model
    if isinstance(model, PreTrainedModel) and not saved <= model.state_dict().keys():
        inner: Any = unwrap_model(model)
        inner.load_state_dict(
            type(inner).from_pretrained(checkpoint, dtype=inner.dtype).state_dict()
        )
