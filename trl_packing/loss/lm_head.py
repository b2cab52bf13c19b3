"""Log-probabilities of the trained positions only, without the ``(T, vocabulary)`` logits.

TRL's fused head scores every position where Triton does not run. On a CPU that is most of a step,
and with completion-only loss most of it for positions whose label is −100. Where Triton runs, it
scores trained positions only, but asks the device which they are, and the host waits.
`add_trained_positions_head` takes over on both:

    CPU, ...          the trained positions, by `_TrainedLogProbs` of this module
    Triton devices    the trained positions, by TRL's kernels; they are known on the host (host),
                      and where they are not, all of it is TRL's

On a CPU, the gradient of a sum of log-probabilities is known in the forward, so it is taken there,
chunk by chunk while the logits are at hand. The backward scales it by the incoming gradient:
exactly for the hidden states; for the head's weight only if that gradient is one number for all
positions (plain negative log-likelihood). Otherwise (DFT, weights) the weight's part is computed
again; and so it is where the host would have to wait for a device to know.
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

from trl_packing.documents.host_row import cached_values, is_cpu, is_trained, to_device
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.loss.next_token import score_targets
from trl_packing.models.forward import unbind_forward
from trl_packing.models.sharding import unshard_head
from trl_packing.recognition.calls import complete_arguments

# Logits of a chunk: 2**26 float32 are 256 MiB.
_CHUNK_ELEMENTS = 2**26


def add_trained_positions_head(model: Any) -> None:
    """Let ``model(..., labels=labels, fused_lm_head=True)`` score trained positions only.

    Call after TRL's `add_fused_lm_head`, whose forward stays in place for every other call. The
    output is TRL's `FusedCausalLMOutput` with `loss`, `log_probs`, `entropy`, `is_top1` and
    `label_mask` ``(1, T - 1)``, zero where the label is −100; `aux_loss` for mixtures of experts.
    """
    below, names = _below(model), _names(model)
    text_config = model.config.get_text_config()
    scale, softcap = (
        _logit_scale(text_config),
        getattr(text_config, "final_logit_softcapping", None),
    )

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        head = self.get_output_embeddings()
        args, kwargs = complete_arguments(self, names, args, kwargs)
        if fused_lm_head:
            unshard_head(head)
        if not fused_lm_head or kwargs.get("shift_labels") is not None or _is_trl_s(head, kwargs):
            return below(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        kwargs |= {"use_cache": False}
        if getattr(text_config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone = self.base_model(*args, **kwargs)
        output = _score(backbone.last_hidden_state, head, labels, num_items, scale, softcap)
        if kwargs.get("output_router_logits"):
            output.aux_loss = _aux_loss(backbone, text_config, kwargs.get("attention_mask"))
            coefficient = getattr(text_config, "router_aux_loss_coef", 0.0)
            output.loss = output.loss + coefficient * output.aux_loss
        return output

    model.forward = MethodType(forward, model)


def use_native_head(model: Any) -> None:
    """Let ``model(..., labels=labels, fused_lm_head=True)`` score the model's own logits.

    For models whose head is more than a matrix; the output is as of `add_trained_positions_head`.
    """
    below, names = _below(model), _names(model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        args, kwargs = complete_arguments(self, names, args, kwargs)
        if not fused_lm_head:
            return below(self, *args, **kwargs)
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        own = below(self, *args, **kwargs | {"use_cache": False})
        output = _score_logits(own.logits, labels, num_items)
        output.aux_loss = getattr(own, "aux_loss", None)
        return output

    # Scoring then runs the whole model, not its backbone: `install_attention` asks.
    forward.scores_native_logits = True  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _names(model: Any) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


def _below(model: Any) -> Any:
    """Return the forward of `model` as a function of the model, for its copies too."""
    return unbind_forward(model.forward, model)


@torch.compiler.disable
def _score_logits(logits: Tensor, labels: Tensor, num_items: Any) -> FusedCausalLMOutput:
    at, slots = _trained_positions(labels, logits.device)
    labels = labels.to(logits.device)
    scored = score_targets(logits.flatten(0, 1)[at], labels.flatten()[at + 1])
    return _laid_out(labels[:, 1:] != IGNORE_INDEX, slots, num_items, *scored)


def _trained_positions(labels: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where trained targets are predicted, and where their scores go, ``(N,)`` int64 each.

    The former count the tokens of all rows ``(rows · T,)``, the latter their scores ``(rows · (T -
    1),)``. Not a boolean index: the host would wait for the device, to learn how many they are.
    """
    slots = np.flatnonzero(is_trained(labels)[:, 1:])
    at = slots + slots // max(labels.shape[1] - 1, 1)
    return to_device(at, device), to_device(slots, device)


