"""What each trained token counts in the loss of an optimizer step.

    labels        -100   12   13 -100   22     which tokens are trained
    loss_weights     0  1.0  0.5    0  2.0     how much each of them counts; without the column, 1

    loss = Σ w · loss of a token / Σ w         over all micro-batches and ranks of the step

What a document as a whole counts is in the weights already (weighting). The mean over an evaluation
set is the same one (evaluation).

TRL divides by the number N of trained tokens of the step. Its denominator stays as it is, and each
weight is multiplied by N / Σ w instead: weights of 1 change no bit, and TRL, which divides by no
less than 1, cannot touch small ones.

Label smoothing whose targets weigh what the step says, for `loss`.

loss of a target = (1 − ε) · nll + ε · mean of the nll of all tokens, times its weight
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from torch.nn.functional import log_softmax, pad
from transformers.trainer_pt_utils import LabelSmoother
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)
from trl_packing.loss.evaluation import EvaluationSums, Sources
from trl_packing.loss.token_metrics import NUM_SUMS, TokenSums, sums_dtype, write_means
from trl_packing.models.neftune import announce_documents


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


logger = get_logger(__name__)

_FOR_THE_LOSS = (TOKEN_WEIGHTS, SOURCE_IDS)  # of a batch; the model is not given them


def target_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return what every target ``labels[:, 1:]`` counts, ``(rows, T - 1)`` float32.

    0 where it is not trained; 1 where it is, if the batch has no `loss_weights`.
    """
    is_trained = batch["labels"][..., 1:] != IGNORE_INDEX
    weights = batch.get(TOKEN_WEIGHTS)
    return is_trained.float() if weights is None else weights[..., 1:] * is_trained


def scale_of_weights(num_trained: Tensor, total: Tensor) -> Tensor:
    """Return ``num_trained / total``, what weights are multiplied by; 0 if they are all 0.

    In the dtype of `total`: weights may be so large, or small, that float32 holds neither.
    """
    return torch.where(total > 0, num_trained / total, 0.0)


def sum_of_weights(weights: Tensor) -> Tensor:
    """Return Σ w, a scalar; float32 would be infinite for large weights."""
    return weights.sum(dtype=sums_dtype(weights.device))


def check_weights_can_be_used(compute_loss_func: Any, columns: Iterable[str]) -> None:
    """Raise ValueError if `columns` hold weights and a function computes the loss without them."""
    for column in WEIGHT_COLUMNS:
        if compute_loss_func is not None and column in columns:
            each = "token" if column == TOKEN_WEIGHTS else "document"
            raise ValueError(
                f"{column} says what each {each} counts, but compute_loss_func computes the loss "
                f"without it; leave compute_loss_func out, or drop the column: "
                f"dataset.remove_columns({column!r})"
            )


@contextmanager
def weighted_loss(
    trainer: Any,
    model: Callable[..., Any],
    weights: Tensor | None,
    scale: Tensor | None,
    seen: Callable[[Tensor], None] | None,
) -> Iterator[Callable[..., Any]]:
    """Yield what `SFTTrainer.compute_loss` must call in place of `model`, for the weighted loss.

    `weights` are `target_weights` of the batch, and `scale` is `scale_of_weights` of the step, or
    of this batch if TRL divides by its tokens alone; with None it is `model`. `seen` is called with
    the weighted loss of every target, ``(rows, T - 1)``, behind virtual tokens.
    """
    if weights is None or scale is None:
        yield model
        return
    loss_type, smoother = trainer.args.loss_type, trainer.label_smoother
    is_dft = loss_type == "dft"
    smooths = smoother is not None and not is_dft
    if is_dft:
        # TRL multiplies by the exponential of `log_probs`, which weighted ones are not made for. So
        # `_weighted_call` does it before, and TRL only sums up.
        trainer.args.loss_type, trainer.label_smoother = "nll", None
    elif smooths:
        trainer.label_smoother = WeightedLabelSmoother(
            smoother.epsilon, smoother.ignore_index, weights, scale, seen
        )
    try:
        # Label smoothing says itself what it makes of the logits.
        yield partial(_weighted_call, model, weights, scale, is_dft, None if smooths else seen)
    finally:
        trainer.args.loss_type, trainer.label_smoother = loss_type, smoother


def _observed_call(
    model: Callable[..., Any], sums: TokenSums | None, weights: Tensor | None, **inputs: Any
) -> Any:
    """Call `model`, and add what its fused head scored to `sums`."""
    outputs = model(**inputs)
    if sums is not None and inputs.get("fused_lm_head"):
        total = outputs.label_mask.sum() if weights is None else sum_of_weights(weights)
        sums.add(outputs, inputs["labels"].numel(), total)
    return outputs


