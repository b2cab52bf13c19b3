"""Log-probabilities of the trained positions only, without the ``(T, vocabulary)`` logits.

Without Triton, TRL's fused head scores every position. On a CPU this takes most of a step, and with
completion-only loss most of that for positions whose label is −100. With Triton, TRL scores trained
positions only, but reads their indices from the device, so the host waits.
`add_trained_positions_head` replaces both:

    CPU, ...          trained positions, by `trained_log_probs` (`chunked_log_probs.py`)
    Triton devices    trained positions from the host copy, by TRL's kernels; TRL's head if the
                      labels have no host copy
"""

import functools
import inspect
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from trl_packing.attention.calls import complete_arguments, unbind_forward
from trl_packing.attention.model_facts import EXPERT_COUNTS, text_config
from trl_packing.attention.sharding import unshard_head
from trl_packing.documents.host_row import cached_values, is_trained, to_device
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.loss.chunked_log_probs import trained_log_probs
from trl_packing.loss.next_token import score_targets


def add_trained_positions_head(model: Any) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` score trained positions only.

    The output is TRL's `FusedCausalLMOutput` with `loss`, `log_probs`, `entropy`, `is_top1` and
    `label_mask` ``(B, T - 1)``, zero where the label is −100, and `aux_loss` for mixtures of
    experts. Other calls keep their forward.

    Args:
        model: a transformers model after TRL's `add_fused_lm_head`.
    """
    inner_forward, names = unbind_forward(model.forward, model), _argument_names(model)
    config = text_config(model)
    scale, softcap = _logit_scale(config), getattr(config, "final_logit_softcapping", None)

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        args, kwargs = complete_arguments(self, names, args, kwargs)
        if fused_lm_head:
            unshard_head(head)
        is_shifted = kwargs.get("shift_labels") is not None
        if not fused_lm_head or is_shifted or _is_for_trl_head(head, kwargs):
            return inner_forward(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        kwargs |= {"use_cache": False}
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone = self.base_model(*args, **kwargs)
        shares = kwargs.get("key_index") is not None
        output = _score(backbone.last_hidden_state, head, labels, num_items, scale, softcap, shares)
        if kwargs.get("output_router_logits"):
            output.aux_loss = _aux_loss(backbone, config, kwargs.get("attention_mask"))
            coefficient = getattr(config, "router_aux_loss_coef", 0.0)
            output.loss = output.loss + coefficient * output.aux_loss
        return output

    model.forward = MethodType(forward, model)


def use_native_head(model: Any) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` score the model's native logits.

    For models whose head is more than a matrix. The output is that of `add_trained_positions_head`.
    """
    inner_forward, names = unbind_forward(model.forward, model), _argument_names(model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        args, kwargs = complete_arguments(self, names, args, kwargs)
        if not fused_lm_head:
            return inner_forward(self, *args, **kwargs)
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        native = inner_forward(self, *args, **kwargs | {"use_cache": False})
        output = score_logits(native.logits, labels, num_items=num_items)
        output.aux_loss = getattr(native, "aux_loss", None)
        return output

    # Scoring then runs the whole model, not only its backbone; `install_attention` reads this.
    forward.scores_native_logits = True  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _argument_names(model: Any) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


@torch.compiler.disable
def score_logits(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, num_items: Any = None
) -> FusedCausalLMOutput:
    """Return the output of a fused head for `logits` ``(B, T, vocabulary)``.

    Args:
        logits: those of virtual tokens, which prompt tuning puts first, are left out.
        labels: ``(B, T)``.
        smoothing: the share ε of the mean over the vocabulary in `log_probs`.
        num_items: divisor of the summed loss; None: the number of trained targets.
    """
    at, slots = _trained_positions(labels, logits.device)
    logits, labels = logits[:, -labels.shape[1] :], labels.to(logits.device)
    scored = score_targets(logits.flatten(0, 1)[at], labels.flatten()[at + 1], smoothing)
    return _row_output(labels[:, 1:] != IGNORE_INDEX, slots, num_items, *scored)


def _trained_positions(labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the positions that predict trained targets, and of their scores.

    Both are ``(P,)`` int64, for P trained targets: flat indices into ``(B, T)`` and ``(B, T - 1)``.
    A boolean index would make the host wait for the device, to learn the number P.
    """
    slots = np.flatnonzero(is_trained(labels)[:, 1:])
    at = slots + slots // max(labels.shape[1] - 1, 1)
    return to_device(at, device), to_device(slots, device)


