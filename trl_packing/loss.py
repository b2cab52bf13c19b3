"""What each trained token counts in the loss of an optimizer step.

    labels        -100   12   13 -100   22     which tokens are trained
    loss_weights     0  1.0  0.5    0  2.0     how much each of them counts; without the column, 1

    loss = Σ w · loss of a token / Σ w         over all micro-batches and ranks of the step

TRL divides by the number N of trained tokens of the step. Its denominator stays as it is, and each
weight is multiplied by N / Σ w instead: weights of 1 change no bit, and TRL, which divides by no
less than 1, cannot touch small ones.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from trl_packing.labels import IGNORE_INDEX, WEIGHT_COLUMN


def target_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return what every target ``labels[:, 1:]`` counts, ``(rows, T - 1)`` float32.

    0 where it is not trained; 1 where it is, if the batch has no `loss_weights`.
    """
    is_trained = batch["labels"][..., 1:] != IGNORE_INDEX
    weights = batch.get(WEIGHT_COLUMN)
    return is_trained.float() if weights is None else weights[..., 1:] * is_trained


def scale_of_weights(num_trained: Tensor, total: Tensor) -> Tensor:
    """Return ``num_trained / total``, what weights are multiplied by; 0 if they are all 0."""
    return torch.where(total > 0, num_trained / total, 0.0)


def check_weights_can_be_used(compute_loss_func: Any) -> None:
    """Raise ValueError if the loss is computed by a function that takes no weights."""
    if compute_loss_func is not None:
        raise ValueError(
            f"{WEIGHT_COLUMN} say what each token counts, but compute_loss_func computes the loss "
            f"without them; leave compute_loss_func out, or drop the column: "
            f"dataset.remove_columns({WEIGHT_COLUMN!r})"
        )


@contextmanager
def weighted_loss(
    trainer: Any, model: Callable[..., Any], weights: Tensor | None, scale: Tensor | None
) -> Iterator[Callable[..., Any]]:
    """Yield what `SFTTrainer.compute_loss` must call in place of `model`, for the weighted loss.

    `weights` are `target_weights` of the batch; with None it is `model`. `scale` is
    `scale_of_weights` of the step, or None if the loss is that of this batch alone, which TRL
    divides by the tokens of this batch.
    """
    if weights is None:
        yield model
        return
    loss_type, smoother = trainer.args.loss_type, trainer.label_smoother
    is_dft = loss_type == "dft"
    if is_dft:
        # TRL multiplies by the exponential of `log_probs`, which weighted ones are not made for. So
        # `_weighted_call` does it before, and TRL only sums up.
        trainer.args.loss_type, trainer.label_smoother = "nll", None
    elif smoother is not None:
        trainer.label_smoother = WeightedLabelSmoother(
            smoother.epsilon, smoother.ignore_index, weights, scale
        )
    try:
        yield partial(_weighted_call, model, weights, scale, is_dft)
    finally:
        trainer.args.loss_type, trainer.label_smoother = loss_type, smoother


def _weighted_call(
    model: Callable[..., Any],
    weights: Tensor,
    scale: Tensor | None,
    is_dft: bool,
    **inputs: Any,
) -> Any:
    """Call `model`; a fused head's `log_probs` come back as minus the weighted loss of a token."""
    outputs = model(**inputs)
    if not inputs.get("fused_lm_head"):
        return outputs
    log_probs = outputs.log_probs
    if scale is None:
        scale = scale_of_weights(outputs.label_mask.sum(), weights.sum().to(log_probs.device))
    if is_dft:  # https://huggingface.co/papers/2508.05629
        log_probs = log_probs * log_probs.exp().detach()
    outputs.log_probs = log_probs * (_of_scores(weights, log_probs) * scale)
    return outputs


def _of_scores(weights: Tensor, scores: Tensor) -> Tensor:
    """Return `weights` ``(rows, T - 1)`` in the shape of `scores`, behind virtual tokens.

    Prompt tuning puts untrained tokens in front of every row, and so columns in front of `scores`.
    """
    virtual = scores.shape[1] - weights.shape[1]
    if virtual < 0 or len(scores) != len(weights):
        raise RuntimeError(
            f"the model scored {tuple(scores.shape)} targets where {WEIGHT_COLUMN} are of "
            f"{tuple(weights.shape)}; drop the column to train this model"
        )
    return pad(weights.to(scores.device), (virtual, 0))


@dataclass
class WeightedLabelSmoother(LabelSmoother):
    """transformers' `LabelSmoother`, each target counting ``weights * scale``."""

    weights: Tensor | None = None
    scale: Tensor | None = None

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
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        nll = -log_softmax(logits[..., :-1, :].contiguous(), dim=-1)
        targets = labels[..., 1:, None]
        is_trained = targets != self.ignore_index
        given = is_trained.sum() if num_items_in_batch is None else num_items_in_batch
        count = torch.as_tensor(given, device=nll.device)
        scale = self.scale
        if scale is None:
            scale = scale_of_weights(count.to(self.weights.device), self.weights.sum())
        weights = (self.weights * scale)[..., None].to(nll.device)
        target_loss = nll.gather(-1, targets.clamp(min=0)).masked_fill(~is_trained, 0.0)
        mean_loss = nll.sum(-1, keepdim=True, dtype=torch.float32).masked_fill(~is_trained, 0.0)
        target_loss = (target_loss * weights).sum() / count
        mean_loss = (mean_loss * weights).sum() / (count * nll.shape[-1])
        return (1 - self.epsilon) * target_loss + self.epsilon * mean_loss


