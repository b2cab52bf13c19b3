"""Run probes on a model, and leave no trace: modes, buffers and random numbers are restored."""

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trl_packing.attention.calls import other_rows
from trl_packing.attention.model_facts import (
    configs_of,
    current_implementation,
    text_config,
    unwrap_model,
    without_checkpointing,
)

# Of heads of classification.
_OF_OTHER_HEADS = ("classifier_", "cls_", "summary_", "score_")


@contextmanager
def preserve_state(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Run probes on `model` in this mode (None: its own), without randomness, and restore all."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices))
        # Probes of many lengths would use up a compiled model's recompilations.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(other_rows())  # probes are not rows of the current step
        stack.enter_context(restore_state(model))
        stack.enter_context(_without_autocast(model))
        stack.enter_context(without_checkpointing(model))
        if training is not None:
            model.train(training)
        if isinstance(model, DistributedDataParallel):
            # A rank that raises leaves the others no broadcast to wait for.
            model.broadcast_buffers = False
        # Some models (gptj, falcon) read dropout from the config.
        for holder in (*model.modules(), *configs_of(model)):
            for name, value in vars(holder).items():
                if _is_strength(holder, name, value):
                    vars(holder)[name] = type(value)(0)
        yield


def _is_strength(holder: Any, attribute: str, value: Any) -> bool:
    """Whether a value is a strength of randomness above 0 (dropout, jitter, NEFTune)."""
    if type(value) not in (int, float) or value <= 0:
        return False
    if attribute == "p":
        return "Drop" in type(holder).__name__
    return any(word in attribute for word in ("drop", "jitter", "neftune_noise_alpha"))


def find_randomness(model: nn.Module) -> str | None:
    """Return a strength of randomness above 0 that training reads ("lora_dropout=0.1"), or None."""
    for path, holder in [("", text_config(unwrap_model(model))), *model.named_modules()]:
        for name, value in getattr(holder, "__dict__", {}).items():
            if name.startswith(_OF_OTHER_HEADS) or not _is_strength(holder, name, value):
                continue
            parts = [part for part in path.split(".") if "drop" in part]
            return f"{parts[-1] if name == 'p' and parts else name}={value}"
    return None


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Restore modes, attributes and buffers (such as rope frequencies) at the end of the block."""
    holders = (*model.modules(), *configs_of(model))
    attributes = [(holder, dict(vars(holder))) for holder in holders]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        # No forward writes to the whole numbers of quantized weights.
        if buffer is not None and (buffer.is_floating_point() or buffer.nbytes < 2**20)
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
    """Run a float32 model in float32, where a leak is far above the noise.

    accelerate wraps `forward` in autocast, so a hook on every module disables it inside.
    """
    implementation = current_implementation(unwrap_model(model)) or ""
    if "flash" in implementation or "varlen" in implementation:
        yield
        return
    device = next(model.parameters()).device.type
    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, enabled=False))  # restores autocast
        for module in model.modules():
            hook = module.register_forward_pre_hook(
                lambda *_: torch.set_autocast_enabled(device, False)
            )
            stack.enter_context(hook)
        yield
