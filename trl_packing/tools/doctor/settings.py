"""The options of a run, as the doctor judges them: its settings, its model's config.

Options of the script itself, such as the data, do not matter here.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoConfig
from trl import ModelConfig, TrlParser

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.command.given_options import GivenOptions
from trl_packing.tools.command.settings import check_path_exists
from trl_packing.tools.command.spelling import shorten_choices
from trl_packing.tools.command.training_command import options_of_words
from trl_packing.tools.doctor.findings import Finding

# Settings that decide the precision; where none is given, the doctor chooses.
_PRECISION = {"bf16", "fp16", "use_cpu"}

_ANYWHERE = ("--use_cpu", "True", "--bf16", "False", "--fp16", "False")


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        options: as on a command line, and in its YAML file.
        args: the config of the trainer.
        model: TRL's options of the model.
        problem: why the settings cannot be used on the device; empty if they can.
        needs: options that the run needs on this device beside those given.
    """

    options: GivenOptions
    args: Any
    model: ModelConfig
    problem: str = ""
    needs: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "RunSettings":
        """Return the settings that the words of a training command describe.

        Raises:
            ValueError: an option is unknown, or has a value that it cannot have.
        """
        options = options_of_words(words, _names(ModelConfig))
        try:
            return cls(options, *_parse(options))
        except ValueError as error:
            # Either the device refuses the precision, or the options are wrong on any device.
            return cls(options, *_parse(options, _ANYWHERE), problem=str(error))

    @property
    def output_dir(self) -> str:
        """The folder of the run."""
        return str(self.args.output_dir)

    def on(self, device: Any) -> "RunSettings":
        """Return the settings with the precision that they have on `device`.

        Settings that do not name the precision get one with which the device can train, and name
        it in `needs`.
        """
        if device.kind == "cuda" and not torch.cuda.is_available():
            return self._on_described(device)
        if not self.problem:
            return self
        if self.options.names & _PRECISION:
            reason = self.problem.rstrip(".")
            return replace(self, problem=f"{reason}; set --bf16 False, or add --use_cpu True")
        needs = ("--use_cpu", "True") if device.kind == "cpu" else ("--bf16", "False")
        return replace(self, args=_parse(self.options, needs)[0], needs=needs, problem="")

    def _on_described(self, device: Any) -> "RunSettings":
        """Return the settings on a GPU that is described, and not there."""
        args, names = copy.copy(self.args), self.options.names
        args.fp16, args.bf16 = "fp16" in names, not names & {"fp16", "bf16"}
        if args.bf16 and (device.capability or (8, 0)) < (8, 0):
            args.bf16 = False
            return replace(self, args=args, needs=("--bf16", "False"), problem="")
        return replace(self, args=args, problem="")

    @property
    def name(self) -> str | None:
        """Name of the model, None without one."""
        return self.model.model_name_or_path

    @property
    def precision(self) -> str:
        """The dtypes of products and of weights, in words."""
        half = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else ""
        weights = str(self.dtype).removeprefix("torch.")
        return f"{half} (autocast), weights in {weights}" if half else f"weights in {weights}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32, as TRL loads them, unless the options name another."""
        given = (self.args.model_init_kwargs or {}).get("dtype")
        if given is None and "dtype" in self.options.names:
            given = self.model.dtype
        named = getattr(torch, str(given).removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else torch.float32

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype in which attention is computed."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.dtype


def _names(kind: Any) -> set[str]:
    return {field.name for field in fields(kind)}


def _parse(options: GivenOptions, more: Sequence[str] = ()) -> tuple[Any, ModelConfig]:
    """Return the two configs, from the options that are theirs; others belong to the script."""
    options = options.only(_names(PackedSFTConfig) | _names(ModelConfig))
    in_file = {"output_dir": "outputs"} | options.in_file
    parser = TrlParser((PackedSFTConfig, ModelConfig))
    parser.error = _raise
    parser.set_defaults_with_config(**in_file)
    args, model = parser.parse_args_into_dataclasses([*options.words(), *more])
    return args, model


def _raise(message: str) -> Any:
    raise ValueError(shorten_choices(message))


# --- the model ------------------------------------------------------------------------------------


def load_config(run: RunSettings) -> tuple[Any, Finding | None]:
    """Return the config of the model, from its folder or the cache, and what is wrong with it."""
    model = run.name
    if model is None:
        return None, None
    try:
        check_path_exists("--model", model)
        config = AutoConfig.from_pretrained(
            model,
            revision=run.model.model_revision,
            trust_remote_code=run.args.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        if Path(model).exists() or "does not exist" in str(error):
            return None, Finding("fail", "model", " ".join(str(error).split()))
        if constants.HF_HUB_OFFLINE:
            text = f"{model} is not in the cache, and HF_HUB_OFFLINE is set; name a folder"
            return None, Finding("fail", "model", text)
        return None, Finding("note", "model", f"{model} is not in the cache; a run downloads it")
    if Path(model).is_dir() and not _has_weights(Path(model)):
        text = f"the folder {model} holds no weights (*.safetensors); copy them there"
        return config, Finding("fail", "model", text)
    return config, None


def _has_weights(folder: Path) -> bool:
    return any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind))
