"""The loss of an optimizer step: one weighted mean over all micro-batches and ranks.

    measure       before the first micro-batch: Σ w and the number of tokens of the whole step
    compute       one micro-batch: weighted targets, and its share of the balance of experts
    evaluating    a whole evaluation set: the same mean, summed up in `EvaluationSums`

`weighted_forward` says how TRL is made to compute a weighted mean. The token weights already hold
the weight of each document.
"""

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import SFTTrainer

from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
    TARGET_COUNTS,
    TOKEN_WEIGHTS,
)
from trl_packing.loss.evaluation import EvaluationSums
from trl_packing.loss.sources import Sources, SourceSums, SourceTargets
from trl_packing.loss.token_metrics import NUM_SUMS, TokenSums, sums_dtype, write_means
from trl_packing.loss.weighted_forward import (
    check_weights_can_be_used,
    observed_call,
    scale_of_weights,
    sum_of_weights,
    target_weights,
    weight_targets,
)
from trl_packing.models.neftune import announce_documents
from trl_packing.models.state import temporarily

logger = get_logger(__name__)

# Columns of a batch that the model does not take.
_FOR_THE_LOSS = (TOKEN_WEIGHTS, SOURCE_IDS, SOURCE_PLACES, SOURCE_WEIGHTS, TARGET_COUNTS)