def _is_for_trl_head(head: Any, call: dict[str, Any]) -> bool:
    """Whether TRL's head is as fast: with Triton, and labels that have no host copy."""
    return _has_triton(head.weight) and cached_values(call["labels"]) is None


def _has_triton(weight: Tensor) -> bool:
    from trl.kernels.chunked_logprob import _use_triton

    return _use_triton(weight.device)


def _logit_scale(config: Any) -> float:
    """Return the factor of the model's logits, under the names that TRL's head knows."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if config.model_type == "hyperclovax" else 1.0 / float(scaling)


# Not compiled: the number of trained positions changes with every batch, and each would be a new
# graph. The loss is computed here too, since it would otherwise be one more graph.
@torch.compiler.disable
def _score(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    num_items: Any,
    scale: float,
    softcap: float | None,
    shares_prefixes: bool,
) -> FusedCausalLMOutput:
    """Return the output for the last hidden states of a batch.

    Args:
        hidden: ``(B, T, H)``.
        head: the LM head, with `weight` ``(V, H)`` and `bias` ``(V,)`` or None.
        labels: ``(B, T)``.
        num_items: divisor of the summed loss; None: the number of trained targets.
        scale: factor of the logits.
        softcap: bound of the logits; None: none.
        shares_prefixes: whether positions of several documents weigh more than others.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    if isinstance(weight, DTensor):  # tensor parallelism: every rank has the same gradient
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    at, slots = _trained_positions(labels, weight.device)
    hidden, labels = hidden.to(weight.device), labels.to(weight.device)
    with maybe_gather_lm_head_ctx(weight, bias):
        if not torch.is_grad_enabled():  # else the forward would compute gradients
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        chosen, targets = hidden.flatten(0, 1)[at], labels.flatten()[at + 1]
        arguments = (chosen, weight, bias, targets, scale, softcap)
        if _has_triton(weight):
            scored = _score_by_trl_kernels(*arguments)
        else:
            scored = trained_log_probs(*arguments, mostly_equal=shares_prefixes)
    return _row_output(labels[:, 1:] != IGNORE_INDEX, slots, num_items, *scored)


def _score_by_trl_kernels(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and is_top1 ``(P,)``; arguments as of `trained_log_probs`."""
    log_probs, entropy, _, _, is_top1 = trl_utils._ChunkedLogProbFunction.apply(
        hidden,
        weight,
        bias,
        targets,
        1.0,  # temperature
        trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE,
        softcap,
        scale,
        ("log_probs", "entropy", "is_top1"),
    )
    return log_probs, entropy, is_top1


def _row_output(
    mask: Tensor, slots: Tensor, num_items: Any, log_probs: Tensor, entropy: Tensor, is_top1: Tensor
) -> FusedCausalLMOutput:
    """Return the values of trained positions as rows, with the loss.

    Args:
        mask: True on trained targets, ``(B, T - 1)``.
        slots: flat indices of the values in `mask`, ``(P,)``.
        num_items: divisor of the summed loss; None: the number of trained targets.
        log_probs: ``(P,)``.
        entropy: ``(P,)``.
        is_top1: ``(P,)`` bool.
    """
    # scatter keeps the graph even if no position is trained, as a differentiable zero.
    # masked_scatter does too, but its backward waits for the device.
    log_probs, entropy, is_top1 = (
        x.new_zeros(mask.numel()).scatter(0, slots, x).view(mask.shape)
        for x in (log_probs, entropy, is_top1)
    )
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items),
        log_probs=log_probs,
        entropy=entropy,
        is_top1=is_top1,
        label_mask=mask,
    )


def _aux_loss(backbone: Any, config: Any, attention_mask: Tensor | None) -> Tensor:
    """Return the load-balancing loss of the router logits of all layers."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    counts = (getattr(config, name, None) for name in EXPERT_COUNTS)
    num_experts = next((count for count in counts if count is not None), None)
    if num_experts is None:
        raise AttributeError(f"{type(config).__name__} does not name its number of experts")
    return load_balancing_loss_func(
        backbone.router_logits, num_experts, config.num_experts_per_tok, attention_mask
    )