class WeightedMeanTrainer(SFTTrainer):
    """`SFTTrainer` whose loss is one weighted mean of a step, or of a whole evaluation set."""

    _trl_path: str | None
    _evaluates_padded = False
    _trains_weighted = False
    _weight_scale: Tensor | None = None  # of the step that is being trained
    _eval_sums = torch.zeros(2, dtype=torch.float64)  # Σ w · loss, Σ w
    router_aux_loss_coef: float

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Measure the step as a whole, before its first micro-batch is trained."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._trl_path:
            return batches, num_items
        if self.aux_loss_enabled:
            tokens = torch.tensor(sum(b["input_ids"].numel() for b in batches), device=device)
            self._step_tokens = int(self.accelerator.gather(tokens).sum()) // self.get_tp_size()
        self._weight_scale = None
        # All ranks or none: one may have no document left, and then no weights in its batch.
        weighs = self._trains_weighted or any(WEIGHT_COLUMN in batch for batch in batches)
        if weighs and num_items is not None:
            total = torch.stack([target_weights(batch).sum() for batch in batches]).sum().to(device)
            total = self.accelerator.gather(total).sum() / self.get_tp_size()
            self._weight_scale = scale_of_weights(num_items, total)
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Keep the weights as they are: DeepSpeed has floats cast to the dtype of the model."""
        prepared = super()._prepare_inputs(inputs)
        if WEIGHT_COLUMN in inputs and not self._trl_path:
            prepared[WEIGHT_COLUMN] = inputs[WEIGHT_COLUMN].to(self.args.device)
        return prepared

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weigh every token; TRL's own counts all alike, and MoE micro-batches too."""
        if self._trl_path:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._evaluates_padded:
            self._mask_repeated_rows(inputs)
        scale = None if num_items_in_batch is None else self._weight_scale
        weights = None
        if scale is not None or WEIGHT_COLUMN in inputs:
            check_weights_can_be_used(self.compute_loss_func)
            weights = target_weights(inputs)
            inputs = {name: value for name, value in inputs.items() if name != WEIGHT_COLUMN}
        with (
            self._auxiliary_loss_weighted(inputs, num_items_in_batch),
            weighted_loss(self, model, weights, scale) as weighted,
        ):
            result = super().compute_loss(weighted, inputs, return_outputs, num_items_in_batch)
        if not self.model.training:
            loss = result[0] if return_outputs else result
            total = target_weights(inputs).sum() if weights is None else weights.sum()
            # Of a batch without trained tokens label smoothing makes 0 / 0.
            share = torch.where(total > 0, loss.detach().float() * total, 0.0)
            sums = torch.stack([share, total])
            self._eval_sums = self._eval_sums + sums.double().cpu()
        return result

    def _mask_repeated_rows(self, inputs: Any) -> None:
        """Mask the rows by which accelerate fills up the last batch of several ranks."""
        state = self.accelerator.gradient_state
        if "attention_mask" in inputs and state.end_of_dataloader and state.remainder > 0:
            labels = inputs["labels"]
            kept = state.remainder - self.args.process_index * len(labels)
            labels[max(kept, 0) :] = IGNORE_INDEX

    @contextmanager
    def _auxiliary_loss_weighted(self, inputs: Any, num_items_in_batch: Any) -> Iterator[None]:
        """Weight a micro-batch's balance of experts by its share of the step's tokens.

        TRL takes the mean over micro-batches, whatever they hold, and DDP that over ranks.
        """
        if not self.aux_loss_enabled or num_items_in_batch is None:
            yield
            return
        share = inputs["input_ids"].numel() / self._step_tokens
        ranks = self.args.world_size // self.get_tp_size()
        coefficient = self.router_aux_loss_coef
        self.router_aux_loss_coef = (
            coefficient * share * (self.current_gradient_accumulation_steps * ranks)
        )
        try:
            yield
        finally:
            self.router_aux_loss_coef = coefficient

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Report the mean over all trained tokens, not the mean of micro-batch means."""
        if self._trl_path:
            return super().evaluation_loop(*args, **kwargs)
        self._eval_sums = torch.zeros(2, dtype=torch.float64)
        output = super().evaluation_loop(*args, **kwargs)
        loss, total = self.accelerator.reduce(
            self._eval_sums.to(self.args.device, torch.float32), reduction="sum"
        ).tolist()
        prefix = kwargs.get("metric_key_prefix", "eval")
        if f"{prefix}_loss" in output.metrics and total:
            output.metrics[f"{prefix}_loss"] = loss / total
        return output