def _is_trl_s(head: Any, call: dict[str, Any]) -> bool:
    """Whether TRL's forward waits no longer than ours would, for what the host does not know."""
    return _has_triton(head.weight) and cached_values(call["labels"]) is None


def _has_triton(weight: Tensor) -> bool:
    from trl.kernels.chunked_logprob import _use_triton

    return _use_triton(weight.device)


def _logit_scale(text_config: Any) -> float:
    """Return what the model multiplies its logits by; the names are those that TRL's head knows."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(text_config, name, None) is not None:
            return float(getattr(text_config, name))
    scaling = getattr(text_config, "logits_scaling", None)
    if scaling is None:
        return 1.0
    return float(scaling) if text_config.model_type == "hyperclovax" else 1.0 / float(scaling)


# How many positions are trained changes every batch: compiled, each batch would be a new graph. The
# loss is taken in here too, or that alone would be one more graph.
@torch.compiler.disable
def _score(
    hidden: Tensor,
    head: Any,
    labels: Tensor,
    num_items: Any,
    scale: float,
    softcap: float | None,
) -> FusedCausalLMOutput:
    weight, bias = head.weight, getattr(head, "bias", None)
    if isinstance(weight, DTensor):  # tensor parallelism: every rank has the same gradient
        weight, bias = weight.full_tensor(), None if bias is None else bias.full_tensor()
    at, slots = _trained_positions(labels, weight.device)
    hidden, labels = hidden.to(weight.device), labels.to(weight.device)
    with maybe_gather_lm_head_ctx(weight, bias):
        if not torch.is_grad_enabled():  # the gradients are taken in the forward: not in evaluation
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        chosen, targets = hidden.flatten(0, 1)[at], labels.flatten()[at + 1]
        score = _by_trl_s_kernels if _has_triton(weight) else _TrainedLogProbs.apply
        scored = score(chosen, weight, bias, targets, scale, softcap)
    return _laid_out(labels[:, 1:] != IGNORE_INDEX, slots, num_items, *scored)


def _by_trl_s_kernels(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and is_top1 ``(N,)`` of `hidden` ``(N, H)``."""
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


def _laid_out(
    mask: Tensor, slots: Tensor, num_items: Any, log_probs: Tensor, entropy: Tensor, is_top1: Tensor
) -> FusedCausalLMOutput:
    """Put values of the trained positions where they belong in the row.

    num_items: what the sum of their losses is divided by; None: their number.
    """
    # scatter keeps the graph even if no position is trained: a differentiable zero. masked_scatter
    # does too, but its backward waits for the device.
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


def _aux_loss(backbone: Any, text_config: Any, attention_mask: Tensor | None) -> Tensor:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    named = (getattr(text_config, name, None) for name in _NUM_EXPERTS)
    num_experts = next((number for number in named if number is not None), None)
    if num_experts is None:
        raise AttributeError(f"{type(text_config).__name__} does not say how many experts it has")
    return load_balancing_loss_func(
        backbone.router_logits, num_experts, text_config.num_experts_per_tok, attention_mask
    )


