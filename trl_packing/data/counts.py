"""Counts of documents and tokens that preparation kept and lost, as numbers and as words.

All classes are values; `str()` returns the words of the report.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import numpy as np

# Largest share of lost trained tokens, or of documents without their stop token, without warning.
WARN_LOST_SHARE = 0.01


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of documents, tokens, trained tokens, and trained stop tokens."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    stops: int = 0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        trained = f", {self.trained:,} trained" * bool(self.trained)
        stops = f", {quantity(self.stops, 'stop token')}" * bool(self.stops)
        return quantity(self.tokens, "token") + trained + stops


@dataclass(frozen=True)
class Stage:
    """Losses of one stage of preparation: how many documents were affected, and why.

    Attributes:
        affected: documents, or pieces of them, that the stage changed or dropped.
        why: the reason, as a predicate of the affected documents.
        lost: counts before the stage minus counts after it. A piece counts as a document, so a
            stage that splits documents loses a negative number of them.
        lost_eos: documents that have fewer trained stop tokens than before.
        remedy: the setting that avoids the loss.
        repeated: tokens that pieces repeat as context, without training them again.
    """

    affected: int
    why: str
    lost: TokenCounts = field(default_factory=TokenCounts)
    lost_eos: int = 0
    remedy: str = ""
    repeated: int = 0

    def __add__(self, other: "Stage") -> "Stage":
        """Return the losses of the same stage on other documents too."""
        names = ("affected", "lost", "lost_eos", "repeated")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def __str__(self) -> str:
        lost = f"; lost {self.lost}" * self.is_loss
        repeated = f"; {quantity(self.repeated, 'token')} repeated as context" * bool(self.repeated)
        return f"{quantity(self.affected, 'document')} {self.why}{repeated}{lost}"

    @property
    def is_loss(self) -> bool:
        """Whether tokens are lost, or are not trained any more."""
        return self.lost.tokens > 0 or self.lost.trained > 0


@dataclass(frozen=True)
class Conversations:
    """Conversations that become a document for each turn; zeros without `train_on="every_turn"`.

    Attributes:
        number: conversations.
        documents: their trained turns.
    """

    number: int = 0
    documents: int = 0

    @classmethod
    def of(cls, turns: np.ndarray) -> "Conversations":
        """Return the conversations whose documents have these values of the column `TURN`."""
        # The first turn of a conversation, or a conversation without one.
        return cls(int((turns <= 0).sum()), int((turns >= 0).sum()))

    def __add__(self, other: "Conversations") -> "Conversations":
        return Conversations(self.number + other.number, self.documents + other.documents)

    def __str__(self) -> str:
        if not self.number:
            return ""
        documents = quantity(self.documents, "document")
        return f"{quantity(self.number, 'conversation')} → {documents}, one for each turn"


@dataclass(frozen=True)
class PreparationCounts:
    """Counts before and after the preparation of one data set, and the losses of each stage.

    `notes` are sentences on documents that concern no loss, `conversations` those that were
    divided into turns.
    """

    before: TokenCounts = field(default_factory=TokenCounts)
    after: TokenCounts = field(default_factory=TokenCounts)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    conversations: Conversations = field(default_factory=Conversations)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PreparationCounts":
        """Return the counts that `asdict` has stored."""
        stages = ({**stage, "lost": TokenCounts(**stage["lost"])} for stage in stored["stages"])
        return cls(
            TokenCounts(**stored["before"]),
            TokenCounts(**stored["after"]),
            tuple(Stage(**stage) for stage in stages),
            tuple(stored["notes"]),
            Conversations(**stored["conversations"]),
        )

    def __add__(self, other: "PreparationCounts") -> "PreparationCounts":
        """Return the counts of two parts of a data set; notes of the first that has any."""
        stages = {stage.why: stage for stage in self.stages}
        for stage in other.stages:
            stages[stage.why] = stages[stage.why] + stage if stage.why in stages else stage
        return PreparationCounts(
            self.before + other.before,
            self.after + other.after,
            tuple(stages.values()),
            self.notes or other.notes,
            self.conversations + other.conversations,
        )

    def __str__(self) -> str:
        lines = [str(stage) for stage in self.stages]
        if sum(stage.is_loss for stage in self.stages) > 1:
            lines.append(f"lost in all: {self.before - self.after}")
        return "\n".join(filter(None, [*lines, self._warning(), *self.notes]))

    def _warning(self) -> str:
        """Return a sentence if more than `WARN_LOST_SHARE` is lost, with the most useful remedy."""
        before = self.before
        trained = (before.trained - self.after.trained) / max(before.trained, 1)
        stops = sum(stage.lost_eos for stage in self.stages) / max(before.documents, 1)
        words = []
        if trained > WARN_LOST_SHARE:
            words.append(f"{trained:.1%} of the trained tokens are lost")
        if stops > WARN_LOST_SHARE:
            words.append(f"{stops:.1%} of the documents lost a stop token")
        if not words:
            return ""
        most = max(self.stages, key=lambda stage: (stage.lost.trained, stage.lost_eos))
        return f"warning: {' and '.join(words)}{'; ' * bool(most.remedy)}{most.remedy}"


def quantity(number: int, unit: str) -> str:
    plural = "es" if unit.endswith("ch") else "s"
    return f"{number:,} {unit}{plural * (number != 1)}"
