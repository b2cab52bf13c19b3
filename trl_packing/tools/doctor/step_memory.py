"""Memory of one training step, computed without allocating it.

    the config of a model      meta_model      shapes and dtypes of its weights
    → parameters, gradients    state_memory    exact sums
      and optimizer states
    → one micro-batch          step_memory     a forward and a backward on fake tensors, in which
                                               each allocation and release is counted

The step is the trainer's: mixed precision by autocast, attention on packed rows (no T×T matrix),
the head that scores chunk by chunk, gradient checkpointing, LoRA. Fake tensors run every line of
the model, so the count follows the architecture and needs no formula of it.

Not counted: the CUDA context (0.3 to 1 GB), fragmentation, and workspaces of kernels.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from trl_packing.attention import document_sdpa
from trl_packing.attention.interface import mark_packed_calls
from trl_packing.loss.chunked_log_probs import trained_log_probs
from trl_packing.models.introspection import text_config, unwrap_peft
from trl_packing.models.state import temporarily
from trl_packing.tools.doctor.allocations import Allocations

_FAKE_LOGGER = "torch._subclasses.fake_tensor"

# Bytes of the states of an optimizer for each byte (or number) of a trained parameter.
_STATES_OF_BYTES = {"adamw_torch": 2, "adamw_torch_fused": 2, "sgd": 0}
_STATES_OF_NUMBERS = {"adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2}


class NotSimulated(RuntimeError):
    """The step of a model cannot run on fake tensors, for the reason in the message."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of one rank, without sharding, that do not depend on the micro-batch.

    Attributes:
        num_parameters: weights of the model, adapters included.
        num_trained: weights that are trained.
        parameters: bytes of all weights.
        gradients: bytes of the gradients of trained weights.
        optimizer: bytes of the optimizer's states; None for an optimizer that is not known.
    """

    num_parameters: int
    num_trained: int
    parameters: int
    gradients: int
    optimizer: int | None

    @property
    def total(self) -> int:
        """All of them together; an unknown optimizer counts 0."""
        return self.parameters + self.gradients + (self.optimizer or 0)


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one rank, without sharding, during a step.

    Attributes:
        tokens: tokens of a micro-batch.
        gradient_checkpointing: whether layers are computed again in the backward.
        kept: bytes that the forward keeps for the backward, beside the parameters.
        peak: the most at any moment of a step, with the states of the optimizer.
    """

    tokens: int
    gradient_checkpointing: bool
    kept: int
    peak: int


def meta_model(config: Any, *, dtype: torch.dtype = torch.float32, lora: Any = None) -> Any:
    """Return a language model, with its vision tower if it has one, on the meta device.

    It is in training mode.

    Args:
        config: of the model.
        dtype: of the weights. TRL loads float32.
        lora: a `LoraConfig` of PEFT, or None to train all weights.
    """
    has_tower = getattr(config, "vision_config", None) is not None
    maker = AutoModelForImageTextToText if has_tower else AutoModelForCausalLM
    with torch.device("meta"):
        model = maker.from_config(config, dtype=dtype, attn_implementation=document_sdpa.NAME)
    if lora is not None:
        from peft import get_peft_model

        model = get_peft_model(model, lora)
    return model.train()


