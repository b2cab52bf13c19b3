"""Shared prefixes of a run: the tokens that they save, and whether it may share them.

prefix_sharing="bin" shares within a bin if nothing needs each document's own tokens, the attention
in use takes keys of their own, and the check of this model shows that siblings stay apart. With
"group", bins and steps hold groups of documents that begin alike. Otherwise the run trains as with
"off", and a line of the report says why. A run whose documents share nothing checks no model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from accelerate.logging import get_logger

from trl_packing.attention.install import take_prefix_keys
from trl_packing.isolation.check import attempt, check_prefixes
from trl_packing.isolation.guard import worst_of_ranks
from trl_packing.isolation.preserve import find_randomness
from trl_packing.training.collators import RunCollators

logger = get_logger(__name__)


@dataclass(eq=False)
class PrefixSharing:
    """Turns the sharing of prefixes in rows of `collators` on where it is exact.

    `mode` is `prefix_sharing` of the run. `loss_is_ours` says before each run whether no function
    of a user computes the loss, and `balances_experts` that it holds the balance of a mixture of
    experts.
    """

    collators: RunCollators
    mode: str
    loss_is_ours: Callable[[], bool]
    balances_experts: bool
    # By backend and mode of the model.
    _failures: dict[tuple[str, bool], str | None] = field(default_factory=dict)

    def draws_groups(self, training: bool) -> bool:
        """Return whether bins and steps hold groups, as far as is known of the model."""
        return self.mode == "group" and self.reason(training) is None

    def check_again(self) -> None:
        """Check models that could share once more when they are wrapped as they will run."""
        self._failures = {key: why for key, why in self._failures.items() if why is not None}

    def decide(
        self, model: Any, documents: Sequence[np.ndarray], *, training: bool, pays: bool
    ) -> None:
        """Turn sharing on or off, before batches are made in this mode.

        `model`, wrapped as it will run, is checked once in a mode on `documents`, the token ids of
        each. `pays`: they have prefixes to share, as far as is known.
        """
        # Bins of groups hold the tokens of shared rows.
        shares = self.mode == "group" or (self.mode == "bin" and pays)
        if shares:
            key = (self.collators.guard.attention.backend, training)
            if key not in self._failures and self._why_not(training) is None:
                self._failures[key] = self._failure(model, documents, training)
            reason = self.reason(training)
            shares = reason is None
            if reason:
                logger.warning_once(
                    f"prefix_sharing={self.mode!r} does nothing in this run: {reason}"
                )
        self.collators.share_prefixes(shares, training=training)

    def reason(self, training: bool = True) -> str | None:
        """Return why rows of this mode do not share; None if they do, or may."""
        backend = self.collators.guard.attention.backend
        return self._why_not(training) or self._failures.get((backend, training))

    def _why_not(self, training: bool) -> str | None:
        """Return why no model could share in this mode of the run, or None."""
        collators = self.collators
        guard = collators.guard
        if collators.packed.images is not None:
            return "an image belongs to one document"
        if self.balances_experts:
            return "the balance of experts counts every token of every document"
        if not self.loss_is_ours():
            return "the loss is your own, and a shared token would count once in it"
        if not collators.makes_rows_unchanged:
            return "data_collator is your own, and may change a token for one document only"
        if noise := collators.run.args.neftune_noise_alpha:
            return f"neftune_noise_alpha={noise} draws noise for each document"
        if training and (strength := find_randomness(guard.model)):
            return f"{strength} draws for each document; set it to 0 to share prefixes"
        peft_config = getattr(guard.model, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            return "virtual tokens stand in front of each row"
        return take_prefix_keys(guard.base_model, guard.attention.backend)

    def _failure(self, model: Any, documents: Sequence[np.ndarray], training: bool) -> str | None:
        """Return how the check of this model failed on some rank, or None."""
        result = attempt(
            check_prefixes,
            model,
            documents,
            collator=self.collators.for_probes(),
            training=training,
            attention=str(self.collators.guard.attention),
            fused_head=True,
        )
        result = worst_of_ranks(result)
        return None if result else str(result)
