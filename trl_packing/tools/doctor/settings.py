"""The settings of a run, as its script makes them on this machine, and the config of its model."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from transformers import AutoConfig

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.doctor.findings import Finding
from trl_packing.tools.options import values_of
from trl_packing.tools.training_command import TrainingCommand, check_path_exists


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run.

    Attributes:
        args: the config of the trainer.
        model: its name, or the model; None without one.
        problem: why the run would stop before its trainer is built; empty if it would not.
        given: options of sft_packed.py by name; empty for another script.
    """

    args: Any
    model: Any = None
    problem: str = ""
    given: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "RunSettings":
        """Return the settings of a training command: the script runs up to its trainer.

        Raises:
            ValueError: an option is unknown, or has a value that it cannot have.
        """
        command = TrainingCommand.from_words(words)
        given = {} if command.is_named else values_of(command.words)
        has_model = command.is_named or "model_name_or_path" in given
        if not has_model:
            command = replace(command, words=(*command.words, "--model_name_or_path", "none"))
        problem = ""
        for on_any_machine in (False, True):
            try:
                model, args = command.model_and_settings(on_any_machine=on_any_machine)
                return cls(args, model if has_model else None, problem, given)
            except ValueError as error:
                if on_any_machine and not command.is_named:
                    raise
                problem = problem or str(error)
        return cls(PackedSFTConfig("outputs", use_cpu=True, bf16=False), None, problem, given)

    def on(self, device: Any) -> "RunSettings":
        """Return the settings with the precision that they have on `device`."""
        if device.kind == "cuda" and not torch.cuda.is_available():  # described, and not there
            args = copy.copy(self.args)
            args.fp16, args.bf16 = (
                "fp16" in self.given,
                self.given.keys().isdisjoint(("fp16", "bf16")),
            )
            if (device.capability or (8, 0)) < (8, 0):
                args.bf16 = False
            return replace(self, args=args, problem="")
        if "bf16" in self.problem:
            way_out = "set bf16 to false, or add use_cpu"
            return replace(self, problem=f"{self.problem.rstrip('.')}; {way_out}")
        return self

    @property
    def precision(self) -> str:
        """The dtypes of products and of weights, in words."""
        half = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else ""
        weights = str(self.dtype).removeprefix("torch.")
        return f"{half} (autocast), weights in {weights}" if half else f"weights in {weights}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32, as TRL loads them, unless the options name another."""
        given = (self.args.model_init_kwargs or {}).get("dtype", getattr(self.model, "dtype", None))
        named = getattr(torch, str(given).removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else torch.float32

    @property
    def attention_dtype(self) -> torch.dtype:
        """The dtype in which attention is computed."""
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.dtype


# --- the model ------------------------------------------------------------------------------------


def load_config(run: RunSettings) -> tuple[Any, Finding | None]:
    """Return the config of the model, from its folder or the cache, and what is wrong with it."""
    model = run.model
    if not isinstance(model, str):
        return getattr(model, "config", None), None
    try:
        check_path_exists("--model", model)
        config = AutoConfig.from_pretrained(
            model,
            revision=(run.args.model_init_kwargs or {}).get("revision") or "main",
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