def state_memory(model: nn.Module, optimizer: str) -> StateMemory:
    """Return the bytes of parameters, gradients and optimizer states of `model`.

    Args:
        model: on any device.
        optimizer: a name that `TrainingArguments.optim` takes.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return StateMemory(
        num_parameters=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in trained),
        parameters=_bytes(parameters),
        gradients=_bytes(trained),
        optimizer=optimizer_bytes(trained, optimizer),
    )


def step_memory(
    model: nn.Module,
    tokens: int,
    *,
    gradient_checkpointing: bool,
    autocast: torch.dtype | None = torch.bfloat16,
    optimizer: str = "adamw_torch_fused",
    accumulates: bool = False,
) -> StepMemory:
    """Return the memory of a step.

    Args:
        model: as `meta_model` returns it; it is copied.
        tokens: of a micro-batch, all of them trained.
        gradient_checkpointing: compute layers again in the backward.
        autocast: dtype of mixed precision; None without it.
        optimizer: a name that `TrainingArguments.optim` takes.
        accumulates: whether gradients of an earlier micro-batch exist in the backward.

    Raises:
        NotSimulated: the model needs numbers, for example to route tokens to experts.
    """
    model, states = copy.deepcopy(model), state_memory(model, optimizer)
    with FakeTensorMode(), warnings.catch_warnings(), _silence(logging.getLogger(_FAKE_LOGGER)):
        warnings.simplefilter("ignore")  # options that transformers renames
        try:
            _replace_by_fake_tensors(model)
            kept, peak = _run(model, tokens, gradient_checkpointing, autocast, accumulates)
        except Exception as error:  # models and fake tensors raise all kinds of errors
            raise NotSimulated(f"{type(error).__name__}: {str(error).split(chr(10))[0]}") from error
    at_the_update = states.parameters + states.gradients
    return StepMemory(
        tokens=tokens,
        gradient_checkpointing=gradient_checkpointing,
        kept=kept - states.parameters,
        peak=max(peak, at_the_update) + (states.optimizer or 0),
    )


@contextmanager
def _silence(logger: logging.Logger) -> Iterator[None]:
    """Keep fake tensors from logging the errors that they raise."""
    with temporarily(logger, disabled=True):
        yield


def optimizer_bytes(trained: list[nn.Parameter], optimizer: str) -> int | None:
    """Return the bytes of an optimizer's states, None if `optimizer` is not known."""
    if optimizer in _STATES_OF_NUMBERS:
        return _STATES_OF_NUMBERS[optimizer] * sum(p.numel() for p in trained)
    if optimizer not in _STATES_OF_BYTES:
        return None
    factor = _STATES_OF_BYTES[optimizer]
    steps = 4 * len(trained) if factor else 0  # a float32 for each tensor
    return factor * _bytes(trained) + steps


def _bytes(tensors: list[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _replace_by_fake_tensors(model: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU, tied ones once.

    Autocast knows the CPU, and not the meta device.
    """
    made: dict[int, Any] = {}
    for module in model.modules():
        held = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, tensor in held:
            if id(tensor) not in made:
                fake: Any = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, tensor.requires_grad)
                made[id(tensor)] = fake
            setattr(module, name, made[id(tensor)])


def _run(
    model: Any, tokens: int, checkpointing: bool, autocast: torch.dtype | None, accumulates: bool
) -> tuple[int, int]:
    """Run a forward and a backward; return the bytes alive between them, and the most at once."""
    base = unwrap_peft(model)
    mark_packed_calls(base.base_model)
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()  # LoRA: nothing trained comes before the first layer
    with Allocations() as memory:
        memory.add(*model.parameters())
        if accumulates:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.empty_like(parameter)
        with torch.autocast("cpu", autocast) if autocast else nullcontext():
            hidden = base.base_model(**_row(tokens), use_cache=False).last_hidden_state
            scored = hidden.detach().requires_grad_()
            head = base.get_output_embeddings()
            targets = torch.empty(tokens, dtype=torch.long)
            softcap = getattr(text_config(base), "final_logit_softcapping", None)
            log_probs, *_ = trained_log_probs(
                scored.flatten(0, 1), head.weight, head.bias, targets, 1.0, softcap
            )
        loss = -log_probs.mean()
        del log_probs
        kept = memory.alive
        with memory.equal_gradients():
            loss.backward()
        gradient = scored.grad
        del loss, scored
        hidden.backward(gradient)
    return kept, memory.peak


def _row(tokens: int) -> dict[str, Any]:
    """Return a packed row of one document. Its values are never read."""
    positions, boundaries = torch.empty(1, tokens, dtype=torch.long), torch.empty(2)
    boundaries = boundaries.to(torch.int32)
    return {
        "input_ids": torch.empty_like(positions),
        "position_ids": positions,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": tokens,
        "max_length_k": tokens,
    }
