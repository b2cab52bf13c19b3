"""Verify one model: measure whether packed documents see each other, backend by backend."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from trl_packing.attention.backends import AttentionChoice, resolve_attention
from trl_packing.attention.install import take_prefix_keys
from trl_packing.config import PackingOptions
from trl_packing.isolation.check import (
    CheckResult,
    Refusal,
    attempt,
    check_prefixes,
    random_tokens,
)
from trl_packing.isolation.guard import check_backend, with_fallbacks
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.exactness.with_images import ImageProbes
from trl_packing.tools.training_command import check_path_exists, config_of

# The longest probe of a run without a max_length, in tokens.
_LONGEST_PROBE = 1024


@dataclass(frozen=True)
class BackendResult:
    """The result of one attention backend.

    Attributes:
        backend: its name.
        result: of the check.
        images: documents of a check with images; 0 for a check of text.
    """

    backend: str
    result: CheckResult
    images: int = 0

    @property
    def is_exact(self) -> bool:
        return bool(self.result)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON: the verdict and its evidence, or the refusal."""
        named = {"backend": self.backend} | ({"images": self.images} if self.images else {})
        if isinstance(self.result, Refusal):
            return named | {"verdict": "refused", "reason": str(self.result)}
        return named | asdict(self.result)

    def __str__(self) -> str:
        name = "  with images" if self.images else self.backend
        if isinstance(self.result, Refusal):
            return f"{name:14} refused: {self.result}"
        found, gradients = self.result, self.result.gradient_difference
        first = f", first in {found.first_layer}" if found.first_layer else ""
        further = f"\n{'':14} gradients {gradients:.1e}" if gradients is not None else ""
        return (
            f"{name:14} {found.verdict}: max |Δlogit| {found.difference:.1e}, "
            f"rounding {found.noise:.1e},\n{'':14} a leak {found.leak:.1e} "
            f"({found.probe}){first}{further}"
        )


@dataclass(frozen=True)
class VerifiedModel:
    """A model, and the settings by which it is verified.

    Attributes:
        model: on its device.
        name: as the user wrote it.
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
            model: a hub id, a folder with a causal language model, or a model.
            args: the settings of the run: `attention`, `max_length`, `model_init_kwargs`.
            dtype: a data type of torch, or ``"auto"``; None: that of the run, or float32.
            device: None uses CUDA if it is available, and the CPU otherwise.

        Raises:
            ValueError: an argument cannot be used. The model is not loaded then.
        """
        given = dict(args.model_init_kwargs or {})
        dtype = dtype or given.pop("dtype", None) or "float32"
        longest = args.max_length or _LONGEST_PROBE
        _check_arguments(str(dtype), device, longest)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        name = model if isinstance(model, str) else type(model).__name__
        if isinstance(model, str):
            check_path_exists("the model", model)
            loading = {
                "dtype": dtype,
                "trust_remote_code": args.trust_remote_code,
                "revision": given.get("revision") or "main",
            }
            model = _load(name, _class_of(model, args), loading)
        return cls(model.to(device), name, PackingOptions.of(args).attention, longest)

    def verify(
        self, *, gradients: bool = False, images: ImageProbes | None = None
    ) -> Iterator[BackendResult]:
        """Yield the result of each backend, from fast to slow, until one is exact on the model.

        A backend that is exact on text is then checked with images.

        Args:
            gradients: compare gradients too.
            images: documents with images; None checks text alone.
        """
        first = resolve_attention(self.model, self.attention)
        choices: list[AttentionChoice] = [first]
        if self.attention == "auto":
            choices = with_fallbacks(first)
        for choice in choices:
            result = BackendResult(
                choice.backend,
                check_backend(
                    self.model,
                    choice,
                    training=True,
                    max_length=self.max_length,
                    gradients=gradients,
                ),
            )
            yield result
            if result.is_exact and images is not None:
                checked = images.check(self.model, choice.backend, gradients=gradients)
                result = BackendResult(choice.backend, checked, len(images.documents))
                yield result
            if result.is_exact:
                return

    def verify_prefixes(self, attention: str, *, gradients: bool = False) -> BackendResult:
        """Return whether documents with a common prefix may share it, by an installed backend.

        Args:
            attention: the backend that `verify` has found to be exact.
            gradients: compare gradients too.
        """
        if reason := take_prefix_keys(self.model, attention):
            return BackendResult("prefixes", Refusal(reason))
        longest = random_tokens(self.model, np.random.default_rng(1))(self.max_length)
        result = attempt(
            lambda: check_prefixes(
                self.model,
                [longest],
                collator=PackedCollator(),
                training=True,
                attention=attention,
                gradients=gradients,
            )
        )
        return BackendResult("prefixes", result)

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


def _load(name: str, model_class: Any, loading: dict[str, Any]) -> Any:
    """Return the model called `name`. Raises ValueError for a file of weights that is damaged."""
    try:
        return model_class.from_pretrained(name, **loading)
    except SafetensorError as error:
        raise ValueError(
            f"the weights of the model {name} cannot be read ({error}); copy or download them again"
        ) from error


def _class_of(name: str, args: Any) -> Any:
    """Return the class that loads a model: of vision-language models if it is no other one."""
    kind = config_of(name, args).model_type
    reads_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys()
    is_text = kind not in reads_images or kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return AutoModelForCausalLM if is_text else AutoModelForImageTextToText


def _check_arguments(dtype: str, device: str | None, max_length: int) -> None:
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--dtype {dtype} is no data type of torch; try float32 or bfloat16")
    if max_length < 2:
        raise ValueError(f"--max_length {max_length} must be at least 2")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {device} cannot be used: {error}") from error
