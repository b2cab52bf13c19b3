"""Label smoothing whose targets weigh what the step says, for `loss`.

loss of a target = (1 − ε) · nll + ε · mean of the nll of all tokens, times its weight
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers.trainer_pt_utils import LabelSmoother


def scaled_weights(weights: Tensor, scale: Tensor) -> Tensor:
    """Return ``weights * scale`` in float32, multiplied in the dtype of `scale`.

    A scale that float32 does not hold may meet weights that it takes back to numbers around 1.
    """
    return (weights.to(scale.dtype) * scale).to(weights.dtype)


@dataclass
class WeightedLabelSmoother(LabelSmoother):
    """transformers' `LabelSmoother`, each target counting ``weights * scale``.

    seen: called with the smoothed loss times `weights` of every target, ``(rows, T - 1)``.
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
        """Return the loss as the parent does; `labels` are shifted, whatever `shift_labels` says.

        As in the parent, the mean over `num_items_in_batch`, or over the targets of this batch.
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
            smoothed = smoothed.detach().to(self.scale.dtype)
            self.seen((smoothed * self.weights[..., None].to(nll.device))[..., 0])
        target_loss = (target_loss * weights).sum() / count
        mean_loss = (mean_loss * weights).sum() / (count * nll.shape[-1])
        return (1 - self.epsilon) * target_loss + self.epsilon * mean_loss