class StepLoss:
    """Makes `SFTTrainer.compute_loss` return the share of a micro-batch in the loss of its step.

    Args:
        trainer: its settings are read, and those of its loss replaced while a loss is computed.

    Attributes:
        trained: entropy and accuracy of the micro-batches trained since they were last taken.
        trained_sources: their losses by source.
    """

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer
        self.trained = TokenSums()
        self.trained_sources = SourceSums()
        self._scale: Tensor | None = None  # of the weights of the step
        self._num_tokens: Tensor | None = None  # of the step, padding included, float32
        self._hidden_num_items: Any = None
        self._evaluated: EvaluationSums | None = None

    # --- a step -------------------------------------------------------------------------------

    def measure(
        self, batches: Sequence[Mapping[str, Any]], num_items: Any, device: Any, *, weighted: bool
    ) -> None:
        """Sum up the weights and tokens of a step over all ranks, before it is trained.

        Args:
            batches: micro-batches of this rank.
            num_items: trained tokens of the step; None where TRL does not count them.
            device: holds the sums.
            weighted: whether the training set has weights. Ranks must agree on it, since a rank
                without documents has no weights in its batch.
        """
        self._scale = None
        weighted = weighted or any(TOKEN_WEIGHTS in batch for batch in batches)
        weighted = weighted and num_items is not None
        if not (weighted or self.trainer.aux_loss_enabled):
            return
        # The sums stay on the device: reading them would wait for the previous step.
        tokens = torch.full((), sum(b["input_ids"].numel() for b in batches), device=device)
        wide = sums_dtype(tokens.device)
        weights = torch.zeros((), device=device, dtype=wide)
        if weighted:
            weights = torch.stack([sum_of_weights(target_weights(b)) for b in batches]).sum()
        sums = torch.stack([tokens.to(wide), weights.to(device, non_blocking=True)])
        sums = self.trainer.accelerator.gather(sums[None]).sum(0) / self.trainer.get_tp_size()
        self._num_tokens = sums[0].float()
        self._scale = scale_of_weights(num_items, sums[1]) if weighted else None

    def keep_weights(self, inputs: Mapping[str, Any], prepared: MutableMapping[str, Any]) -> None:
        """Move the weights of a batch as they are: DeepSpeed casts them to another dtype."""
        for name in {TOKEN_WEIGHTS, SOURCE_WEIGHTS} & inputs.keys():
            prepared[name] = inputs[name].to(self.trainer.args.device, non_blocking=True)

    @contextmanager
    def hide_num_items(self, num_items: Any, *, hide: bool) -> Iterator[Any]:
        """Yield the number of items for `training_step`: None if it is to be hidden.

        TRL passes None to a user's `compute_loss` if the model class takes no number of items, and
        divides the loss by the micro-batches of the step; a loss that is a mean relies on that.
        """
        if not hide:
            yield num_items
            return
        with temporarily(self, _hidden_num_items=num_items):
            yield None

    def compute(
        self,
        parent: Callable[..., Any],
        model: Any,
        inputs: Mapping[str, Any],
        return_outputs: bool,
        num_items: Any,
        *,
        padded: bool,
    ) -> Any:
        """Return the loss of a micro-batch, and with `return_outputs` the model's outputs.

        Args:
            parent: `SFTTrainer.compute_loss`.
            model: as `parent` takes it, and so are the other arguments.
            inputs: the micro-batch.
            return_outputs: see above.
            num_items: trained tokens of the step; None for a mean over this batch.
            padded: whether an evaluation on padded rows runs.
        """
        num_items, divided_by = self._num_items_and_divisor(num_items)
        if padded:
            self._mask_repeated_rows(inputs)
        scale = None if num_items is None else self._scale
        evaluated, counts = self._evaluated, inputs.get(TARGET_COUNTS)
        seen, weights, weighs = self._seen(inputs), None, self._weighs(inputs, scale)
        if weighs:
            check_weights_can_be_used(self.trainer.compute_loss_func, inputs)
            weights = target_weights(inputs)
            if scale is None:
                num_trained = (inputs["labels"][..., 1:] != IGNORE_INDEX).sum()
                scale = scale_of_weights(num_trained, sum_of_weights(weights))
        if any(name in inputs for name in _FOR_THE_LOSS):
            inputs = {name: value for name, value in inputs.items() if name not in _FOR_THE_LOSS}
        inputs = for_kernels(inputs)
        with (
            announce_documents(boundaries=inputs.get("cu_seq_lens_q")),
            self._weight_auxiliary_loss(inputs, num_items),
            weight_targets(self.trainer, model, weights, scale, seen) as weighted,
        ):
            observed = partial(
                observed_call,
                weighted,
                self._token_sums(),
                weights,
                counts,
                None if weighs else seen,
                self.trainer.args.loss_type == "dft",
            )
            result = parent(observed, inputs, return_outputs, num_items)
        if evaluated is not None:
            total = sum_of_weights(target_weights(inputs) if weights is None else weights)
            evaluated.add(result[0] if return_outputs else result, total)
        if divided_by == 1:
            return result
        return (result[0] * divided_by, result[1]) if return_outputs else result * divided_by

    def _weighs(self, inputs: Mapping[str, Any], scale: Tensor | None) -> bool:
        """Return whether the losses of a micro-batch are multiplied by weights."""
        if scale is not None or TOKEN_WEIGHTS in inputs:
            return True
        # The label smoother returns the loss of each target only if targets have weights, here 1.
        # A fused head always does, and computes the gradient of its weight once if nothing is
        # weighed.
        smooths = self.trainer.label_smoother is not None and self.trainer.args.loss_type == "nll"
        return SOURCE_IDS in inputs and (self._evaluated is not None or smooths)

    def _seen(self, inputs: Mapping[str, Any]) -> Callable[[Tensor], None] | None:
        """Return a function that adds the losses of a micro-batch by source; None without any."""
        if SOURCE_IDS not in inputs:
            return None
        if self._evaluated is not None:
            return partial(self._evaluated.add_by_source, SourceTargets.of(inputs))
        if not (self.trained_sources.number and self.trainer.model.training):
            return None
        return partial(self.trained_sources.add_by_source, SourceTargets.of(inputs))

    def _num_items_and_divisor(self, num_items: Any) -> tuple[Any, int]:
        """Return the number of items, and the number by which Trainer will divide the loss.

        A user's `compute_loss` that calls ours has been given None (`hide_num_items`).
        """
        trainer = self.trainer
        if num_items is not None or self._hidden_num_items is None or not trainer.model.training:
            return num_items, 1
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        divided_by = 1 if is_scaled else trainer.current_gradient_accumulation_steps
        return self._hidden_num_items, divided_by

    def _token_sums(self) -> TokenSums | None:
        """Return the sums to which entropy and accuracy of the micro-batch are added."""
        if self._evaluated is not None:
            return self._evaluated.tokens
        return self.trained if self.trainer.model.training else None

    def _mask_repeated_rows(self, inputs: Mapping[str, Any]) -> None:
        """Mask the rows with which accelerate fills up the last batch of several ranks."""
        state = self.trainer.accelerator.gradient_state
        if "attention_mask" in inputs and state.end_of_dataloader and state.remainder > 0:
            labels = inputs["labels"]
            kept = state.remainder - self.trainer.args.process_index * len(labels)
            labels[max(kept, 0) :] = IGNORE_INDEX

    def _weight_auxiliary_loss(
        self, inputs: Mapping[str, Any], num_items: Any
    ) -> AbstractContextManager[None]:
        """Weight the balance of experts of a micro-batch by its share of the step's tokens.

        TRL takes the mean over micro-batches of any size, and DDP the mean over ranks. The balance
        depends on the documents that share a batch, so `eval_loss` is without it; `eval_aux_loss`
        reports it.
        """
        trainer = self.trainer
        if not trainer.aux_loss_enabled or (num_items is None and trainer.model.training):
            return nullcontext()
        if num_items is None:
            return temporarily(trainer, router_aux_loss_coef=0.0)
        assert self._num_tokens is not None
        share = inputs["input_ids"].numel() / self._num_tokens
        ranks = trainer.args.world_size // trainer.get_tp_size()
        micro_batches = trainer.current_gradient_accumulation_steps * ranks
        coefficient = trainer.router_aux_loss_coef * share * micro_batches
        return temporarily(trainer, router_aux_loss_coef=coefficient)

    # --- an evaluation ------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, sources: Sources | None = None) -> Iterator[EvaluationSums]:
        """Add all losses that are computed inside the block to the sums that it yields."""
        self._evaluated = evaluated = EvaluationSums(sources)
        try:
            yield evaluated
        finally:
            self._evaluated = None

    def write_metrics(
        self,
        evaluated: EvaluationSums,
        metrics: dict[str, float],
        means: MutableMapping[str, list[float]],
        prefix: str,
    ) -> None:
        """Replace the mean of micro-batch means by the mean over all trained tokens.

        Best-model selection, early stopping and the log then read the replaced one.

        Args:
            evaluated: sums of this rank.
            metrics: of transformers' evaluation loop.
            means: TRL's `_metrics` of evaluations.
            prefix: of the names of metrics.
        """
        trainer = self.trainer
        device, dtype = trainer.args.device, sums_dtype(trainer.args.device)
        reduced = trainer.accelerator.reduce(evaluated.sums.to(device, dtype), reduction="sum")
        tokens = evaluated.tokens.take()
        tokens = torch.zeros(NUM_SUMS, dtype=dtype) if tokens is None else tokens
        tokens = trainer.accelerator.reduce(tokens.to(device), reduction="sum")
        write_means(means, tokens.tolist())
        name = f"{prefix}_loss"
        if name not in metrics:
            return
        ours = evaluated.metrics(reduced, prefix, is_likelihood=self._loss_is_likelihood())
        loss = {name: ours[name]} if name in ours else {}
        if name not in ours and evaluated.is_scored:
            # transformers reports 0.0, the best possible loss, for batches without any weight.
            loss = {name: math.nan}
            logger.warning(f"{name} is nan: no token of the set is trained with a weight above 0")
        # compute_metrics may have given any other name a value.
        metrics.update(ours | metrics | loss)

    def _loss_is_likelihood(self) -> bool:
        trainer = self.trainer
        is_plain = trainer.label_smoother is None and trainer.compute_loss_func is None
        return is_plain and trainer.args.loss_type == "nll"
