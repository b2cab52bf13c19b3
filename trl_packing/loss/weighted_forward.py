"""A model call whose fused LM head, or label smoother, returns the weighted loss of each target.

    labels        -100   12   13 -100   22     trained tokens
    loss_weights     0  1.0  0.5    0  2.0     weight of each; 1 without the column

    loss of the step = Σ w · loss of a target / Σ w

TRL divides by N, the number of trained tokens of the step. Its denominator stays, and each weight
is multiplied by N / Σ w: weights of 1 then change no bit, and TRL, which divides by at least 1,
cannot distort small weights.

Label smoothing: loss of a target = (1 − ε) · nll + ε · mean of the nll of all tokens.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from transformers.trainer_pt_utils import LabelSmoother

from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS, WEIGHT_COLUMNS
from trl_packing.loss.token_metrics import TokenSums, sums_dtype
from trl_packing.models.state import temporarily


def scaled_weights(weights: Tensor, scale: Tensor) -> Tensor:
    """Return ``weights * scale`` in float32, multiplied in the dtype of `scale`.

    Weights and scale may each be beyond float32 where their product is around 1.
    """
    return (weights.to(scale.dtype) * scale).to(weights.dtype)


@dataclass
class WeightedLabelSmoother(LabelSmoother):
    """transformers' `LabelSmoother` with a weight of ``weights * scale`` for each target.

    Attributes:
        weights: ``(rows, T - 1)`` float32.
        scale: a scalar, `scale_of_weights`.
        seen: called with the smoothed loss of every target, ``(rows, T - 1)``, without weights.
    """

    weights: Tensor | None = None
    scale: Tensor | None = None
    seen: Callable[[Tensor], None] | None = None

    def __call__(
        self,
        model_output: Any,
        labels: Tensor,
        shift_labels: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Return the mean over `num_items_in_batch`, or over the targets of this batch.

        `labels` are always shifted; `shift_labels` is ignored.
        """
        assert self.weights is not None
        assert self.scale is not None
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        nll = -log_softmax(logits[..., :-1, :].contiguous(), dim=-1)
        targets = labels[..., 1:, None]
        is_trained = targets != self.ignore_index
        given = is_trained.sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(given, device=nll.device)
        weights = scaled_weights(self.weights, self.scale)[..., None].to(nll.device)
        target_loss = nll.gather(-1, targets.clamp(min=0)).masked_fill(~is_trained, 0.0)
        mean_loss = nll.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(~is_trained, 0.0)
        if self.seen is not None:
            smoothed = (1 - self.epsilon) * target_loss + self.epsilon * mean_loss / nll.shape[-1]
            self.seen(smoothed.detach().to(self.scale.dtype)[..., 0])
        target_loss = (target_loss * weights).sum() / count
        mean_loss = (mean_loss * weights).sum() / (count * nll.shape[-1])
        return (1 - self.epsilon) * target_loss + self.epsilon * mean_loss


