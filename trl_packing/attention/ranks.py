"""What the ranks of a run agree on, and whether they hold parameters together.

DDP, ZeRO-1, ZeRO-2    parameters are whole on every rank
FSDP2                  whole while their group of modules runs
ZeRO-3                 whole only while their module runs
"""

import functools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


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