# TRL's head knows the first name only, and stops at the others (granitemoe, phimoe, ...).
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _TrainedLogProbs(torch.autograd.Function):
    """Hidden states ``(N, H)``, targets ``(N,)`` → log-probability, entropy, is_top1 ``(N,)``."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap):
        dtype = _compute_dtype(hidden)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        ctx.takes_all_now = is_cpu(hidden)  # only there can the backward look at its gradient
        if not ctx.takes_all_now:
            needs_weight = needs_bias = False
        log_probs, entropy = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        is_top1 = torch.empty_like(targets, dtype=torch.bool)
        d_hidden = torch.empty_like(hidden, dtype=torch.float32) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        buffer: Tensor | None = None  # chunks share it: fresh pages cost as much as the arithmetic
        for rows in _chunks(hidden, weight):
            logits, slope = _logits(hidden[rows], weight, bias, dtype, scale, softcap)
            if buffer is None:
                buffer = torch.empty_like(logits)
            probabilities = buffer[: len(logits)]
            log_probs[rows], entropy[rows], is_top1[rows] = _statistics(
                logits, targets[rows], probabilities
            )
            if needs_hidden or needs_weight or needs_bias:
                d_logits = _d_logits(probabilities, targets[rows, None], slope).to(dtype)
                if d_hidden is not None:
                    d_hidden[rows] = (d_logits @ weight.to(dtype)).float()
                _add_weight_grads(d_weight, d_bias, d_logits, hidden[rows].to(dtype))
        ctx.save_for_backward(hidden, weight, bias, targets, d_hidden, d_weight, d_bias)
        ctx.options = (dtype, scale, softcap)
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx, grad, _grad_entropy, _grad_top1):
        hidden, weight, bias, _, d_hidden, d_weight, d_bias = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if d_hidden is not None:
            d_hidden = (d_hidden * grad[:, None]).to(hidden.dtype)
        if needs_weight or needs_bias:
            if ctx.takes_all_now and len(grad) and bool((grad == grad[0]).all()):
                d_weight, d_bias = (None if x is None else x * grad[0] for x in (d_weight, d_bias))
            else:
                d_weight, d_bias = _weighted_weight_grads(ctx, grad)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _weighted_weight_grads(ctx, grad):
    hidden, weight, bias, targets, *_ = ctx.saved_tensors
    dtype, scale, softcap = ctx.options
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    with maybe_gather_lm_head_ctx(weight, bias):  # under ZeRO-3 it has no shape before
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        for rows in _chunks(hidden, weight):
            logits, slope = _logits(hidden[rows], weight, bias, dtype, scale, softcap)
            d_logits = _d_logits(logits.softmax(-1), targets[rows, None], slope)
            d_logits = (d_logits * grad[rows, None]).to(dtype)
            _add_weight_grads(d_weight, d_bias, d_logits, hidden[rows].to(dtype))
    return d_weight, d_bias


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor | float]:
    """Return the model's logits in float32 and their slope against ``hidden @ weight.T + bias``."""
    logits = hidden.to(dtype) @ weight.to(dtype).t()
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits.float()
    if scale != 1.0:
        logits = logits * scale
    if softcap is None:
        return logits, scale
    squashed = torch.tanh(logits / softcap)
    return squashed * softcap, (1 - squashed**2) * scale


def _statistics(
    logits: Tensor, targets: Tensor, probabilities: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and is_top1 ``(rows,)``; fills `probabilities`.

    Overwrites `logits`: few passes over ``(rows, vocabulary)``, in place, are what this costs.
    """
    highest, first = logits.max(-1, keepdim=True)
    logits.sub_(highest)
    torch.exp(logits, out=probabilities)
    total = probabilities.sum(-1)
    log_total = total.log()
    log_probs = logits.gather(-1, targets[:, None])[:, 0] - log_total
    with torch.autocast(logits.device.type, enabled=False):  # bmm would run in bf16
        mean_logit = torch.bmm(probabilities[:, None], logits[..., None]).flatten() / total
    probabilities.div_(total[:, None])
    return log_probs, log_total - mean_logit, first[:, 0] == targets


def _d_logits(probabilities: Tensor, target: Tensor, slope: Tensor | float) -> Tensor:
    """Return the gradient of the target's log-probability; overwrites `probabilities`."""
    gradient = probabilities.neg_()
    gradient.scatter_add_(-1, target, torch.ones_like(target, dtype=gradient.dtype))
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def _add_weight_grads(
    d_weight: Tensor | None, d_bias: Tensor | None, d_logits: Tensor, hidden: Tensor
) -> None:
    if d_weight is not None:
        if d_logits.dtype == d_weight.dtype:
            d_weight.addmm_(d_logits.t(), hidden)
        else:
            d_weight += d_logits.t() @ hidden
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=torch.float32)
