"""The arguments that a training script passes to `PackedSFTTrainer`, without training.

train.py --config run.yaml  →  the script runs up to PackedSFTTrainer(…)  →  its arguments

The script itself loads and converts its data, so the rows are those that it would train.
"""

import inspect
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

from transformers import Trainer, TrainingArguments
from trl import SFTTrainer

from trl_packing.tools.command.options import short_usage_errors
from trl_packing.trainer import PackedSFTTrainer

# A machine without a GPU accepts these arguments. None of them affects the data.
_ON_ANY_MACHINE = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "report_to": "none",
    "push_to_hub": False,
}


@dataclass(frozen=True)
class TrainerCall:
    """The arguments of `PackedSFTTrainer` that decide how data are prepared and packed.

    Attributes:
        model: a name, or a model.
        args: a `PackedSFTConfig` or a plain `SFTConfig`.
        train_dataset: rows, or a stream.
        processing_class: the tokenizer; None: the model's.
        data_collator: None, or a collator that finds the trained tokens.
        formatting_func: the user's function from a row to its text.
        eval_dataset: rows, a dictionary of data sets, or None.
        compute_loss_func: the user's loss, or None.
    """

    model: Any
    args: Any
    train_dataset: Any
    processing_class: Any = None
    data_collator: Any = None
    formatting_func: Any = None
    eval_dataset: Any = None
    compute_loss_func: Any = None


class _Reached(BaseException):
    """The script has built its trainer. No `except Exception` of the script catches this."""

    def __init__(self, call: TrainerCall) -> None:
        self.call = call


class _OtherTrainer(BaseException):
    """The script has built a trainer that is not `PackedSFTTrainer`."""


def call_of_script(
    script: str, words: Sequence[str], *, is_module: bool = False, on_any_machine: bool = True
) -> TrainerCall:
    """Run `script` up to its first `PackedSFTTrainer`, and return the arguments of that.

    Its output goes to stderr. The trainer is not built: nothing is trained or written by it.

    Args:
        script: a Python file, or the name of a module.
        words: its command line.
        is_module: `script` is the name of a module.
        on_any_machine: change settings that need another device, such as bf16.

    Raises:
        ValueError: the script ends before, or builds another trainer.
    """
    name = script.rpartition(".")[2] + ".py" if is_module else Path(script).name
    try:
        with (
            fits_any_machine() if on_any_machine else nullcontext(),
            _stops_at_trainer(script, words, is_module),
        ):
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except _Reached as reached:
        return reached.call
    except _OtherTrainer as other:
        raise ValueError(f"{name} builds {other}; only a PackedSFTTrainer can be shown") from None
    except SystemExit as end:
        if isinstance(end.code, str):
            raise ValueError(end.code) from end
        raise ValueError(f"{name} ended with status {end.code} before its trainer") from end
    raise ValueError(f"{name} builds no PackedSFTTrainer, so there is nothing to show")


@contextmanager
def fits_any_machine() -> Iterator[None]:
    """Change settings that need a GPU, or write somewhere, inside the block."""
    post_init = TrainingArguments.__post_init__

    def fit(self: Any) -> None:
        for name, value in _ON_ANY_MACHINE.items():
            if hasattr(self, name):
                setattr(self, name, value)
        post_init(self)

    with patch.object(TrainingArguments, "__post_init__", fit):
        yield


@contextmanager
def _stops_at_trainer(script: str, words: Sequence[str], is_module: bool) -> Iterator[None]:
    """Make a trainer raise `_Reached`, and errors one line."""
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(patch.object(PackedSFTTrainer, "__init__", _reach))
        for other in (SFTTrainer, Trainer):
            stack.enter_context(patch.object(other, "__init__", _refuse_trainer))
        stack.enter_context(short_usage_errors())
        stack.enter_context(patch.object(sys, "argv", [script, *words]))
        if not is_module:
            folder = str(Path(script).resolve().parent)
            stack.enter_context(patch.object(sys, "path", [folder, *sys.path]))
        yield


_SIGNATURE = inspect.signature(PackedSFTTrainer.__init__)


def _reach(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    given = _SIGNATURE.bind(self, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    raise _Reached(
        TrainerCall(**{name: given.get(name) for name in TrainerCall.__dataclass_fields__})
    )


def _refuse_trainer(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    kind = type(self)
    raise _OtherTrainer(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")