def _weighted_call(
    model: Callable[..., Any],
    weights: Tensor,
    scale: Tensor,
    is_dft: bool,
    seen: Callable[[Tensor], None] | None,
    **inputs: Any,
) -> Any:
    """Call `model`; a fused head's `log_probs` come back as minus the weighted loss of a token."""
    outputs = model(**inputs)
    if not inputs.get("fused_lm_head"):
        return outputs
    log_probs = outputs.log_probs
    if is_dft:  # https://huggingface.co/papers/2508.05629
        log_probs = log_probs * log_probs.exp().detach()
    of_scores = _of_scores(weights, log_probs)
    if seen is not None:
        seen(-log_probs.detach().to(scale.dtype) * of_scores)
    outputs.log_probs = log_probs * scaled_weights(of_scores, scale.to(log_probs.device))
    return outputs


def _of_scores(weights: Tensor, scores: Tensor) -> Tensor:
    """Return `weights` ``(rows, T - 1)`` in the shape of `scores`, behind virtual tokens.

    Prompt tuning puts untrained tokens in front of every row, and so columns in front of `scores`.
    """
    virtual = scores.shape[1] - weights.shape[1]
    if virtual < 0 or len(scores) != len(weights):
        raise RuntimeError(
            f"the model scored {tuple(scores.shape)} targets where {TOKEN_WEIGHTS} are of "
            f"{tuple(weights.shape)}; drop the column to train this model"
        )
    return pad(weights.to(scores.device), (virtual, 0))


