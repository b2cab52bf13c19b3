"""Care for the state of a model: blocks that restore it, sharded parameters, agreement of ranks.

    DDP, ZeRO-1, ZeRO-2    parameters are whole on every rank: nothing to do
    FSDP2                  whole while their group of modules runs; outputs are rounded to bf16
    ZeRO-3                 whole only while their module runs

A fused LM head reads `lm_head.weight` without running `lm_head`, so nothing gathers the weight.
"""

import functools
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trl_packing.attention.calls import other_rows
from trl_packing.attention.model_facts import (
    configs_of,
    current_implementation,
    text_config,
    unwrap_model,
)

# Of heads of classification.
_OF_OTHER_HEADS = ("classifier_", "cls_", "summary_", "score_")


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the block, and restore them at its end."""
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


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` whose gradient checkpointing is on."""
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Turn gradient checkpointing off in the block.

    Under it, PEFT raises in a second forward of an aLoRA adapter before the backward of the first.
    """
    with ExitStack() as stack:
        for layer in checkpointed_layers(model):
            stack.enter_context(temporarily(layer, gradient_checkpointing=False))
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

    def disable_autocast(*_: Any) -> None:
        torch.set_autocast_enabled(device, False)

    with ExitStack() as stack:
        stack.enter_context(torch.autocast(device, enabled=False))  # restores autocast
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(disable_autocast).remove)
        yield


def register_head(model: Any) -> None:
    """Register with ZeRO-3 that the forward of `model` reads the parameters of its head.

    After a native forward, which gathers them, the backward fails on an empty weight (0.19).
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parameter in (getattr(head, "weight", None), getattr(head, "bias", None)):
        if hasattr(parameter, "ds_id"):
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, parameter)


def unshard_head(head: Any) -> None:
    """Gather the parameters of `head` for a forward of the model under FSDP2.

    accelerate 1.15 does with the final norm, if it finds one (not in PEFT and vision-language
    models). The gradient of `full_tensor` would be this rank's only.
    """
    if isinstance(getattr(head, "weight", None), DTensor) and isinstance(head, FSDPModule):
        head.unshard()


def forget_evaluation_wrapper(trainer: Any) -> None:
    """Make `train` wrap the model in DDP, although `evaluate` has marked it as prepared.

    Without this, every rank silently trains by itself (transformers 5.23, accelerate 1.15).
    """
    if trainer.args.world_size == 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return
    if getattr(trainer.model, "_is_accelerate_prepared", False):
        trainer.model._is_accelerate_prepared = False
        trainer.model_wrapped = trainer.model  # compiled by then, under torch_compile
        trainer.accelerator._models.remove(trainer.model)


def keep_outputs_precise(accelerator: Any) -> None:
    """Keep FSDP2 from casting log-probabilities to bf16, in which a loss has 3 digits.

    accelerate 1.15 sets `output_dtype` to the dtype of mixed precision; under DDP it uses float32.
    """
    if not accelerator.is_fsdp2:
        return
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None)


def gather_full_state_dict(accelerator: Any) -> AbstractContextManager[None]:
    """Make `Trainer.save_model` save the whole model inside the block, also under sharded FSDP.

    Under SHARDED_STATE_DICT, transformers 5.23 silently writes no file.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None:
        return nullcontext()
    return temporarily(plugin, state_dict_type=StateDictType.FULL_STATE_DICT)


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks gather parameters of `model` in every forward."""
    sharded = any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in model.parameters())
    return sharded or any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())


def all_reduce_max(
    value: int, device: torch.device | None = None, *, patience: float | None = None
) -> int:
    """Return the largest of the values that the ranks pass.

    It is reduced on `device`; None waits for no device. After `patience` seconds, RuntimeError.
    """
    if is_alone():
        return value
    largest = torch.tensor(value, device=device)
    group = _cpu_group(dist.group.WORLD) if device is None else None
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait() if patience is None else work.wait(timedelta(seconds=patience))
    return int(largest)


def gather_objects(value: Any) -> list[Any]:
    """Return the values that the ranks pass, by rank; this waits for no device."""
    if is_alone():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=_cpu_group(dist.group.WORLD))
    return gathered


def is_alone() -> bool:
    """Whether this process has no other ranks."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


@functools.lru_cache(maxsize=1)
def _cpu_group(_world: Any) -> Any:
    """Return the process group of a world for CPU tensors; all ranks make it at its first use.

    What a rank says here meets no gathering of weights, even if one has left its forward.
    """
    return dist.new_group(backend="gloo")
