"""The options of a run, as the doctor judges them: its settings, its adapter, its model's config.

Options that a YAML file has for the script itself (the data, a seed of the script) do not matter
here; on the command line, an unknown option is an error.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig
from trl import ModelConfig, TrlParser, get_peft_config

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.doctor_machine import Device
from trl_packing.tools.settings import check_path_exists

# Settings that decide the precision; where none is given, the doctor chooses.
_PRECISION = ("bf16", "fp16", "use_cpu")


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        words: options as on a command line.
        args: the config of the trainer.
        model: TRL's options of the model.
        problem: why the settings cannot be used on the device; empty if they can.
        needs: options that the run needs on this device beside `words`.
    """

    words: tuple[str, ...]
    args: Any
    model: ModelConfig
    problem: str = ""
    needs: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "RunSettings":
        """Return the settings that `words` describe.

        Raises:
            ValueError: an option is unknown, or has a value that it cannot have.
        """
        try:
            return cls(tuple(words), *_parse(words))
        except ValueError as error:
            # Either the device refuses the precision, or the options are wrong on any device.
            anywhere = _parse([*words, "--use_cpu", "True", "--bf16", "False", "--fp16", "False"])
            return cls(tuple(words), *anywhere, problem=str(error))

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
        if self._names_precision():
            reason = self.problem.rstrip(".")
            return replace(self, problem=f"{reason}; set --bf16 False, or add --use_cpu True")
        needs = ("--use_cpu", "True") if device.kind == "cpu" else ("--bf16", "False")
        return replace(self, args=_parse([*self.words, *needs])[0], needs=needs, problem="")

    def _on_described(self, device: Device) -> "RunSettings":
        """Return the settings on a GPU that is described, and not there."""
        fp16 = "--fp16" in self.words
        args = copy.copy(self.args)
        args.fp16, args.bf16 = fp16, not fp16 and "--bf16" not in self.words
        if args.bf16 and (device.capability or (8, 0)) < (8, 0):
            args.bf16 = False
            return replace(self, args=args, needs=("--bf16", "False"), problem="")
        return replace(self, args=args, problem="")

    def _names_precision(self) -> bool:
        """Whether the words or their YAML file decide the precision."""
        names = {word.removeprefix("--").partition("=")[0] for word in self.words}
        for option, file in zip(self.words, self.words[1:], strict=False):
            if option == "--config":
                names |= set(yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {})
        return bool(names & set(_PRECISION))

    @property
    def precision(self) -> str:
        """How the run computes."""
        half = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else ""
        weights = str(self.dtype).removeprefix("torch.")
        return f"{half} (autocast), weights in {weights}" if half else f"weights in {weights}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32 unless the options say otherwise."""
        given = self.model.dtype or (self.args.model_init_kwargs or {}).get("dtype")
        named = getattr(torch, str(given).removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else torch.float32

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype in which attention is computed."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.dtype

    @property
    def lora(self) -> Any:
        """The adapter, or None."""
        if not self.model.use_peft:
            return None
        lora = get_peft_config(self.model)
        if lora is not None and lora.target_modules is None:
            lora.target_modules = "all-linear"
        return lora


def _parse(words: Sequence[str]) -> tuple[Any, ModelConfig]:
    # Recipes' YAML files hold options of their scripts too.
    parser = TrlParser((PackedSFTConfig, ModelConfig))
    parser.error = _raise
    output_dir = [] if any("--output_dir" in w for w in words) else ["--output_dir", "outputs"]
    args, model, unknown = parser.parse_args_and_config(
        [*output_dir, *words], return_remaining_strings=True, fail_with_unknown_args=False
    )
    if extra := [word for word in unknown if word.startswith("--") and word in words]:
        raise ValueError(f"{' '.join(extra)}: no such option; check the spelling")
    return args, model


def _raise(message: str) -> Any:
    raise ValueError(message)


# --- the model ------------------------------------------------------------------------------------


def load_config(model: str, run: RunSettings, *, online: bool) -> tuple[Any, str]:
    """Return the config of a model and "", or None and why training would fail.

    Args:
        model: a hub id or a folder.
        run: its revision, and whether code from the hub is trusted.
        online: whether the hub answers; the cache is searched otherwise, without waiting.
    """
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
