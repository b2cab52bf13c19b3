"""Workarounds for FSDP2 and ZeRO-3, and agreement between ranks.

    DDP, ZeRO-1, ZeRO-2    parameters are whole on every rank: nothing to do
    FSDP2                  whole while their group of modules runs; outputs are rounded to bf16
    ZeRO-3                 whole only while their module runs

A fused LM head reads `lm_head.weight` without running `lm_head`, so nothing gathers the weight.
Ranks that gather wait for each other, so all must run equally many forwards.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.tensor import DTensor

from trl_packing.attention.state import temporarily


def announce_head(model: Any) -> None:
    """Register with ZeRO-3 that the forward of `model` reads the parameters of its head.

    Call this before the first forward. ZeRO-3 detects by itself that a module reads another one's
    parameters, but only if they are partitioned at that moment. After a native forward (the
    isolation check, an evaluation with logits) they are gathered already, and the backward fails on
    an empty weight (DeepSpeed 0.19). A later call changes the order of modules, which fails too.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parameter in (getattr(head, "weight", None), getattr(head, "bias", None)):
        if hasattr(parameter, "ds_id"):
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, parameter)


def unshard_head(head: Any) -> None:
    """Gather the parameters of `head` for a forward of the model under FSDP2.

    accelerate 1.15 shards the head together with the final norm, which runs before it. If it finds
    no such norm (PEFT, text models inside vision-language ones), the weight is a DTensor in the
    forward. The gradient of its `full_tensor` is this rank's only, and is never summed over ranks.
    """
    if isinstance(getattr(head, "weight", None), DTensor) and isinstance(head, FSDPModule):
        head.unshard()


def check_deepspeed_can_train(trainer: Any) -> None:
    """Refuse to train after an evaluation that created the ZeRO-3 engine without an optimizer.

    `train` would fail in the first backward (transformers 5.23). FSDP2 and ZeRO-2 refuse such an
    evaluation themselves.

    Raises:
        ValueError: the engine has no optimizer.
    """
    if trainer.is_deepspeed_enabled and trainer.deepspeed is not None and trainer.optimizer is None:
        raise ValueError(
            "evaluate() or predict() before train() sets DeepSpeed ZeRO-3 up without an optimizer; "
            "set eval_on_start=True instead, or evaluate after training"
        )


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


def all_reduce_max_if_sharded(value: int, model: nn.Module) -> int:
    """Return the largest value of all ranks if they run the same forwards, else `value`."""
    if _is_alone() or not is_sharded(model):
        return value
    return all_reduce_max(value, next(model.parameters()).device)


def all_reduce_max(
    value: int, device: torch.device | None = None, *, patience: float | None = None
) -> int:
    """Return the largest of the values that the ranks pass.

    Args:
        value: that of this rank.
        device: the device to reduce on; None reduces on the CPU and waits for no device.
        patience: seconds to wait for the other ranks; None waits as long as the group does.

    Raises:
        RuntimeError: the other ranks did not answer in time.
    """
    if _is_alone():
        return value
    largest = torch.tensor(value, device=device)
    group = cpu_group() if device is None else None
    work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait() if patience is None else work.wait(timedelta(seconds=patience))
    return int(largest)


def gather_objects(value: Any) -> list[Any]:
    """Return the values that the ranks pass, by rank; this waits for no device."""
    if _is_alone():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value, group=cpu_group())
    return gathered


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def cpu_group() -> Any:
    """Return a process group for CPU tensors; all ranks make it together, at its first use.

    With NCCL, the host would wait for the device. No forward uses it: what a rank says here meets
    no gathering of weights, even if another rank has left its forward by an error.
    """
    world = dist.group.WORLD
    if world not in _GROUPS:
        _GROUPS.clear()
        _GROUPS[world] = dist.new_group(backend="gloo")
    return _GROUPS[world]


_GROUPS: dict[Any, Any] = {}