class WeightedMeanTrainer(SFTTrainer):
    """`SFTTrainer` whose loss is one weighted mean of a step, or of a whole evaluation set."""

    _trl_path: str | None
    _accepts_loss_kwargs: bool  # as TRL has it
    _num_items: Any = None  # of the step, while a loss of a user's is divided by its micro-batches
    _evaluates_padded = False
    _trains_weighted = False
    _weight_scale: Tensor | None = None  # of the step that is being trained
    _step_tokens: Tensor  # of it too, float32, padding included
    _sources: Sources | None = None  # of the set that is evaluated, where losses are told apart
    _scored_evaluation = False  # by us: a `compute_loss` of the user's own may not call ours
    _evaluated: EvaluationSums | None = None  # while a set is evaluated
    _trained_sums: TokenSums | None = None  # of the micro-batches trained since they were read
    router_aux_loss_coef: float

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Measure the step as a whole, before its first micro-batch is trained."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._trl_path:
            return batches, num_items
        self._weight_scale = None
        # All ranks or none: one may have no document left, and then no weights in its batch.
        weighs = self._trains_weighted or any(TOKEN_WEIGHTS in batch for batch in batches)
        weighs = weighs and num_items is not None
        if weighs or self.aux_loss_enabled:
            # They stay on the device: the host would wait for the step before.
            tokens = torch.full((), sum(b["input_ids"].numel() for b in batches), device=device)
            wide = sums_dtype(tokens.device)
            weights = torch.zeros((), device=device, dtype=wide)
            if weighs:
                totals = [sum_of_weights(target_weights(batch)) for batch in batches]
                weights = torch.stack(totals).sum()
            sums = torch.stack([tokens.to(wide), weights.to(device, non_blocking=True)])
            sums = self.accelerator.gather(sums[None]).sum(0) / self.get_tp_size()
            self._step_tokens = sums[0].float()
            self._weight_scale = scale_of_weights(num_items, sums[1]) if weighs else None
        return batches, num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Keep the weights as they are: DeepSpeed has floats cast to the dtype of the model."""
        prepared = super()._prepare_inputs(inputs)
        if TOKEN_WEIGHTS in inputs and not self._trl_path:
            weights = inputs[TOKEN_WEIGHTS]
            prepared[TOKEN_WEIGHTS] = weights.to(self.args.device, non_blocking=True)
        return prepared

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Tell NEFTune which documents are trained, also where `compute_loss` is a user's.

        Of a model class that takes no number of items, TRL gives a user's loss None, and divides
        it by the micro-batches of the step; a loss that is a mean counts on that.
        """
        if self._hides_number_of_items():
            self._num_items, num_items_in_batch = num_items_in_batch, None
        try:
            with announce_documents(boundaries=inputs.get("cu_seq_lens_q")):
                return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._num_items = None

    def _hides_number_of_items(self) -> bool:
        """Whether `compute_loss` is a user's, which TRL gives no number of items for this class."""
        if self._trl_path:
            return False
        is_ours = getattr(self.compute_loss, "__func__", None) is WeightedMeanTrainer.compute_loss
        takes_count = self._accepts_loss_kwargs or self.compute_loss_func is not None
        return not (is_ours or takes_count)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weigh every token; TRL's own counts all alike, and MoE micro-batches too."""
        if self._trl_path:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        divided_by = 1
        if num_items_in_batch is None and self._num_items is not None and self.model.training:
            # A subclass calls ours in a `compute_loss` of its own, and is divided (training_step).
            num_items_in_batch = self._num_items
            if not getattr(self, "loss_is_scaled_for_ga", None):
                divided_by = self.current_gradient_accumulation_steps
        if self._evaluates_padded:
            self._mask_repeated_rows(inputs)
        scale = None if num_items_in_batch is None else self._weight_scale
        evaluated, ids = self._evaluated, inputs.get(SOURCE_IDS)
        weights = seen = None
        if scale is not None or any(name in inputs for name in _FOR_THE_LOSS):
            check_weights_can_be_used(self.compute_loss_func, inputs)
            weights = target_weights(inputs)
            if scale is None:
                num_trained = (inputs["labels"][..., 1:] != IGNORE_INDEX).sum()
                scale = scale_of_weights(num_trained, sum_of_weights(weights))
            inputs = {name: value for name, value in inputs.items() if name not in _FOR_THE_LOSS}
        if evaluated is not None and ids is not None and weights is not None:
            seen = partial(_add_by_source, evaluated, weights, ids[..., 1:])
        inputs = for_kernels(inputs)
        with (
            announce_documents(boundaries=inputs.get("cu_seq_lens_q")),
            self._auxiliary_loss_weighted(inputs, num_items_in_batch),
            weighted_loss(self, model, weights, scale, seen) as weighted,
        ):
            observed = partial(_observed_call, weighted, self._token_sums(), weights)
            result = super().compute_loss(observed, inputs, return_outputs, num_items_in_batch)
        if evaluated is not None:
            self._scored_evaluation = True
            loss = result[0] if return_outputs else result
            evaluated.add(
                loss, sum_of_weights(target_weights(inputs) if weights is None else weights)
            )
        if divided_by == 1:
            return result
        return (result[0] * divided_by, result[1]) if return_outputs else result * divided_by

    def _token_sums(self) -> TokenSums | None:
        """Return what the micro-batch's entropy and accuracy are added to."""
        if self._evaluated is not None:
            return self._evaluated.tokens
        return self._trained_sums if self.model.training else None

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

        TRL takes the mean over micro-batches, whatever they hold, and DDP that over ranks. It
        depends on what shares a batch, so `eval_loss` is without it; `eval_aux_loss` has it.
        """
        if not self.aux_loss_enabled or (num_items_in_batch is None and self.model.training):
            yield
            return
        coefficient = self.router_aux_loss_coef
        if num_items_in_batch is None:
            self.router_aux_loss_coef = 0.0
        else:
            share = inputs["input_ids"].numel() / self._step_tokens
            ranks = self.args.world_size // self.get_tp_size()
            self.router_aux_loss_coef = (
                coefficient * share * (self.current_gradient_accumulation_steps * ranks)
            )
        try:
            yield
        finally:
            self.router_aux_loss_coef = coefficient

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Report the mean over all trained tokens, not the mean of micro-batch means.

        Before anybody reads it: best-model selection, early stopping and the log see this one.
        """
        if self._trl_path:
            return super().evaluation_loop(*args, **kwargs)
        self._evaluated = evaluated = EvaluationSums(self._sources)
        self._scored_evaluation = False
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self._evaluated = None
        reduced = self.accelerator.reduce(
            evaluated.sums.to(self.args.device, sums_dtype(self.args.device)), reduction="sum"
        )
        write_means(self._metrics["eval"], self._tokens_of_ranks(evaluated.tokens).tolist())
        prefix = kwargs.get("metric_key_prefix", "eval")
        if f"{prefix}_loss" in output.metrics:
            own = evaluated.metrics(reduced, prefix, is_likelihood=self._loss_is_likelihood())
            loss = {name: own[name] for name in (f"{prefix}_loss",) if name in own}
            if f"{prefix}_loss" not in own and self._scored_evaluation:
                # transformers' is 0.0, the best there could be, of batches that count for nothing.
                loss[f"{prefix}_loss"] = math.nan
                logger.warning(
                    f"{prefix}_loss is nan: no token of the set is trained with a weight above 0"
                )
            # Any other name may be one that compute_metrics has given a value of its own.
            output.metrics.update(own | output.metrics | loss)
        return output

    def _tokens_of_ranks(self, tokens: TokenSums) -> Tensor:
        sums = tokens.take()
        if sums is None:
            dtype = sums_dtype(self.args.device)
            sums = torch.zeros(NUM_SUMS, device=self.args.device, dtype=dtype)
        return self.accelerator.reduce(sums.to(self.args.device), reduction="sum")

    def _loss_is_likelihood(self) -> bool:
        is_plain = self.label_smoother is None and self.compute_loss_func is None
        return is_plain and self.args.loss_type == "nll"


def _add_by_source(
    evaluated: EvaluationSums, weights: Tensor, source_ids: Tensor, losses: Tensor
) -> None:
    """Add the `losses` of a batch, whose virtual tokens belong to no source."""
    virtual = losses.shape[1] - weights.shape[1]
    evaluated.add_by_source(
        losses, _of_scores(weights, losses), pad(source_ids, (virtual, 0), value=-1)
    )
