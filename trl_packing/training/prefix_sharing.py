"""Decides whether the rows of a run compute shared prefixes once.

prefix_sharing="off"      no
prefix_sharing="bin"      documents share within a bin, if
                            nothing needs each document's own tokens (a balance of experts, a user's
                            loss or collator, NEFTune, dropout, virtual tokens)
                            the attention in use takes keys of their own
                            the check of this model shows that siblings stay apart
                            documents of a row begin alike (prefix_savings.py)
prefix_sharing="group"    the same; then bins and steps hold groups of documents that begin alike
Otherwise the run trains as with "off", and a line of the report says why.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.install import check_backward, take_prefix_keys
from trl_packing.attention.state import find_randomness
from trl_packing.config import PackingOptions
from trl_packing.isolation.check import check_prefixes
from trl_packing.isolation.fallback import CheckResult, Refusal, worst_of_ranks
from trl_packing.training.collators import RunCollators

logger = get_logger(__name__)


class PrefixSharing:
    """Turns the sharing of prefixes on where it is exact.

    Args:
        trainer: its model and loss are read.
        collators: their packed rows share.
        loss_is_ours: whether no method of a user computes the loss; asked before each run.

    Attributes:
        mode: "off", "bin" or "group".
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        collators: RunCollators,
        *,
        loss_is_ours: Callable[[], bool],
    ):
        self.trainer = trainer
        self.guard = collators.guard
        self.collators = collators
        self.mode = collators.options.prefix_sharing
        self.loss_is_ours = loss_is_ours
        collators.sampling.draws_groups = self.draws_groups
        self._failures: dict[tuple[str, bool], str | None] = {}
        self._warned_of: set[str] = set()

    @property
    def reason(self) -> str | None:
        """Return why rows of the training set do not share; None if they do, or may."""
        return self._reason_in(training=True)

    def _reason_in(self, *, training: bool) -> str | None:
        checked = (self.guard.attention.backend, training)
        return self._why_not(training=training) or self._failures.get(checked)

    def draws_groups(self, training: bool) -> bool:
        """Return whether bins and steps hold groups, as far as is known of the model."""
        return self.mode == "group" and self._reason_in(training=training) is None

    def check_again(self) -> None:
        """Check models that could share once more when they are wrapped as they will run."""
        self._failures = {key: why for key, why in self._failures.items() if why is not None}

    def decide(
        self, model: Any, documents: Sequence[np.ndarray], *, training: bool, pays: bool
    ) -> None:
        """Turn sharing on or off, before batches are made in this mode.

        Args:
            model: wrapped as it will run.
            documents: token ids ``(T,)`` of documents of the run.
            training: the mode of the model.
            pays: whether the documents have prefixes to share, as far as is known.
        """
        pays = pays or self.mode == "group"  # its bins hold the tokens of shared rows
        shares = self.mode != "off" and pays and self._is_exact(model, documents, training)
        self.collators.share_prefixes(shares, training=training)

    def _is_exact(self, model: Any, documents: Sequence[np.ndarray], training: bool) -> bool:
        """Return whether rows of this model can share; check it once in a mode."""
        reason, key = self._why_not(training), (self.guard.attention.backend, training)
        if reason is None:
            if key not in self._failures:
                self._failures[key] = self._failure(model, documents, training)
            reason = self._failures[key]
        was_asked_for = self.mode != PackingOptions.prefix_sharing  # the default only tries
        if reason and was_asked_for and reason not in self._warned_of:
            logger.warning(f"prefix_sharing={self.mode!r} does nothing in this run: {reason}")
            self._warned_of.add(reason)
        return reason is None

    def _why_not(self, training: bool) -> str | None:
        """Return why no model could share in this mode of the run, or None."""
        trainer, backend = self.trainer, self.guard.attention
        if self.collators.packed.images is not None:
            return "an image belongs to one document"
        if self.collators.packed.static_shapes is not None:
            return "static_shapes=True holds rows at one length"
        if trainer.aux_loss_enabled:
            return "the balance of experts counts every token of every document"
        if trainer.compute_loss_func is not None or not self.loss_is_ours():
            return "the loss is your own, and a shared token would count once in it"
        if not self.collators.makes_rows_unchanged:
            return "data_collator is your own, and may change a token for one document only"
        if alpha := getattr(trainer, "neftune_noise_alpha", None):
            return f"neftune_noise_alpha={alpha} draws noise for each document"
        if training and (strength := find_randomness(trainer.model)):
            return f"{strength} draws for each document; set it to 0 to share prefixes"
        peft_config = getattr(trainer.model, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            return "virtual tokens stand in front of each row"
        return take_prefix_keys(self.guard.base_model, backend.backend)

    def _failure(self, model: Any, documents: Sequence[np.ndarray], training: bool) -> str | None:
        """Return how the check of this model failed on some rank, or None."""
        try:
            with check_backward(self.guard.model, training=training) as faults:
                result: CheckResult = check_prefixes(
                    model,
                    documents,
                    collator=self.collators.for_probes(),
                    training=training,
                    attention=str(self.guard.attention),
                    fused_head=True,
                )
            if result and faults:
                result = Refusal(faults[0].splitlines()[0])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models raise all kinds of errors
            result = Refusal.from_error(error)
        result = worst_of_ranks(result)
        return None if result else str(result)
