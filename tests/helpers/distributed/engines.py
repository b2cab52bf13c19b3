"""The engines that shard a model, made to shard on CPUs too, and the whole parameters afterwards.

    fsdp2           parameters, gradients and optimizer are DTensors
    zero2, zero3    DeepSpeed: gradients and optimizer are sharded; zero3: parameters too

accelerate 1.15 knows FSDP on devices only: on CPUs it silently takes DDP instead. The
sharding itself (torch, gloo) works on them. `fsdp_on_cpu` lets accelerate believe so.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

LAYERS = {
    "llama": ["LlamaDecoderLayer"],
    "falcon_mamba": ["FalconMambaBlock"],
    "qwen3_moe": ["Qwen3MoeDecoderLayer"],
    "qwen2_5_vl": ["Qwen2_5_VLDecoderLayer", "Qwen2_5_VLVisionBlock"],
    "qwen3_vl": ["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"],
    "llava_next": ["LlamaDecoderLayer", "CLIPEncoderLayer"],
    "gemma3": ["Gemma3DecoderLayer", "SiglipEncoderLayer"],
}
ENGINES = ("fsdp2", "zero2", "zero3")


def options(engine: str | None, model: str) -> dict[str, Any]:
    """Return the training arguments by which a user asks for `engine`."""
    if engine == "fsdp2":
        wrapped = {"transformer_layer_cls_to_wrap": LAYERS[model]}
        return {"fsdp": True, "fsdp_config": {"version": 2, **wrapped}}
    if engine is None:
        return {}
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    zero = {"stage": int(engine[-1]), "stage3_gather_16bit_weights_on_model_save": True}
    zero["stage3_param_persistence_threshold"] = 0  # by default small parameters stay whole
    config = dict.fromkeys((*sizes, "gradient_clipping"), "auto") | {"bf16": {"enabled": "auto"}}
    config |= {"zero_allow_untested_optimizer": True, "zero_optimization": zero}
    return {"deepspeed": config}


def fsdp_on_cpu() -> None:
    """Make accelerate shard by FSDP2 on CPUs, for the rest of this process."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    if hasattr(AcceleratorState.__init__, "__wrapped__"):
        return
    known = AcceleratorState.__init__

    @functools.wraps(known)
    def patched(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        known(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = patched


def start(engine: str | None) -> None:
    """Tell DeepSpeed the ranks, as its launcher does, except on CPUs."""
    if engine in ("zero2", "zero3"):
        import deepspeed

        deepspeed.init_distributed("gloo")


def forget_zero3() -> None:
    """Build models whole: one that is built under ZeRO-3 starts from other weights."""
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def is_sharded(engine: str | None, trainer: Any) -> bool:
    """Whether `engine` has sharded what it is said to shard."""
    parameters = list(trainer.model.parameters())
    if engine == "fsdp2":
        sharded = all(isinstance(p, DTensor) for p in parameters)
        return bool(trainer.accelerator.is_fsdp2) and sharded
    if engine == "zero3":
        return all(p.ds_tensor.numel() < p.ds_numel for p in parameters)
    if engine == "zero2":
        flat = trainer.deepspeed.optimizer.single_partition_of_fp32_groups
        return sum(p.numel() for p in flat) < sum(p.numel() for p in parameters)
    return True


def whole_parameters(engine: str | None, trainer: Any) -> dict[str, torch.Tensor]:
    """Return every parameter as a plain tensor; on all ranks together."""
    with gathered(engine, trainer.model):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in trainer.model.named_parameters()
        }


@contextlib.contextmanager
def gathered(engine: str | None, model: Any) -> Iterator[None]:
    if engine != "zero3":
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        yield
