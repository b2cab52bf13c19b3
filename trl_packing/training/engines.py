"""What accelerate's engines (DDP, FSDP2, DeepSpeed) need around a run and its saving."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from accelerate import Accelerator
from torch.distributed.fsdp import StateDictType

from trl_packing.attention.model_facts import temporarily


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


@contextmanager
def without_sync(accelerator: Accelerator, model: Any) -> Iterator[None]:
    """Let a backward add to the gradients of this rank alone: another one of its step follows."""
    state = accelerator.gradient_state
    if not state.sync_gradients:  # the caller does so already
        yield
        return
    state._set_sync_gradients(False)  # where DeepSpeed would take an optimizer step
    try:
        with accelerator.no_sync(model):
            yield
    finally:
        state._set_sync_gradients(True)
