"""Verify one model: measure whether packed documents see each other, backend by backend.

Text alone is checked; a run checks images of its own data.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import take_prefix_keys
from trl_packing.config import PackingOptions
from trl_packing.isolation.check import CheckResult, Refusal, attempt, check_prefixes
from trl_packing.isolation.guard import check_backend
from trl_packing.isolation.probes import random_tokens
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.training_command import config_of, loading_options
from trl_packing.vision.support import FAMILIES


@dataclass(frozen=True)
class BackendResult:
    """The result of one attention backend."""

    backend: str
    result: CheckResult

    @property
    def is_exact(self) -> bool:
        return bool(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON: the verdict and its evidence, or the refusal."""
        named = {"backend": self.backend}
        if isinstance(self.result, Refusal):
            return named | {"verdict": "refused", "reason": str(self.result)}
        return named | asdict(self.result)

    def __str__(self) -> str:
        if isinstance(self.result, Refusal):
            return f"{self.backend:14} refused: {self.result}"
        found, gradients = self.result, self.result.gradient_difference
        further = f"\n{'':14} gradients {gradients:.1e}" if gradients is not None else ""
        return (
            f"{self.backend:14} {found.verdict}: max |Δlogit| {found.difference:.1e}, "
            f"rounding {found.noise:.1e},\n{'':14} a leak {found.leak:.1e} "
            f"({found.probe}){further}"
        )


@dataclass(frozen=True)
class VerifiedModel:
    """A model, and the settings by which it is verified.

    Attributes:
        model: on its device.
        attention: the only backend to check; ``"auto"`` checks all that may be exact.
        max_length: the longest probe, in tokens.
    """

    model: Any
    name: str
    attention: str
    max_length: int

    @classmethod
    def load(
        cls, model: Any, args: Any, *, dtype: str | None = None, device: str | None = None
    ) -> "VerifiedModel":
        """Return the model of a run.

        Args:
            model: a hub id, a folder, or a model.
            args: the settings of the run.
            dtype: a data type of torch, or ``"auto"``; None: that of the run, or float32.
            device: None uses CUDA if it is available, and the CPU otherwise.
        """
        dtype = str(dtype or (args.model_init_kwargs or {}).get("dtype") or "float32")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"--dtype {dtype} is no data type of torch; try float32 or bfloat16")
        name = model if isinstance(model, str) else type(model).__name__
        if isinstance(model, str):
            kind = config_of(model, args).model_type
            is_text = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            reads_images = not is_text and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            loader = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            model = loader.from_pretrained(model, dtype=dtype, **loading_options(args))
        longest = args.max_length or 1024
        return cls(model.to(place), name, PackingOptions.of(args).attention, longest)

    def verify(self, *, gradients: bool = False) -> Iterator[BackendResult]:
        """Yield the result of each backend, from fast to slow, until one is exact on the model."""
        first = resolve_attention(self.model, self.attention)
        options: Any = {"max_length": self.max_length, "gradients": gradients, "training": True}
        for choice in (first, *first.slower):
            result = BackendResult(choice.backend, check_backend(self.model, choice, **options))
            yield result
            if result.is_exact:
                return

    def verify_prefixes(self, attention: str, *, gradients: bool = False) -> BackendResult:
        """Return whether documents may share prefixes, by a backend that `verify` found exact."""
        if reason := take_prefix_keys(self.model, attention):
            return BackendResult("prefixes", Refusal(reason))
        longest = random_tokens(self.model, np.random.default_rng(1))(self.max_length)
        options: Any = {"attention": attention, "gradients": gradients, "training": True}
        check = partial(check_prefixes, self.model, [longest], collator=PackedCollator(), **options)
        return BackendResult("prefixes", attempt(check))

    @property
    def reads_images(self) -> bool:
        """Whether rows with images are packed for the model."""
        return self.model.config.model_type in FAMILIES

    def to_dict(self) -> dict[str, str]:
        """Return the model for JSON: name, class, data type, and type of device."""
        return {
            "model": self.name,
            "class": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
        }

    def __str__(self) -> str:
        return f"{self.name}: {type(self.model).__name__}, {self.model.dtype}, {self.model.device}"
