"""Shared prefixes of a run: the tokens that they save, known before it starts, and where they may.

prefix_sharing="off"      no
prefix_sharing="bin"      documents share within a bin, if
                            nothing needs each document's own tokens (a balance of experts, a user's
                            loss or collator, NEFTune, dropout, virtual tokens)
                            the attention in use takes keys of their own
                            the check of this model shows that siblings stay apart
                            documents of a row begin alike
prefix_sharing="group"    the same; then bins and steps hold groups of documents that begin alike
Otherwise the run trains as with "off", and a line of the report says why.

    micro-batches of an epoch    some of them, evenly spread      4 million tokens at most
        │  their documents       in sorted order                  packing/prefix_index.py
    tokens of documents          8,000,000
    tokens computed              3,333,333                        2.4× fewer

The look takes about a tenth of a second on any data set. A run whose documents share nothing then
neither checks its model nor looks for prefixes in its rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.install import take_prefix_keys
from trl_packing.attention.state import find_randomness
from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.isolation.check import attempt, check_prefixes
from trl_packing.isolation.guard import worst_of_ranks
from trl_packing.packing.prefix_groups import PrefixGroups
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.collators import RunCollators

logger = get_logger(__name__)

# Tokens and documents that are looked at.
_MOST_TOKENS, _MOST_DOCUMENTS, _FEWEST_BATCHES = 4_000_000, 50_000, 8

# A share of the tokens below which rows are not worth a check of the model.
_WORTH_SHARING = 0.005
# The report names another setting if that saves a larger share.
_WORTH_A_LINE = 0.05


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
        result = attempt(
            lambda: check_prefixes(
                model,
                documents,
                collator=self.collators.for_probes(),
                training=training,
                attention=str(self.guard.attention),
                fused_head=True,
            )
        )
        result = worst_of_ranks(result)
        return None if result else str(result)


# --- savings --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrefixSavings:
    """Tokens of micro-batches: those of their documents, and those computed where these share.

    Attributes:
        sharing: `prefix_sharing` of the run: "off", "bin", ...
        tokens: of the documents looked at; 0 if none were.
        computed: tokens of their rows with shared prefixes, without padding.
        is_whole: whether all micro-batches of the epoch were looked at.
        reason: why the run does not share; None if it does, or if it was not asked to.
        per_step: mean number of different prefixes in an optimizer step, if they were grouped.
        saved_by_groups: share of the tokens that "group" would save at least, if that is clearly
            more than this run does; only `trl-packing plan` looks for it.
    """

    sharing: str
    tokens: int = 0
    computed: int = 0
    is_whole: bool = False
    reason: str | None = None
    per_step: float | None = None
    saved_by_groups: float | None = None

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
        said = []
        if self.is_shared:
            prefixes = "" if self.per_step is None else f" · {self.per_step:,.1f} prefixes a step"
            said.append(f"{fewer} computed{prefixes}")
        if self.saved_by_groups is not None:
            by_groups = times_fewer(self.tokens, round(self.tokens * (1 - self.saved_by_groups)))
            said.append(f"prefix_sharing='group' would compute {by_groups} tokens")
        elif self.sharing == "off" and self.saved >= _WORTH_A_LINE:
            said.append(f"prefix_sharing='bin' would compute {fewer}")
        if said or self.sharing in ("off", PackingOptions.prefix_sharing):
            return " · ".join(said)
        return "nothing to share: documents of a row begin differently"

    def beside_groups(self, groups: PrefixGroups) -> "PrefixSavings":
        """Return the same with what groups of the documents would save, if it is clearly more."""
        saved = 1 - float(groups.tokens.sum() / groups.lengths.sum())
        return replace(self, saved_by_groups=saved) if saved > self.saved + _WORTH_A_LINE else self


def times_fewer(tokens: int, computed: int) -> str:
    """Return by how much `computed` tokens are fewer.

    Examples:
        >>> times_fewer(1130, 1000), times_fewer(2400, 1000)
        ('1.13× fewer', '2.4× fewer')
    """
    ratio = tokens / max(computed, 1)
    return f"{ratio:.{2 if ratio < 2 else 1}f}× fewer"


def prefix_savings(
    documents: ArrowDocuments, sampler: PackedBatchSampler, sharing: str
) -> PrefixSavings:
    """Return what sharing saves in the sampler's epoch.

    Args:
        documents: that the sampler draws.
        sampler: of any rank.
        sharing: `prefix_sharing` of the run.
    """
    total = max(len(sampler) * sampler.num_ranks, 1)  # micro-batches
    tokens, number = max(int(sampler.lengths.sum()), 1), max(documents.num_documents, 1)
    most = min(_MOST_TOKENS * total // tokens, _MOST_DOCUMENTS * total // number)
    batches = sampler.some_micro_batches(max(most, _FEWEST_BATCHES))
    of_batches = [[*_documents_of(documents.__getitems__(batch))] for batch in batches]
    looked_at = [document for batch in of_batches for document in batch]
    lengths = np.array([len(document["input_ids"]) for document in looked_at])
    offsets = np.cumsum([0, *map(len, of_batches)])
    index = PrefixIndex.of_loaded(looked_at)
    return PrefixSavings(
        sharing,
        int(lengths.sum()),
        int(index.computed_tokens(lengths, np.arange(len(lengths)), offsets).sum()),
        is_whole=len(batches) == total,
        per_step=sampler.groups_per_step(),
    )


def _documents_of(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the tokens and labels of each document, of several in a packed row."""
    for row in rows:
        columns = {name: row[name] for name in ("input_ids", "labels") if name in row}
        if SEQ_LENGTHS not in row:
            yield columns
            continue
        ends = np.cumsum(row[SEQ_LENGTHS])[:-1]
        parts = [np.split(column, ends) for column in columns.values()]
        yield from (dict(zip(columns, part, strict=True)) for part in zip(*parts, strict=True))
