"""The loss of an optimizer step: one weighted mean over all micro-batches and ranks.

measure       before the first micro-batch: Σ w and the number of tokens of the whole step
compute       one micro-batch: its share of the loss, and of the balance of experts
write_metrics a whole evaluation set: the same mean, from `LossSums`
"""

import math
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import Tensor

from trl_packing.attention.calls import Call
from trl_packing.attention.sequence_parallel import num_shares
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
    LossSums,
    MicroBatch,
    Sources,
    Sums,
    check_weights_can_be_used,
    sums_dtype,
    target_weights,
    tokens_of_batch,
    write_means,
)

logger = get_logger(__name__)

# Columns of a batch that the model does not take.
_FOR_THE_LOSS = (TOKEN_WEIGHTS, SOURCE_IDS, SOURCE_PLACES, SOURCE_WEIGHTS, TARGET_COUNTS)


@dataclass(eq=False)
class StepLoss:
    """Computes the share of a micro-batch in the loss of a step.

    `trained` holds the sums of the micro-batches trained since they were last taken.
    """

    args: Any  # those of the trainer
    accelerator: Accelerator
    tp_size: int  # ranks that compute the same micro-batch
    smoothing: float  # of labels; 0: none
    balance: float  # the weight of the balance of experts; 0: none
    trained: LossSums = field(default_factory=LossSums)
    evaluated: LossSums | None = None  # of the set that is evaluated
    # From a user's `compute_loss`, as in TRL: trained tokens of the step, and the number by which
    # Trainer divides a loss that is computed without them.
    hidden_num_items: tuple[Any, int] | None = None
    is_divided: bool = False  # the micro-batch runs in parts, whose losses are added
    _scale: Tensor | None = None  # of the weights of the step
    _num_tokens: Tensor | None = None  # of the step, padding included, float32
    _was_computed: bool = False  # the loss of the micro-batch that is trained

    def measure(
        self, batches: Sequence[MicroBatch], num_items: Any, device: Any, *, weighted: bool
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
        if not (weighted or self.balance):
            return
        # The sums stay on the device: reading them would wait for the previous step.
        tokens = sum(map(tokens_of_batch, batches))
        sums = torch.full((2,), tokens, device=device, dtype=sums_dtype(torch.device(device)))
        if weighted:
            of_batches = map(target_weights, batches)
            weights = torch.stack([w.sum(dtype=sums_dtype(w.device)) for w in of_batches]).sum()
            sums[1] = send(weights, device)
        sums = self.accelerator.gather(sums[None]).sum(0) / self.tp_size
        self._num_tokens = sums[0].float()
        self._scale = _ratio(num_items, sums[1]) if weighted else None

    def forget(self) -> None:
        """Forget the step: none is trained."""
        self._scale = self._num_tokens = None

    def check_was_computed(self, batch: MicroBatch, trainer: str) -> None:
        """Raise RuntimeError if a user's own loss has trained shared prefixes or divided rows.

        `trainer` is the name of its class.
        """
        was_computed = self._was_computed
        self._was_computed = False
        if was_computed:
            return
        if "key_index" in batch:
            raise RuntimeError(
                f"training_step of {trainer} counts the tokens of shared prefixes once; set "
                "prefix_sharing='off', or take the loss from compute_loss"
            )
        if getattr(batch, "parts", ()):
            raise RuntimeError(
                f"{trainer} computes the loss of a part of a micro-batch by itself; leave "
                "max_tokens_per_micro_batch out, or take it from PackedSFTTrainer.compute_loss"
            )
        if num_shares(batch["input_ids"].shape[1], batch.get("cu_seq_lens_q")) > 1:
            raise RuntimeError(
                f"{trainer} computes the loss of a rank's part of a row by itself; set "
                "sequence_parallel_size=1, or take the loss from PackedSFTTrainer.compute_loss"
            )

    def compute(
        self,
        model: Any,
        batch: MicroBatch,
        return_outputs: bool,
        num_items: Any,
        *,
        user_loss: Callable[..., Any] | None,
        training: bool,
    ) -> Any:
        """Return what `SFTTrainer.compute_loss` does; `user_loss` is `compute_loss_func`."""
        divisor = 1
        self._was_computed = True
        if num_items is None and training:
            num_items, divisor = self._num_items()
        if not training and "attention_mask" in batch:  # padded rows
            self._mask_repeated_rows(batch)
        inputs = _for_model(for_kernels(batch))
        inputs.setdefault("use_cache", False)
        if self.balance:
            inputs["output_router_logits"] = True
        labels = inputs["labels"]
        scored, outputs = self._score(model, inputs, user_loss)
        losses = self._token_losses(scored)
        if user_loss:
            check_weights_can_be_used(user_loss, batch)
            loss = user_loss(outputs, labels, num_items_in_batch=num_items)
            losses = loss.detach().expand_as(losses)  # of a batch, only their mean is known
        else:
            loss = self._mean(losses, batch, num_items)
        if num_items is not None and self.args.average_tokens_across_devices:
            loss = loss * self._ranks
        if self.balance and training and outputs is None:
            loss = loss + self._balance_of_experts(scored, tokens_of_batch(batch), num_items)
        sums = self.trained if self.evaluated is None and training else self.evaluated
        if sums is not None:
            sums.add(batch, losses, scored)
        loss = loss * divisor if divisor > 1 else loss
        if not return_outputs:
            return loss
        warnings.warn(
            "`return_outputs=True` is deprecated by TRL: the logits take another forward pass",
            FutureWarning,
            stacklevel=2,
        )
        del inputs["labels"]
        with torch.no_grad():
            return loss, model(**inputs)

    def _num_items(self) -> tuple[Any, int]:
        """Return the divisor of a step, and by how much Trainer will divide what a user returns."""
        if self.hidden_num_items is not None:
            return self.hidden_num_items
        if self.is_divided:
            raise ValueError(
                "max_tokens_per_micro_batch adds the losses of parts, and this one would be a mean:"
                " pass num_items_in_batch on to compute_loss and training_step, or leave it out"
            )
        return None, 1

    @property
    def _ranks(self) -> int:
        """Number of ranks that compute other micro-batches."""
        return self.accelerator.num_processes // self.tp_size

    def _score(self, model: Any, inputs: Call, user_loss: Any) -> tuple[Any, Any]:
        """Return the scores of all targets, and the outputs of `model` if a loss needs its logits.

        The fused head has no logits: then the outputs are None.
        """
        outputs = None
        labels = inputs["labels"]
        smooths = self.smoothing and self.args.loss_type == "nll" and not user_loss
        if smooths or user_loss:
            outputs = model(**{name: x for name, x in inputs.items() if name != "labels"})
            logits = outputs["logits"] if smooths else outputs["logits"].detach()
            scored = score_logits(logits, labels, self.smoothing if smooths else 0.0)
            scored.aux_loss = outputs.get("aux_loss")
        else:
            scored = model(**inputs, fused_lm_head=True)
        virtual = scored.log_probs.shape[1] - (labels.shape[1] - 1)  # tokens before the labels
        if virtual < 0:
            raise RuntimeError(f"{type(model).__name__} scores fewer tokens than there are labels")
        for name in ("log_probs", "entropy", "is_top1"):
            scored[name] = scored[name][:, virtual:]
        return scored, outputs

    def _token_losses(self, scored: Any) -> Tensor:
        """Return the loss of every target, without weights, ``(rows, T - 1)``."""
        losses = -scored.log_probs
        if self.args.loss_type == "dft":
            return losses * (-losses).exp().detach()  # https://huggingface.co/papers/2508.05629
        if self.args.loss_type != "nll":
            raise ValueError(
                f"loss_type={self.args.loss_type!r} is unknown here; set 'nll' or 'dft'"
            )
        return losses

    def _balance_of_experts(self, scored: Any, tokens: float, num_items: Any) -> Tensor:
        """Return the share of a micro-batch of `tokens` in the balance of experts.

        TRL takes the mean over micro-batches of any size, and DDP the mean over ranks. The balance
        depends on the documents that share a batch, so `eval_loss` is without it.
        """
        share: Any = 1.0
        if num_items is not None and self._num_tokens is not None:
            share = tokens / self._num_tokens.to(scored.aux_loss.device) * self._ranks
        return self.balance * share * scored.aux_loss

    def _mean(self, losses: Tensor, batch: MicroBatch, num_items: Any) -> Tensor:
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

    def _mask_repeated_rows(self, inputs: MicroBatch) -> None:
        """Mask the rows with which accelerate fills up the last batch of several ranks."""
        state = self.accelerator.gradient_state
        labels = inputs["labels"]
        if state.end_of_dataloader and state.remainder > 0:
            kept = state.remainder - self.args.process_index * len(labels)
            labels[max(kept, 0) :] = IGNORE_INDEX

    def write_metrics(
        self,
        evaluated: LossSums,
        sources: Sources | None,
        metrics: dict[str, float],
        prefix: str,
        *,
        means: MutableMapping[str, list[float]],
        num_tokens: int,
        user_loss: Any,
    ) -> None:
        """Replace the mean of micro-batch means in `metrics` by that over all trained tokens.

        `evaluated` are the sums of this rank, `sources` those of the set, if they are told apart.
        `means` are TRL's of an evaluation, and `num_tokens` those trained by then.
        """
        name = f"{prefix}_loss"
        device = self.args.device
        taken = evaluated.take()
        if taken is None:
            taken = torch.zeros(evaluated.width, dtype=sums_dtype(device))
        sums = Sums.of(self.accelerator.reduce(taken.to(device), reduction="sum").cpu().numpy())
        write_means(means, sums, balances=self.balance != 0)
        if not sums.micro_batches:  # a user's `compute_loss` has computed the loss
            return
        means["num_tokens"] = [num_tokens]
        if name not in metrics:
            return
        if not sums.weight:  # transformers reports 0.0, the best possible loss
            logger.warning(f"{name} is nan: no token of the set is trained with a weight above 0")
            metrics[name] = math.nan
            return
        found: dict[str, float] = {}
        mean = sums.loss / sums.weight
        if self.args.loss_type == "nll" and not (self.smoothing or user_loss):
            # Beyond 709, no float holds it.
            found[f"{prefix}_perplexity"] = math.inf if mean > 709 else math.exp(mean)
        if sources is not None:
            for source, number, of_source in zip(
                sources.names, sources.num_documents, sums.by_source, strict=True
            ):
                found[f"{prefix}_num_documents_{source}"] = int(number)
                if of_source.weight:
                    found[f"{prefix}_loss_{source}"] = of_source.loss / of_source.weight
        # compute_metrics may have given any other name a value.
        metrics.update(found | metrics | {name: mean})


def without_weights(batch: MicroBatch) -> Call:
    """Return what a model takes of a batch, for the `compute_loss` of another class.

    Raises ValueError for weights, which that would ignore.
    """
    if TOKEN_WEIGHTS in batch:
        raise ValueError(
            "a class between PackedSFTTrainer and SFTTrainer computes the loss without them, and "
            "documents have weights; put PackedSFTTrainer behind it, or drop the weights"
        )
    return _for_model(batch)


def _for_model(batch: MicroBatch) -> Call:
    """Return what a model takes of a batch."""
    return {name: value for name, value in batch.items() if name not in _FOR_THE_LOSS}


def _ratio(num_trained: Any, total: Tensor) -> Tensor:
    """Return the factor of all weights, in the dtype of `total`; 0 if they are all 0."""
    return torch.where(total > 0, num_trained / total, 0.0)
