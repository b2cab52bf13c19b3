"""Log-probabilities of the trained positions only, without the ``(T, vocabulary)`` logits.

Without Triton, TRL's fused head scores every position; with Triton it reads the trained ones from
the device, so the host waits. Here they come from the host copy of the labels, and are scored by
`TrainedLogProbs`, or by TRL's kernels on Triton devices. The head's weight is read without running
the head, so under FSDP2 and ZeRO-3 nothing else gathers it.

B rows, T tokens, P trained positions, H hidden size, V vocabulary, C positions of a chunk.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from trl.kernels.chunked_logprob import _use_triton
from trl.trainer import utils as trl_utils
from trl.trainer.utils import FusedCausalLMOutput, maybe_gather_lm_head_ctx

from trl_packing.attention.calls import (
    Call,
    Forward,
    complete_arguments,
    current_row,
    unbind_forward,
)
from trl_packing.attention.model_facts import EXPERT_COUNTS, text_config
from trl_packing.attention.sequence_parallel import gather_row, num_shares
from trl_packing.documents.host_row import host_row, is_cpu, is_trained, to_device
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.loss.next_token import score_targets

# Logits of a chunk: 2**25 float32 are 128 MiB.
_CHUNK_ELEMENTS = 2**25


def add_trained_positions_head(model: Any) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` score trained positions only.

    `model` is one after TRL's `add_fused_lm_head`. The output is TRL's `FusedCausalLMOutput` with
    `loss`, `log_probs`, `entropy`, `is_top1` and `label_mask` ``(B, T - 1)``, zero where the label
    is −100, and `aux_loss` for mixtures of experts. Other calls keep their forward.
    """
    config = text_config(model)
    scale = _logit_scale(config)
    softcap = getattr(config, "final_logit_softcapping", None)

    def score(inner: Forward, self: Any, args: Any, kwargs: Call) -> Any:
        head = self.get_output_embeddings()
        if isinstance(getattr(head, "weight", None), DTensor) and isinstance(head, FSDPModule):
            # accelerate 1.15 gathers the final norm alike, if it finds one (not in PEFT and
            # vision-language models). The gradient of `full_tensor` would be this rank's only.
            head.unshard()
        if kwargs.get("shift_labels") is not None:
            return inner(self, *args, fused_lm_head=True, **kwargs)
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        kwargs |= {"use_cache": False}
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        backbone = self.base_model(*args, **kwargs)
        output = _score(backbone.last_hidden_state, head, labels, num_items, scale, softcap)
        if kwargs.get("output_router_logits"):
            output.aux_loss = _aux_loss(backbone, config, kwargs)
            coefficient = getattr(config, "router_aux_loss_coef", 0.0)
            output.loss = output.loss + coefficient * output.aux_loss
        return output

    _replace_fused_head(model, score)


def use_native_head(model: Any) -> None:
    """Make ``model(..., labels=labels, fused_lm_head=True)`` score the model's native logits.

    For heads that are more than a matrix. The output is that of `add_trained_positions_head`.
    """

    def score(inner: Forward, self: Any, args: Any, kwargs: Call) -> Any:
        labels, num_items = kwargs.pop("labels"), kwargs.pop("num_items_in_batch", None)
        native = inner(self, *args, **kwargs | {"use_cache": False})
        output = score_logits(native.logits, labels, num_items=num_items)
        output.aux_loss = getattr(native, "aux_loss", None)
        size = num_shares(native.logits.shape[1], kwargs.get("cu_seq_lens_q"))
        if size > 1 and output.aux_loss is not None:
            raise ValueError("its balance of experts would be that of a part of the row")
        return output

    # Scoring then runs the whole model, not only its backbone; `install_attention` reads this.
    _replace_fused_head(model, score).scores_native_logits = True  # type: ignore[attr-defined]


def _replace_fused_head(model: Any, score: Callable[..., Any]) -> Forward:
    inner = unbind_forward(model.forward, model)
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    @functools.wraps(type(model).forward)  # `generate` reads the signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        args, kwargs = complete_arguments(self, names, args, kwargs)
        return score(inner, self, args, kwargs) if fused_lm_head else inner(self, *args, **kwargs)

    # `install_attention` finds the way of packed calls on top.
    forward.packed_way = getattr(model.forward, "packed_way", None)  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)
    return forward


