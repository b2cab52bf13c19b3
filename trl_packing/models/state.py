"""Run a model and leave no trace: mode, buffers, attributes, random numbers as they were."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from trl_packing.models.introspection import unwrap_model
from trl_packing.recognition.current_row import other_rows


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the block, and restore them at its end.

    Example:
        >>> from types import SimpleNamespace
        >>> args = SimpleNamespace(save_total_limit=3)
        >>> with temporarily(args, save_total_limit=None):
        ...     print(args.save_total_limit)
        None
        >>> args.save_total_limit
        3
    """
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def preserve_state(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Set the mode, turn every random thing off, and put all state back in the end."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        # Probes of many lengths would use up a compiled model's recompilations.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(other_rows())  # probes are no rows of a step that is under way
        stack.enter_context(restore_state(model))
        stack.enter_context(_without_autocast(model))
        # Reentrant gradient checkpointing warns about forwards without gradients, as probes are.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        if training is not None:
            model.train(training)
        for holder in _state_holders(model):
            for name, value in vars(holder).items():
                if type(value) in (int, float) and _sets_chance(holder, name):
                    vars(holder)[name] = type(value)(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _state_holders(model: nn.Module) -> list[Any]:
    """Return all modules and their configs: some models read their dropout there (gptj, falcon)."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    return [*modules, *(c for c in configs.values() if hasattr(c, "__dict__"))]


def _sets_chance(holder: Any, attribute: str) -> bool:
    """Whether a number says how much chance takes part (dropout, jitter, NEFTune)."""
    if attribute == "p":
        return "Drop" in type(holder).__name__
    return any(word in attribute for word in ("drop", "jitter", "neftune_noise_alpha"))


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Restore buffers (rope frequencies, statistics), modes and attributes of all modules."""
    attributes = [(holder, dict(vars(holder))) for holder in _state_holders(model)]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for holder, values in attributes:
            vars(holder).update(values)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Run a float32 model in float32: a leak then stands far above the noise.

    accelerate puts autocast around `forward`, and what is installed later goes around that: so
    autocast is entered as ever, and the first module inside leaves it. FlashAttention needs half
    precision, so its models are left as they are.
    """
    config = getattr(unwrap_model(model), "config", None)
    implementation = getattr(config, "_attn_implementation", None) or ""
    if "flash" in implementation or "varlen" in implementation:
        yield
        return
    device = next(model.parameters()).device.type

    def leave(*_: Any) -> None:
        torch.set_autocast_enabled(device, False)

    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, enabled=False))  # and put back in the end
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(leave).remove)
        yield
