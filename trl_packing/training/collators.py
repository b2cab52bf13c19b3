"""Collators of a run: packed rows, and padded rows where logits are requested.

training, evaluation          one flat row of documents          PackedCollator
evaluation that asks logits   a padded row for each document     TRL's, with weights
"""

from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset
from trl import SFTTrainer

from trl_packing.attention.backends import PADDED
from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import is_packed
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.packing.collator import PackedCollator, StaticShapes, WeightedPaddedCollator
from trl_packing.run.columns import documents_of
from trl_packing.run.sampling import Sampling

logger = get_logger(__name__)


@dataclass(eq=False)
class RunCollators:
    """Makes the collators of a run, and sets `data_collator` of its trainer.

    Attributes:
        packed: the user's collator, or a default one; then a copy of it, which makes the rows.
        pad_to_multiple_of: of rows; None leaves their length as it is.
        padded: TRL's collator.

    Raises:
        ValueError: the collator has another `loss_weighting` than the config, or shares prefixes
            although the config does not.
    """

    trainer: SFTTrainer
    guard: IsolationGuard
    sampling: Sampling
    options: PackingOptions
    packed: PackedCollator
    pad_to_multiple_of: int | None

    def __post_init__(self) -> None:
        given, weighting = self.packed, self.options.loss_weighting
        shares = given.shares_prefixes and self.options.prefix_sharing == "off"
        if shares or given.loss_weighting not in ("token", weighting):
            raise ValueError(
                f"the data_collator has loss_weighting={given.loss_weighting!r} and shares_prefixes"
                f"={given.shares_prefixes}; set loss_weighting and prefix_sharing in the config"
            )
        self.padded = self.trainer.data_collator
        # No prefixes are shared until `PrefixSharing` has decided.
        self.packed = self.trainer.data_collator = given.replaced(
            loss_weighting=weighting, tensors_only=True, shares_prefixes=False
        )
        self._shares_in_evaluation = False
        self.hold_shapes()

    def for_evaluation(self, *, padded: bool) -> Any:
        """Return the collator of an evaluation; `padded`: of one row for each document."""
        if padded:
            if self.packed.images is not None:
                raise ValueError(
                    "a run that packs images has no padded rows, whose logits compute_metrics and "
                    "predict() get; set prediction_loss_only=True, or use TRL's SFTTrainer"
                )
            return WeightedPaddedCollator(self.padded, self.options.loss_weighting)
        if self.packed.static_shapes is None:
            return self.packed.replaced(shares_prefixes=self._shares_in_evaluation)
        if self.sampling.eval_packing:
            return self._with_shapes(self.trainer.args.eval_batch_size)
        return self.packed.replaced(static_shapes=None)

    def for_probes(self) -> PackedCollator:
        """Return the collator of the isolation check: probes fill one bin or two."""
        shaped = self.packed if self.packed.static_shapes is None else self._with_shapes(1)
        return shaped.replaced(shares_prefixes=False)  # `PrefixSharing` has a check of its own

    @property
    def makes_rows_unchanged(self) -> bool:
        """Whether no class of a user changes the rows."""
        return type(self.packed).__call__ is PackedCollator.__call__

    def share_prefixes(self, shares: bool, *, training: bool) -> None:
        """Share prefixes in rows of training, else of evaluation: a check is for one of them."""
        if not training:
            self._shares_in_evaluation = shares
        if training or not self.makes_rows_unchanged:
            # In place, because the data loader already holds the collator.
            self.packed.shares_prefixes = shares

    @property
    def tokens_per_micro_batch(self) -> int | None:
        """Tokens of every micro-batch, padding included; None if they differ."""
        shapes = self.packed.static_shapes
        return None if shapes is None else shapes.num_tokens

    def hold_shapes(self) -> None:
        """Give every training micro-batch one shape, if the config asks for it."""
        if not self.options.static_shapes:
            return
        of_epoch: dict[str, int] = {}
        dataset = self.trainer.train_dataset
        if isinstance(dataset, Dataset) and not is_packed(dataset):
            documents = documents_of(dataset, self.trainer.compute_loss_func)
            sampler = self.sampling.for_training(documents)
            most = max(map(len, sampler.micro_batches()))
            of_epoch = {"most_documents": most, "longest": int(sampler.lengths.max())}
        self.packed = self._with_shapes(self.sampling.batch_size, **of_epoch)
        self.trainer.data_collator = self.packed
        self.drop_shapes_of_padded_rows()

    def _with_shapes(self, bins: int, **of_epoch: int) -> PackedCollator:
        """Return the collator of micro-batches of `bins` bins, all of one shape."""
        multiple = self.pad_to_multiple_of or 1
        capacity = self.trainer.args.max_length
        num_tokens = -(-capacity * bins // multiple) * multiple
        of_epoch = {"longest": capacity} | of_epoch
        shapes = StaticShapes.for_model(self.guard.base_model, num_tokens, **of_epoch)
        return self.packed.replaced(static_shapes=shapes)

    def drop_shapes_of_padded_rows(self) -> None:
        """Hold no shape where the attention in use pads rows: their shapes follow the documents."""
        if self.packed.static_shapes is not None and self.guard.attention.backend in PADDED:
            logger.warning_once(
                f"static_shapes=True does nothing here: {type(self.guard.base_model).__name__} "
                f"runs by {self.guard.attention}"
            )
            # In place, because the data loader already holds the collator.
            self.packed.static_shapes = None