@torch.compiler.disable
def score_logits(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, num_items: Any = None
) -> FusedCausalLMOutput:
    """Return the output of a fused head for logits ``(B, T, vocabulary)`` and labels ``(B, T)``.

    Those of virtual tokens, which come first, are left out. `smoothing` is the share ε of the mean
    over the vocabulary, `num_items` the divisor of the loss; None: the number of trained targets.
    """

    def score(at: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        return score_targets(logits[:, -labels.shape[1] :].flatten(0, 1)[at], targets, smoothing)

    return _output(labels, logits.device, num_items, score)


# Not compiled: the number of trained positions changes with every batch, and each would be a new
# graph. The loss is computed here too, since it would otherwise be one more graph.
@torch.compiler.disable
def _score(
    hidden: Tensor, head: Any, labels: Tensor, num_items: Any, scale: float, softcap: float | None
) -> FusedCausalLMOutput:
    """Return the output for the last hidden states ``(B, T, H)`` and labels ``(B, T)``."""
    weight = head.weight
    bias = getattr(head, "bias", None)
    if isinstance(weight, DTensor):  # tensor parallelism: every rank has the same gradient
        weight = weight.full_tensor()
        bias = None if bias is None else bias.full_tensor()

    def score(at: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        with maybe_gather_lm_head_ctx(weight, bias):
            of_head = [weight, bias]
            if not torch.is_grad_enabled():  # else the forward would compute gradients
                of_head = [None if x is None else x.detach() for x in of_head]
            scored = (hidden.to(weight.device).flatten(0, 1)[at], *of_head, targets)
            if not _use_triton(weight.device):
                return TrainedLogProbs.apply(*scored, scale, softcap)
            log_probs, entropy, _, _, is_top1, *_ = trl_utils._ChunkedLogProbFunction.apply(
                *scored,
                1.0,
                trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE,
                softcap,
                scale,
                ("log_probs", "entropy", "is_top1"),
            )
            return log_probs, entropy, is_top1

    return _output(labels, weight.device, num_items, score)


def _output(
    labels: Tensor, device: torch.device, num_items: Any, score: Callable[..., Any]
) -> FusedCausalLMOutput:
    """Return what `score` says of trained positions as rows, with the loss.

    `score` takes flat indices into labels ``(B, T)`` and their targets, both ``(P,)``.
    """
    # A boolean index would make the host wait for the device, to learn the number P.
    slots = np.flatnonzero(is_trained(labels)[:, 1:])
    at = to_device(slots + slots // max(labels.shape[1] - 1, 1), device)
    places = to_device(slots, device)
    labels = labels.to(device)
    mask = labels[:, 1:] != IGNORE_INDEX
    # scatter keeps the graph even if no position is trained, as a differentiable zero.
    # masked_scatter does too, but its backward waits for the device.
    log_probs, entropy, is_top1 = (
        x.new_zeros(mask.numel()).scatter(0, places, x).view(mask.shape)
        for x in score(at, labels.flatten()[at + 1])
    )
    return FusedCausalLMOutput(
        loss=-log_probs.sum() / (mask.sum().clamp(min=1) if num_items is None else num_items),
        log_probs=log_probs,
        entropy=entropy,
        is_top1=is_top1,
        label_mask=mask,
    )


def _logit_scale(config: Any) -> float:
    """Return the factor of the model's logits, under the names that TRL's head knows."""
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    scaling = float(getattr(config, "logits_scaling", None) or 1.0)
    return scaling if config.model_type == "hyperclovax" else 1.0 / scaling


def _aux_loss(backbone: Any, config: Any, call: Call) -> Tensor:
    """Return the load-balancing loss of the router logits of all layers, of a row as a whole."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    counts = (getattr(config, name, None) for name in EXPERT_COUNTS)
    num_experts, *_ = (count for count in counts if count is not None)
    logits = backbone.router_logits
    tokens = backbone.last_hidden_state.shape[1]
    size = num_shares(tokens, call.get("cu_seq_lens_q"))
    if size > 1:
        row = host_row(current_row() or {})
        # A mean over no token would be NaN, and 0 times NaN too.
        real = None if row is None else max(row.num_tokens - row.padding, 1)
        logits = tuple(gather_row(x.view(1, tokens, -1), size)[0, :real] for x in logits)
    return load_balancing_loss_func(
        logits, num_experts, config.num_experts_per_tok, call.get("attention_mask")
    )


class TrainedLogProbs(torch.autograd.Function):
    """Log-probability (float32), entropy and whether the target has the highest logit, ``(P,)``.

    The forward computes gradients of a sum while the logits of a chunk exist, and the backward
    scales them. For the weight this is exact only where positions get the same gradient: those of
    others (DFT, weights) are computed again, on accelerators, where comparing would wait, all.

    Only the log-probability is differentiable. Arguments: hidden states of the positions
    ``(P, H)``; weight ``(V, H)`` and bias ``(V,)`` or None of the head; target ids ``(P,)`` int64;
    the factor of the logits; and their bound, as ``softcap * tanh(logit / softcap)``, or None.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap):
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        # On accelerators, the backward cannot compare its gradients without a sync.
        needs = [x and (not i or is_cpu(hidden)) for i, x in enumerate(ctx.needs_input_grad[:3])]
        log_probs, entropy = hidden.new_empty((2, len(hidden)), dtype=torch.float32)
        is_top1 = torch.empty_like(targets, dtype=torch.bool)
        d_hidden, *d_head = _zeros((hidden, weight, bias), needs)
        buffer: Tensor | None = None  # chunks share it: fresh pages cost as much as the arithmetic
        for rows in _chunks(hidden, weight):
            logits, slope = _logits(hidden[rows], weight, bias, dtype, scale, softcap)
            buffer = torch.empty_like(logits) if buffer is None else buffer
            probabilities = buffer[: len(logits)]
            log_probs[rows], entropy[rows], is_top1[rows] = _statistics(
                logits, targets[rows], probabilities
            )
            if any(needs):
                d_logits = _d_logits(probabilities, targets[rows, None], slope).to(dtype)
                if d_hidden is not None:
                    d_hidden[rows] = (d_logits @ weight.to(dtype)).float()
                _add_weight_grads(d_head, d_logits, hidden[rows].to(dtype))
        ctx.save_for_backward(hidden, weight, bias, targets, d_hidden, *d_head)
        ctx.options = (dtype, scale, softcap)
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx, grad, _grad_entropy, _grad_top1):
        hidden, weight, bias, _, d_hidden, *of_head = ctx.saved_tensors
        if d_hidden is not None:
            d_hidden = (d_hidden * grad[:, None]).to(hidden.dtype)
        if any(ctx.needs_input_grad[1:3]):
            of_head = _weight_grads(ctx, grad, of_head)
        of_head = [
            x if x is None else x.to(y.dtype) for x, y in zip(of_head, (weight, bias), strict=True)
        ]
        return d_hidden, *of_head, None, None, None


def _weight_grads(ctx, grad, of_ones):
    """Return the gradients of weight ``(V, H)`` and bias ``(V,)``, float32, or None if not needed.

    `grad` ``(P,)`` is that of the log-probabilities; `of_ones` are the results if all were 1.
    """
    hidden, weight, bias, targets, *_ = ctx.saved_tensors
    dtype, scale, softcap = ctx.options
    at: Any = slice(None)
    d_head = None
    if is_cpu(grad) and len(grad):  # those of most positions are scaled
        most = grad.median()
        others = torch.nonzero(grad != most)[:, 0]
        if 2 * len(others) <= len(grad):
            at = others
            grad = grad - most
            d_head = [None if x is None else x * most for x in of_ones]
    hidden, targets, grad = hidden[at], targets[at], grad[at]
    with maybe_gather_lm_head_ctx(weight, bias):  # partitioned by ZeRO-3, the weight has no shape
        d_head = d_head or _zeros((weight, bias), ctx.needs_input_grad[1:3])
        for rows in _chunks(hidden, weight):
            logits, slope = _logits(hidden[rows], weight, bias, dtype, scale, softcap)
            d_logits = _d_logits(logits.softmax(-1), targets[rows, None], slope)
            d_logits = (d_logits * grad[rows, None]).to(dtype)
            _add_weight_grads(d_head, d_logits, hidden[rows].to(dtype))
    return d_head


def _zeros(tensors, needed):
    pairs = zip(tensors, needed, strict=True)
    return [torch.zeros_like(x, dtype=torch.float32) if needs else None for x, needs in pairs]


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    size = max(1, _CHUNK_ELEMENTS // weight.shape[0])
    return [slice(start, start + size) for start in range(0, len(hidden), size)]


def _logits(hidden, weight, bias, dtype, scale, softcap):
    """Return logits ``(C, V)`` float32 and their slope against ``hidden @ weight.T + bias``."""
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


def _statistics(logits, targets, probabilities):
    """Return log-probability, entropy and is_top1, ``(C,)`` each.

    Fills `probabilities` and overwrites `logits`, both ``(C, V)``, because passes are expensive.
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


def _d_logits(probabilities, target, slope):
    """Return the gradient of the targets' log-probability, in place of `probabilities`."""
    gradient = probabilities.neg_()
    gradient.scatter_add_(-1, target, torch.ones_like(target, dtype=gradient.dtype))
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def _add_weight_grads(d_head, d_logits, hidden):
    """Add a chunk's gradients to those of weight ``(V, H)`` and bias ``(V,)``."""
    d_weight, d_bias = d_head
    if d_weight is not None and d_logits.dtype == d_weight.dtype:
        d_weight.addmm_(d_logits.t(), hidden)
    elif d_weight is not None:
        d_weight += d_logits.t() @ hidden
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=torch.float32)


def register_head(model: Any) -> None:
    """Register with ZeRO-3 that the forward of `model` reads the parameters of its head.

    After a native forward, which gathers them, the backward fails on an empty weight (0.19).
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    for parameter in (getattr(head, "weight", None), getattr(head, "bias", None)):
        if hasattr(parameter, "ds_id"):
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, parameter)
