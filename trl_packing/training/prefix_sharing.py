"""Shared prefixes of a run: the tokens that they save, and whether it may share them.

prefix_sharing="bin" shares within a bin if nothing needs each document's own tokens, the attention
in use takes keys of their own, and the check of this model shows that siblings stay apart. With
"group", bins and steps hold groups of documents that begin alike. Otherwise the run trains as with
"off", and a line of the report says why. A run whose documents share nothing checks no model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.install import take_prefix_keys
from trl_packing.data.counts import times_fewer
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.isolation.check import attempt, check_prefixes
from trl_packing.isolation.guard import worst_of_ranks
from trl_packing.isolation.preserve import find_randomness
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.collators import RunCollators

logger = get_logger(__name__)

# Of the tokens and documents that are looked at: about a tenth of a second.
_MOST_TOKENS, _MOST_DOCUMENTS, _FEWEST_BATCHES = 4_000_000, 50_000, 8

# Shares of the tokens: for a check of the model, and for another setting to be named.
_WORTH_SHARING, _WORTH_A_LINE = 0.005, 0.05


class PrefixSharing:
    """Turns the sharing of prefixes in rows of `collators` on where it is exact.

    `loss_is_ours` says before each run whether no method of a user computes the loss.
    """

    def __init__(
        self, trainer: SFTTrainer, collators: RunCollators, *, loss_is_ours: Callable[[], bool]
    ):
        self.trainer = trainer
        self.guard = collators.guard
        self.collators = collators
        self.mode = collators.options.prefix_sharing
        self.loss_is_ours = loss_is_ours
        collators.sampling.draws_groups = self.draws_groups
        self._failures: dict[tuple[str, bool], str | None] = {}  # by backend and mode of the model

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
            key = (self.guard.attention.backend, training)
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
        checked = self.guard.attention.backend, training
        return self._why_not(training) or self._failures.get(checked)

    def _why_not(self, training: bool) -> str | None:
        """Return why no model could share in this mode of the run, or None."""
        trainer, collators = self.trainer, self.collators
        if collators.packed.images is not None:
            return "an image belongs to one document"
        if trainer.aux_loss_enabled:
            return "the balance of experts counts every token of every document"
        if trainer.compute_loss_func is not None or not self.loss_is_ours():
            return "the loss is your own, and a shared token would count once in it"
        if not collators.makes_rows_unchanged:
            return "data_collator is your own, and may change a token for one document only"
        if noise := getattr(trainer, "neftune_noise_alpha", None):
            return f"neftune_noise_alpha={noise} draws noise for each document"
        if training and (strength := find_randomness(trainer.model)):
            return f"{strength} draws for each document; set it to 0 to share prefixes"
        peft_config = getattr(trainer.model, "active_peft_config", None)
        if getattr(peft_config, "is_prompt_learning", False):
            return "virtual tokens stand in front of each row"
        return take_prefix_keys(self.guard.base_model, self.guard.attention.backend)

    def _failure(self, model: Any, documents: Sequence[np.ndarray], training: bool) -> str | None:
        """Return how the check of this model failed on some rank, or None."""
        options: dict[str, Any] = {
            "collator": self.collators.for_probes(),
            "training": training,
            "attention": str(self.guard.attention),
            "fused_head": True,
        }
        result = worst_of_ranks(attempt(check_prefixes, model, documents, **options))
        return None if result else str(result)


@dataclass(frozen=True)
class PrefixSavings:
    """Tokens of micro-batches: those of their documents, and those computed where these share."""

    sharing: str  # `prefix_sharing` of the run
    tokens: int = 0  # of the documents looked at; 0 if none were
    computed: int = 0  # of their rows with shared prefixes, without padding
    is_whole: bool = False  # all micro-batches of the epoch were looked at
    reason: str | None = None  # why the run does not share, though it was asked to
    per_step: float | None = None  # mean number of groups in an optimizer step

    @property
    def saved(self) -> float:
        """Return the share of the documents' tokens that is not computed."""
        return 1 - self.computed / self.tokens if self.tokens else 0.0

    @property
    def pays(self) -> bool:
        """Return whether sharing is worth its check; unknown savings may be."""
        return not self.tokens or self.saved >= _WORTH_SHARING

    @property
    def is_shared(self) -> bool:
        """Return whether the run shares prefixes, of which something is known."""
        return self.sharing != "off" and self.tokens > 0 and self.pays and not self.reason

    def __str__(self) -> str:
        """Return the line of the report; "" where there is nothing to say."""
        if self.reason and (not self.tokens or (self.pays and self.sharing != "off")):
            return f"not shared: {self.reason}"
        if not self.tokens:
            return ""
        fewer = "" if self.is_whole else "about "
        fewer += f"{times_fewer(self.tokens, self.computed)} tokens"
        if self.sharing == "off":
            is_much = self.saved >= _WORTH_A_LINE
            return f"prefix_sharing='bin' would compute {fewer}" if is_much else ""
        if not self.pays:
            return "nothing to share: documents begin differently, or labels are other tokens"
        prefixes = "" if self.per_step is None else f" · {self.per_step:,.1f} prefixes a step"
        return f"{fewer} computed{prefixes}"


def prefix_savings(
    documents: ArrowDocuments, sampler: PackedBatchSampler, sharing: str
) -> PrefixSavings:
    """Return what `sharing`, of the run, saves in the sampler's epoch of `documents`."""
    if sampler.rows:  # several documents each, which are not known here
        return PrefixSavings(sharing)
    total = len(sampler) * sampler.num_ranks  # micro-batches
    tokens = int(sampler.lengths.sum())
    most = min(_MOST_TOKENS * total // tokens, _MOST_DOCUMENTS * total // len(documents))
    batches = sampler.micro_batches(max(most, _FEWEST_BATCHES))
    looked_at = documents.__getitems__(np.concatenate(batches))
    lengths = np.array([len(document["input_ids"]) for document in looked_at])
    offsets = np.cumsum([0, *map(len, batches)])
    index = PrefixIndex.of_loaded(looked_at)
    return PrefixSavings(
        sharing,
        int(lengths.sum()),
        int(index.computed_tokens(lengths, np.arange(len(lengths)), offsets).sum()),
        is_whole=len(batches) == total,
        per_step=sampler.groups_per_step(),
    )