def target_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return the weight of every target ``labels[:, 1:]``, ``(rows, T - 1)`` float32.

    Untrained targets have 0. Trained ones have 1 if the batch has no `loss_weights`.
    """
    is_trained = batch["labels"][..., 1:] != IGNORE_INDEX
    weights = batch.get(TOKEN_WEIGHTS)
    return is_trained.float() if weights is None else weights[..., 1:] * is_trained


def scale_of_weights(num_trained: Tensor, total: Tensor) -> Tensor:
    """Return ``num_trained / total``, the factor of all weights; 0 if they are all 0.

    It has the dtype of `total`: for very large or small weights float32 cannot hold it.
    """
    return torch.where(total > 0, num_trained / total, 0.0)


def sum_of_weights(weights: Tensor) -> Tensor:
    """Return Σ w, a scalar, in a dtype that is wide enough for large weights."""
    return weights.sum(dtype=sums_dtype(weights.device))


def check_weights_can_be_used(compute_loss_func: Any, columns: Iterable[str]) -> None:
    """Raise ValueError if `columns` hold weights that `compute_loss_func` would ignore."""
    for column in WEIGHT_COLUMNS:
        if compute_loss_func is not None and column in columns:
            each = "token" if column == TOKEN_WEIGHTS else "document"
            raise ValueError(
                f"{column} says what each {each} counts, but compute_loss_func computes the loss "
                f"without it; leave compute_loss_func out, or drop the column: "
                f"dataset.remove_columns({column!r})"
            )


@contextmanager
def weight_targets(
    trainer: Any,
    model: Callable[..., Any],
    weights: Tensor | None,
    scale: Tensor | None,
    seen: Callable[[Tensor], None] | None,
) -> Iterator[Callable[..., Any]]:
    """Yield a stand-in for `model` whose outputs make `SFTTrainer.compute_loss` weight each target.

    Args:
        trainer: its `args.loss_type` and `label_smoother` may be replaced inside the block.
        model: yielded itself if `weights` or `scale` is None.
        weights: `target_weights` of the batch.
        scale: `scale_of_weights` of the step, or of this batch if TRL divides by its tokens alone.
        seen: called with the loss of every target, ``(rows, T - 1)``, without weights. Virtual
            tokens of prompt tuning come first.
    """
    if weights is None or scale is None:
        yield model
        return
    loss_type, smoother = trainer.args.loss_type, trainer.label_smoother
    is_dft = loss_type == "dft"
    smooths = smoother is not None and not is_dft
    if is_dft:
        # TRL multiplies by the exponential of `log_probs`, which must not be weighted. So
        # `_weighted_call` multiplies first, and TRL only sums up.
        loss_type, smoother = "nll", None
    elif smooths:
        smoother = WeightedLabelSmoother(
            smoother.epsilon, smoother.ignore_index, weights, scale, seen
        )
    # The label smoother calls `seen` itself, with the loss that it makes of the logits.
    seen = None if smooths else seen
    with (
        temporarily(trainer.args, loss_type=loss_type),
        temporarily(trainer, label_smoother=smoother),
    ):
        yield partial(_weighted_call, model, weights, scale, is_dft, seen)


def observed_call(
    model: Callable[..., Any],
    sums: TokenSums | None,
    weights: Tensor | None,
    counts: Tensor | None,
    seen: Callable[[Tensor], None] | None,
    is_dft: bool,
    **inputs: Any,
) -> Any:
    """Call `model`, and add the scores of its fused head to `sums`.

    Args:
        model: yielded by `weight_targets`.
        sums: of the run; None adds nothing.
        weights: `target_weights` of the batch; None where they are all 1.
        counts: documents that train each token, ``(rows, T)``; None: one.
        seen: as in `weight_targets`, for a model that it yields unchanged.
        is_dft: whether losses are those of "dft".
        inputs: of the model.
    """
    outputs = model(**inputs)
    if seen is not None and inputs.get("fused_lm_head"):
        seen(-_scores(outputs, is_dft).detach().to(sums_dtype(outputs.log_probs.device)))
    if sums is not None and inputs.get("fused_lm_head"):
        total = outputs.label_mask.sum() if weights is None else sum_of_weights(weights)
        times = None if counts is None else weights_of_scores(counts[..., 1:], outputs.entropy)
        sums.add(outputs, inputs["labels"].numel(), total, times)
    return outputs


def _weighted_call(
    model: Callable[..., Any],
    weights: Tensor,
    scale: Tensor,
    is_dft: bool,
    seen: Callable[[Tensor], None] | None,
    **inputs: Any,
) -> Any:
    """Call `model`; a fused head's `log_probs` become minus the weighted loss of each target."""
    outputs = model(**inputs)
    if not inputs.get("fused_lm_head"):
        return outputs
    log_probs = _scores(outputs, is_dft)
    of_scores = weights_of_scores(weights, log_probs)
    if seen is not None:
        seen(-log_probs.detach().to(scale.dtype))
    outputs.log_probs = log_probs * scaled_weights(of_scores, scale.to(log_probs.device))
    return outputs


def _scores(outputs: Any, is_dft: bool) -> Tensor:
    """Return minus the loss of each target, as a fused head scores it."""
    log_probs: Tensor = outputs.log_probs
    # https://huggingface.co/papers/2508.05629
    return log_probs * log_probs.exp().detach() if is_dft else log_probs


def weights_of_scores(weights: Tensor, scores: Tensor) -> Tensor:
    """Return `weights` ``(rows, T - 1)`` in the shape of `scores`.

    Prompt tuning puts virtual tokens, which are not trained, in front of every row. Their columns
    of `scores` get a weight of 0.
    """
    virtual = scores.shape[1] - weights.shape[1]
    if virtual < 0 or len(scores) != len(weights):
        raise RuntimeError(
            f"the model scored {tuple(scores.shape)} targets where {TOKEN_WEIGHTS} are of "
            f"{tuple(weights.shape)}; drop the column to train this model"
        )
    return pad(weights.to(scores.device), (virtual, 0))
