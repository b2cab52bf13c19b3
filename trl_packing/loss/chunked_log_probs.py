"""Log-probabilities of targets from hidden states, chunk by chunk, without all logits at once.

The gradient of a sum of log-probabilities is known in the forward, so it is computed there, while
the logits of a chunk exist. The backward scales it by the incoming gradient. For the hidden states
this is always exact. For the weight it is exact only if all positions get the same gradient (plain
negative log-likelihood). Otherwise (DFT, weights), and on accelerators, where the comparison would
wait for the device, the backward computes the weight's gradient again. In a row with shared
prefixes, most positions have one gradient, and only those of several documents are computed again.

Shape letters: P positions, H hidden size, V vocabulary, C positions of a chunk.
"""

import torch
from torch import Tensor
from trl.trainer.utils import maybe_gather_lm_head_ctx

from trl_packing.documents.host_row import is_cpu

# Logits of a chunk: 2**26 float32 are 256 MiB.
_CHUNK_ELEMENTS = 2**26


def trained_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    scale: float,
    softcap: float | None,
    mostly_equal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and whether the target has the highest logit, ``(P,)`` each.

    Only the log-probability, float32, is differentiable.

    Args:
        hidden: hidden states of the positions, ``(P, H)``.
        weight: weight of the LM head, ``(V, H)``.
        bias: bias of the LM head, ``(V,)``.
        targets: target ids, ``(P,)`` int64.
        scale: factor of the logits.
        softcap: bound of the logits, as ``softcap * tanh(logit / softcap)``; None: none.
        mostly_equal: most positions will get the same gradient.
    """
    return _TrainedLogProbs.apply(hidden, weight, bias, targets, scale, softcap, mostly_equal)


class _TrainedLogProbs(torch.autograd.Function):
    """`trained_log_probs` with its backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, softcap, mostly_equal):
        dtype = _compute_dtype(hidden)
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # On other devices the backward cannot compare its gradients without a sync.
        ctx.keeps_weight_grads = is_cpu(hidden)
        if not ctx.keeps_weight_grads:
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
        ctx.mostly_equal = mostly_equal
        ctx.mark_non_differentiable(entropy, is_top1)
        return log_probs, entropy, is_top1

    @staticmethod
    def backward(ctx, grad, _grad_entropy, _grad_top1):
        hidden, weight, bias, _, d_hidden, d_weight, d_bias = ctx.saved_tensors
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if d_hidden is not None:
            d_hidden = (d_hidden * grad[:, None]).to(hidden.dtype)
        if needs_weight or needs_bias:
            d_weight, d_bias = _weight_grads(ctx, grad, d_weight, d_bias)
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _weight_grads(ctx, grad, d_weight, d_bias):
    """Return the gradients of weight ``(V, H)`` and bias ``(V,)``, float32, or None if not needed.

    Args:
        ctx: context of `_TrainedLogProbs`.
        grad: gradients of the log-probabilities, ``(P,)``.
        d_weight: gradient of the weight if all gradients were 1; None if not kept.
        d_bias: the same of the bias.
    """
    if ctx.keeps_weight_grads and len(grad):
        most = grad.median() if ctx.mostly_equal else grad[0]
        is_equal = bool((grad == most).all())
        others = torch.nonzero(grad != most)[:, 0] if ctx.mostly_equal and not is_equal else None
        if is_equal or (others is not None and 2 * len(others) <= len(grad)):
            found = [None if x is None else x * most for x in (d_weight, d_bias)]
            if others is None:
                return found
            more = _weighted_weight_grads(ctx, grad[others] - most, others)
            return [x if x is None else x + y for x, y in zip(found, more, strict=True)]
    return _weighted_weight_grads(ctx, grad, slice(None))


def _weighted_weight_grads(ctx, grad, at):
    """Return the same, computed again.

    Args:
        ctx: context of `_TrainedLogProbs`.
        grad: gradients of the log-probabilities of some positions, ``(P,)``.
        at: index of these positions.
    """
    hidden, weight, bias, targets, *_ = ctx.saved_tensors
    hidden, targets = hidden[at], targets[at]
    dtype, scale, softcap = ctx.options
    _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    with maybe_gather_lm_head_ctx(weight, bias):  # partitioned by ZeRO-3, the weight has no shape
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
    """Return the positions of each chunk."""
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
    """Return logits ``(C, V)`` float32 and their slope against ``hidden @ weight.T + bias``.

    `hidden` is ``(C, H)``; products run in `dtype`. The slope is a number without a soft-cap, and
    ``(C, V)`` with one.
    """
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
    """Return log-probability, entropy and is_top1, ``(C,)`` each.

    Fills `probabilities` ``(C, V)`` and overwrites `logits` ``(C, V)``; a pass over such a tensor
    is expensive.
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
    """Return the gradient ``(C, V)`` of the targets' log-probability; overwrites `probabilities`.

    `target` is ``(C, 1)``.
    """
    gradient = probabilities.neg_()
    gradient.scatter_add_(-1, target, torch.ones_like(target, dtype=gradient.dtype))
    return gradient if isinstance(slope, float) and slope == 1.0 else gradient.mul_(slope)


def _add_weight_grads(
    d_weight: Tensor | None, d_bias: Tensor | None, d_logits: Tensor, hidden: Tensor
) -> None:
    """Add a chunk's gradients to `d_weight` ``(V, H)`` and `d_bias` ``(V,)``."""
    if d_weight is not None:
        if d_logits.dtype == d_weight.dtype:
            d_weight.addmm_(d_logits.t(), hidden)
        else:
            d_weight += d_logits.t() @ hidden
    if d_bias is not None:
        d_bias += d_logits.sum(0, dtype=torch.float32)
