"""The options of a run, as the doctor judges them: its settings, its adapter, its model's config.

Options of the script itself, such as the data, do not matter here.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from trl import ModelConfig, TrlParser, get_peft_config

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.command.given_options import GivenOptions
from trl_packing.tools.command.settings import check_path_exists
from trl_packing.tools.command.spelling import shorten_choices
from trl_packing.tools.command.training_command import options_of_words
from trl_packing.tools.doctor.machine import Device

# Settings that decide the precision; where none is given, the doctor chooses.
_PRECISION = {"bf16", "fp16", "use_cpu"}

# Recipes that train an adapter without an option that says so.
_ADAPTERS = ("lora", "dora", "qlora")

_ANYWHERE = ("--use_cpu", "True", "--bf16", "False", "--fp16", "False")


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        options: as on a command line, and in its YAML file.
        args: the config of the trainer.
        model: TRL's options of the model.
        script: name of the training script without its ending; empty without one.
        problem: why the settings cannot be used on the device; empty if they can.
        needs: options that the run needs on this device beside those given.
    """

    options: GivenOptions
    args: Any
    model: ModelConfig
    script: str = ""
    problem: str = ""
    needs: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "RunSettings":
        """Return the settings that the words of a training command describe.

        Raises:
            ValueError: an option is unknown, or has a value that it cannot have.
        """
        options = options_of_words(words, _names(ModelConfig))
        named = words[0] if words and not words[0].startswith("-") else ""
        script = Path(named).stem.rpartition(".")[2]
        try:
            return cls(options, *_parse(options), script)
        except ValueError as error:
            # Either the device refuses the precision, or the options are wrong on any device.
            return cls(options, *_parse(options, _ANYWHERE), script, problem=str(error))

    @property
    def output_dir(self) -> str:
        """The folder of the run."""
        return str(self.args.output_dir)

    def on(self, device: Device) -> "RunSettings":
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

    def _on_described(self, device: Device) -> "RunSettings":
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

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have 4 or 8 bits."""
        return self.model.load_in_4bit or self.model.load_in_8bit or self.script == "qlora"

    @property
    def lora(self) -> Any:
        """The adapter, or None. Recipes of adapters need no ``--use_peft``."""
        adapter = {name for name in self.options.names if name.startswith("lora_")}
        if not (self.model.use_peft or adapter or self.script in _ADAPTERS):
            return None
        lora = get_peft_config(replace(self.model, use_peft=True))
        if lora is not None and lora.target_modules is None:
            lora.target_modules = "all-linear"
        return lora


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


def load_config(run: RunSettings, *, online: bool) -> tuple[Any, str]:
    """Return the config of a model and "", or None and why training would fail.

    Args:
        run: names it, its revision, and whether code from the hub is trusted.
        online: whether the hub answers; the cache is searched otherwise, without waiting.
    """
    model = str(run.name)
    try:
        check_path_exists("--model", model)
        config = AutoConfig.from_pretrained(
            model,
            revision=run.model.model_revision,
            trust_remote_code=run.args.trust_remote_code,
            local_files_only=not online and not Path(model).is_dir(),
        )
    except (OSError, ValueError) as error:
        words = " ".join(str(error).split())
        if not online and "does not exist" not in words and not Path(model).exists():
            words = f"{model} is not in the cache, and the hub is not reachable; name a folder"
        return None, words
    if Path(model).is_dir() and not _has_weights(Path(model)):
        return config, f"the folder {model} holds no weights (*.safetensors); copy them there"
    return config, ""


def _has_weights(folder: Path) -> bool:
    return any(True for kind in ("*.safetensors", "*.bin") for _ in folder.glob(kind))
