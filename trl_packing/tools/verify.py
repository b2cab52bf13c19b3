"""Verify one model: measure whether packed documents see each other, backend by backend."""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trl_packing.attention.backends import AttentionChoice, resolve_attention
from trl_packing.isolation.fallback import CheckResult, Refusal, check_backend, with_fallbacks
from trl_packing.tools.settings import check_path_exists


def verify_model(
    name: str,
    *,
    attention: str = "auto",
    dtype: str = "float32",
    device: str | None = None,
    max_length: int = 1024,
    gradients: bool = False,
) -> bool:
    """Print one line for each backend, from fast to slow, until one is exact on the model.

    Args:
        name: a hub id, or a folder with a causal language model.
        attention: the only backend to check; ``"auto"`` checks all that may be exact.
        dtype: a data type of torch, or ``"auto"``.
        device: None uses CUDA if it is available, and the CPU otherwise.
        max_length: the longest probe, in tokens.
        gradients: compare gradients too.

    Returns:
        Whether a backend is exact.

    Raises:
        ValueError: an argument cannot be used. The model is not loaded then.
    """
    _check_arguments(name, dtype, device, max_length)
    transformers_logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
    first = resolve_attention(model, attention)
    print(f"{name}: {type(model).__name__}, {model.dtype}, {device}\n")
    for choice in with_fallbacks(first) if attention == "auto" else [first]:
        result = check_backend(
            model, choice, training=True, max_length=max_length, gradients=gradients
        )
        print(_line(choice, result))
        if result:
            print(f"\nTraining on packed documents is exact with attention={choice.backend!r}.")
            return True
    print("\nNo attention backend keeps the documents of a packed row apart on this model.")
    return False


def _check_arguments(name: str, dtype: str, device: str | None, max_length: int) -> None:
    check_path_exists("--model", name)
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--dtype {dtype} is no data type of torch; try float32 or bfloat16")
    if max_length < 2:
        raise ValueError(f"--max-length {max_length} must be at least 2")
    if device is not None:
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {device} cannot be used: {error}") from error


def _line(choice: AttentionChoice, result: CheckResult) -> str:
    if isinstance(result, Refusal):
        return f"{choice.backend:14} refused: {result}"
    gradients = result.gradient_difference
    return (
        f"{choice.backend:14} {result.verdict:12} max |Δlogit| {result.difference:.1e}, rounding "
        f"{result.noise:.1e}, a leak {result.leak:.1e} ({result.probe})"
        + (f", first in {result.first_layer}" if result.first_layer else "")
        + (f", gradients {gradients:.1e}" if gradients is not None else "")
    )
