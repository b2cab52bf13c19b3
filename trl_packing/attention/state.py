"""Context managers that change a model or an object, and restore its state at their end."""

import random
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trl_packing.attention.calls import other_rows
from trl_packing.attention.model_facts import text_config, unwrap_model

# Fields of configs that only heads of classification read.
_OF_OTHER_HEADS = ("classifier_", "cls_", "summary_", "score_")


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the block, and restore them at its end.

    Examples:
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
    """Run probes on `model` inside the block, without randomness, and restore all state at its end.

    The state includes modes, buffers, attributes, autocast and random number generators.

    Args:
        model: any wrapped or plain model.
        training: mode of the model inside the block; None keeps it.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        # Probes of many lengths would use up a compiled model's recompilations.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(other_rows())  # probes are not rows of the current step
        stack.enter_context(restore_state(model))
        stack.enter_context(_without_autocast(model))
        # Reentrant gradient checkpointing warns about forwards without gradients, as probes are.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad", UserWarning)
        if training is not None:
            model.train(training)
        if isinstance(model, DistributedDataParallel):
            # A rank that raises leaves the others no broadcast to wait for.
            model.broadcast_buffers = False
        for holder in _state_holders(model):
            for name, value in vars(holder).items():
                if type(value) in (int, float) and _sets_randomness(holder, name):
                    vars(holder)[name] = type(value)(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _state_holders(model: nn.Module) -> list[Any]:
    """Return all modules and configs; some models (gptj, falcon) read dropout from the config."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    return [*modules, *(c for c in configs.values() if hasattr(c, "__dict__"))]


def _sets_randomness(holder: Any, attribute: str) -> bool:
    """Whether a number is a strength of randomness (dropout, jitter, NEFTune)."""
    if attribute == "p":
        return "Drop" in type(holder).__name__
    return any(word in attribute for word in ("drop", "jitter", "neftune_noise_alpha"))


def find_randomness(model: nn.Module) -> str | None:
    """Return a strength of randomness above 0 that training reads, None if there is none.

    Examples:
        >>> find_randomness(nn.ModuleDict({"lora_dropout": nn.Dropout(0.1)}))
        'lora_dropout=0.1'
    """
    named = [("", text_config(unwrap_model(model))), *model.named_modules()]
    for path, holder in named:
        for name, value in getattr(holder, "__dict__", {}).items():
            is_strength = type(value) in (int, float) and _sets_randomness(holder, name)
            if is_strength and value > 0 and not name.startswith(_OF_OTHER_HEADS):
                parts = [part for part in path.split(".") if "drop" in part]
                return f"{parts[-1] if name == 'p' and parts else name}={value}"
    return None


@contextmanager
def restore_state(model: nn.Module) -> Iterator[None]:
    """Restore modes, attributes and buffers (such as rope frequencies) at the end of the block."""
    attributes = [(holder, dict(vars(holder))) for holder in _state_holders(model)]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and _may_change(buffer)
    ]
    try:
        yield
    finally:
        for holder, values in attributes:
            vars(holder).update(values)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


def _may_change(buffer: torch.Tensor) -> bool:
    """Whether a forward may write to `buffer`: not to the whole numbers of quantized weights."""
    return buffer.is_floating_point() or buffer.nbytes < 2**20


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Run a float32 model in float32, where a leak is far above the noise.

    accelerate wraps `forward` in autocast, and packed calls wrap that in turn. Autocast is
    therefore entered as usual, and a hook on every module disables it inside. Models on
    FlashAttention keep autocast, because it needs half precision.
    """
    config = getattr(unwrap_model(model), "config", None)
    implementation = getattr(config, "_attn_implementation", None) or ""
    if "flash" in implementation or "varlen" in implementation:
        yield
        return
    device = next(model.parameters()).device.type

    def disable_autocast(*_: Any) -> None:
        torch.set_autocast_enabled(device, False)

    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, enabled=False))  # restores autocast
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(disable_autocast).remove)
        yield
