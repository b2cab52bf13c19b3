"""The loss of an optimizer step: one weighted mean over all micro-batches and ranks.

measure       before the first micro-batch: Σ w and the number of tokens of the whole step
compute       one micro-batch: its share of the loss, and of the balance of experts
write_metrics a whole evaluation set: the same mean, from `LossSums`
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import SFTTrainer

from trl_packing.documents.host_row import for_kernels, send
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
    TARGET_COUNTS,
    TOKEN_WEIGHTS,
)
from trl_packing.loss.lm_head import score_logits
from trl_packing.loss.sums import (
    NUM_SUMS,
    OF_SOURCE,
    LossSums,
    Sources,
    check_weights_can_be_used,
    sums_dtype,
    target_weights,
    write_means,
)

logger = get_logger(__name__)

# Columns of a batch that the model does not take.
_FOR_THE_LOSS = (TOKEN_WEIGHTS, SOURCE_IDS, SOURCE_PLACES, SOURCE_WEIGHTS, TARGET_COUNTS)


class StepLoss:
    """Computes the share of a micro-batch in the loss of a step of `trainer`.

    `trained` holds the sums of the micro-batches trained since they were last taken.
    """

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer
        self.trained = LossSums()
        self._scale: Tensor | None = None  # of the weights of the step
        self._num_tokens: Tensor | None = None  # of the step, padding included, float32
        self.hidden_num_items: Any = None  # from a user's `compute_loss`, as in TRL
        self._was_computed = False  # the loss of the micro-batch that is trained
        self.evaluated: LossSums | None = None  # of the set that is evaluated

    def measure(
        self, batches: Sequence[Mapping[str, Any]], num_items: Any, device: Any, *, weighted: bool
    ) -> None:
        """Sum up the weights and tokens of a step over all ranks, before it is trained.

        Args:
            batches: micro-batches of this rank.
            num_items: trained tokens of the step; None where TRL does not count them.
            device: holds the sums.
            weighted: whether the training set has weights; a rank's batches may have none.
        """
        self.forget()
        weighted = weighted or any(TOKEN_WEIGHTS in batch for batch in batches)
        weighted = weighted and num_items is not None
        if not (weighted or self.trainer.aux_loss_enabled):
            return
        # The sums stay on the device: reading them would wait for the previous step.
        options: Any = {"device": device, "dtype": sums_dtype(torch.device(device))}
        sums = torch.full((2,), sum(b["input_ids"].numel() for b in batches), **options)
        if weighted:
            of_batches = map(target_weights, batches)
            weights = torch.stack([w.sum(dtype=sums_dtype(w.device)) for w in of_batches]).sum()
            sums[1] = send(weights, device)
        sums = self.trainer.accelerator.gather(sums[None]).sum(0) / self.trainer.get_tp_size()
        self._num_tokens = sums[0].float()
        self._scale = _ratio(num_items, sums[1]) if weighted else None

    def forget(self) -> None:
        """Forget the step: none is trained."""
        self._scale = self._num_tokens = None

    def check_was_computed(self, batch: Mapping[str, Any]) -> None:
        """Raise RuntimeError if a user's step has trained shared prefixes by a loss of its own."""
        was_computed = self._was_computed
        self._was_computed = False
        if not was_computed and "key_index" in batch:
            raise RuntimeError(
                f"training_step of {type(self.trainer).__name__} counts the tokens of shared "
                "prefixes once; set prefix_sharing='off', or take the loss from compute_loss"
            )

    def compute(
        self,
        model: Any,
        batch: Mapping[str, Any],
        return_outputs: bool,
        num_items: Any,
        *,
        padded: bool,
    ) -> Any:
        """Return what `SFTTrainer.compute_loss` does; `padded`: of an evaluation on padded rows."""
        trainer = self.trainer
        args = self.trainer.args
        undo = 1
        of_user, training = trainer.compute_loss_func, trainer.model.training
        self._was_computed = True
        if num_items is None and self.hidden_num_items is not None and training:
            # A user's `compute_loss` calls this one, and Trainer will divide what it returns.
            num_items = self.hidden_num_items
            if not getattr(trainer, "loss_is_scaled_for_ga", None):
                undo = trainer.current_gradient_accumulation_steps
        if padded:
            self._mask_repeated_rows(batch)
        inputs = {k: x for k, x in for_kernels(batch).items() if k not in _FOR_THE_LOSS}
        inputs["use_cache"] = False
        if trainer.aux_loss_enabled:
            inputs["output_router_logits"] = True
        labels = inputs["labels"]
        without_labels = {k: x for k, x in inputs.items() if k != "labels"}
        smooths = trainer.label_smoother is not None and args.loss_type == "nll" and not of_user
        if smooths or of_user:  # of all logits, which the fused head has not
            outputs = model(**without_labels)
            logits = outputs["logits"] if smooths else outputs["logits"].detach()
            smoothing = args.label_smoothing_factor if smooths else 0.0
            scored = score_logits(logits, labels, smoothing)
            scored.aux_loss = outputs.get("aux_loss")
        else:
            scored = model(**inputs, fused_lm_head=True)
        virtual = scored.log_probs.shape[1] - (labels.shape[1] - 1)  # tokens before the labels
        if virtual < 0:
            raise RuntimeError(f"{type(model).__name__} scores fewer tokens than there are labels")
        for name in ("log_probs", "entropy", "is_top1"):
            scored[name] = scored[name][:, virtual:]
        losses = -scored.log_probs
        if args.loss_type == "dft":
            losses = losses * (-losses).exp().detach()  # https://huggingface.co/papers/2508.05629
        elif args.loss_type != "nll":
            raise ValueError(f"loss_type={args.loss_type!r} is unknown here; set 'nll' or 'dft'")
        if of_user:
            check_weights_can_be_used(of_user, batch)
            loss = of_user(outputs, labels, num_items_in_batch=num_items)
            losses = loss.detach().expand_as(losses)  # of a batch, only their mean is known
        else:
            loss = self._mean(losses, batch, num_items)
        ranks = trainer.accelerator.num_processes // trainer.get_tp_size()
        if num_items is not None and args.average_tokens_across_devices:
            loss = loss * ranks
        if trainer.aux_loss_enabled and training and not (smooths or of_user):
            # TRL takes the mean over micro-batches of any size, and DDP the mean over ranks. The
            # balance depends on the documents that share a batch, so `eval_loss` is without it.
            share: Any = 1.0
            if num_items is not None and self._num_tokens is not None:
                share = labels.numel() / self._num_tokens.to(scored.aux_loss.device) * ranks
            loss = loss + trainer.router_aux_loss_coef * share * scored.aux_loss
        sums = self.trained if self.evaluated is None and training else self.evaluated
        if sums is not None:
            sums.add(batch, losses, scored)
        loss = loss * undo if undo > 1 else loss
        if not return_outputs:
            return loss
        message = "`return_outputs=True` is deprecated by TRL: the logits take another forward pass"
        warnings.warn(message, FutureWarning, stacklevel=2)
        with torch.no_grad():
            return loss, model(**without_labels)

    def _mean(self, losses: Tensor, batch: Mapping[str, Any], num_items: Any) -> Tensor:
        """Return the weighted sum of `losses` ``(rows, T - 1)`` divided by that of the step.

        Without `num_items` it is divided by the sum of the weights of this batch.
        """
        scale = self._scale
        weights = target_weights(batch)
        if num_items is None:
            num_items = (batch["labels"][..., 1:] != IGNORE_INDEX).sum()
            scale = _ratio(num_items, weights.sum(dtype=sums_dtype(weights.device)))
        elif scale is None and TOKEN_WEIGHTS in batch:
            raise ValueError(
                f"num_items_in_batch={int(num_items)}, but the weights of a step are known only "
                "inside trainer.train(); leave num_items_in_batch out of compute_loss"
            )
        if scale is not None:
            # Weights and scale may each be beyond float32 where their product is around 1.
            weights = (weights.to(scale.dtype) * scale).to(weights.dtype)
            losses = losses * weights.to(losses.device)
        # A step without trained tokens is 0, not 0 / 0.
        return losses.sum() / torch.as_tensor(num_items).to(losses.device).clamp(min=1)

    def _mask_repeated_rows(self, inputs: Mapping[str, Any]) -> None:
        """Mask the rows with which accelerate fills up the last batch of several ranks."""
        state = self.trainer.accelerator.gradient_state
        labels = inputs["labels"]
        if state.end_of_dataloader and state.remainder > 0:
            kept = state.remainder - self.trainer.args.process_index * len(labels)
            labels[max(kept, 0) :] = IGNORE_INDEX

    def write_metrics(
        self, evaluated: LossSums, sources: Sources | None, metrics: dict[str, float], prefix: str
    ) -> None:
        """Replace the mean of micro-batch means in `metrics` by that over all trained tokens.

        `evaluated` are the sums of this rank, `sources` those of the set, if they are told apart.
        """
        trainer = self.trainer
        name = f"{prefix}_loss"
        means = self.trainer._metrics["eval"]
        device = trainer.args.device
        taken = evaluated.take()
        if taken is None:
            taken = torch.zeros(evaluated.width, dtype=sums_dtype(device))
        sums = trainer.accelerator.reduce(taken.to(device), reduction="sum").tolist()
        *_, micro_batches, total, loss = sums[:NUM_SUMS]
        write_means(means, sums[:NUM_SUMS], balances=trainer.aux_loss_enabled)
        if not micro_batches:  # a user's `compute_loss` has computed the loss
            return
        means["num_tokens"] = [trainer._total_train_tokens]
        if name not in metrics:
            return
        found: dict[str, float] = {}
        # transformers reports 0.0, the best possible loss, for batches without any weight.
        mean = loss / total if total else math.nan
        if not total:
            logger.warning(f"{name} is nan: no token of the set is trained with a weight above 0")
        elif trainer.args.loss_type == "nll" and not (
            trainer.label_smoother or trainer.compute_loss_func
        ):  # beyond 709, no float holds it
            found[f"{prefix}_perplexity"] = math.inf if mean > 709 else math.exp(mean)
        by_source = zip(sources.names, sources.num_documents, strict=True) if sources else ()
        for i, (source, number) in enumerate(by_source if total else (), start=1):
            loss, weight, _ = sums[NUM_SUMS:][OF_SOURCE * i :][:OF_SOURCE]  # 0: of no source
            found[f"{prefix}_num_documents_{source}"] = int(number)
            if weight:
                found[f"{prefix}_loss_{source}"] = loss / weight
        # compute_metrics may have given any other name a value.
        metrics.update(found | metrics | {name: mean})


def without_weights(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model takes of a batch, for the `compute_loss` of another class.

    Raises ValueError for weights, which that would ignore.
    """
    if TOKEN_WEIGHTS in batch:
        raise ValueError(
            "a class between PackedSFTTrainer and SFTTrainer computes the loss without them, and "
            "documents have weights; put PackedSFTTrainer behind it, or drop the weights"
        )
    return {name: value for name, value in batch.items() if name not in _FOR_THE_LOSS}


def _ratio(num_trained: Any, total: Tensor) -> Tensor:
    """Return the factor of all weights, in the dtype of `total`; 0 if they are all 0."""
    return torch.where(total > 0, num_trained / total, 0.0)
