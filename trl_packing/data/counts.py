"""Counts of documents and tokens that preparation kept and lost; `str()` is their words."""

import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

# Largest share of lost trained tokens, or of documents without their stop token, without warning.
WARN_LOST_SHARE = 0.01

# Bits of the column `documents.labels.HANDLED`: what preparation did with parts of a row.
PARSED, NO_JSON, NO_REASONING, NO_WORDS = 1, 2, 4, 8
TURN, FIRST = 16, 32  # with `every_turn`: a trained turn, and the first document of a conversation
_HANDLED = {
    PARSED: "with arguments of tool calls as JSON text: parsed, as the chat template needs them",
    NO_JSON: "with arguments of tool calls that are no JSON object: written as they are",
    NO_REASONING: (
        "with reasoning that the chat template leaves out: not trained; train_on='every_turn' "
        "trains it if the template writes it in the last turn"
    ),
    NO_WORDS: (
        "with words beside reasoning or tool calls that the chat template leaves out: neither read "
        "nor trained; use a template that writes them"
    ),
}


class Line(NamedTuple):
    """A line of a report: its label, "" below the line before; its text; whether it warns."""

    label: str
    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class TokenCounts:
    """Numbers of documents, tokens, trained tokens, and trained stop tokens."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    stops: int = 0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*map(operator.add, astuple(self), astuple(other)))

    def __sub__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*map(operator.sub, astuple(self), astuple(other)))

    def __str__(self) -> str:
        words = quantity(self.tokens, "token")
        if self.trained:
            words += f", {self.trained:,} trained"
        if self.stops:
            words += f", {quantity(self.stops, 'stop token')}"
        return words


@dataclass(frozen=True)
class Stage:
    """Losses of one stage of preparation: how many documents were affected, and why.

    Attributes:
        affected: documents, or pieces of them, that the stage changed or dropped.
        why: the reason, as a predicate of the affected documents.
        lost: counts before the stage minus counts after it. A piece counts as a document, so a
            stage that splits documents loses a negative number of them.
        lost_eos: documents that have fewer trained stop tokens than before.
        repeated: tokens that pieces repeat as context, without training them again.
        is_untrained: whether the documents have no trained token; else they are too long.
    """

    affected: int
    why: str
    lost: TokenCounts = field(default_factory=TokenCounts)
    lost_eos: int = 0
    repeated: int = 0
    is_untrained: bool = False

    def __add__(self, other: "Stage") -> "Stage":
        """Return the losses of the same stage on other documents too."""
        return replace(
            self,
            affected=self.affected + other.affected,
            lost=self.lost + other.lost,
            lost_eos=self.lost_eos + other.lost_eos,
            repeated=self.repeated + other.repeated,
        )

    def __str__(self) -> str:
        words = f"{quantity(self.affected, 'document')} {self.why}"
        if self.repeated:
            words += f"; {quantity(self.repeated, 'token')} repeated as context"
        if self.is_loss:
            words += f"; lost {self.lost}"
        return words

    @property
    def is_loss(self) -> bool:
        """Whether tokens are lost, or are not trained any more."""
        return self.lost.tokens > 0 or self.lost.trained > 0


@dataclass(frozen=True)
class PreparationCounts:
    """Counts before and after the preparation of one data set, and the losses of each stage.

    `notes` are sentences on documents that concern no loss; `turns` the trained turns into which
    `conversations` were divided by `train_on="every_turn"`.
    """

    before: TokenCounts = field(default_factory=TokenCounts)
    after: TokenCounts = field(default_factory=TokenCounts)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()
    conversations: int = 0
    turns: int = 0

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "PreparationCounts":
        """Return the counts that `asdict` has stored."""
        stages = []
        for stage in stored["stages"]:
            stages.append(Stage(**stage | {"lost": TokenCounts(**stage["lost"])}))
        return cls(
            TokenCounts(**stored["before"]),
            TokenCounts(**stored["after"]),
            tuple(stages),
            tuple(stored["notes"]),
            stored["conversations"],
            stored["turns"],
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
            self.turns + other.turns,
        )

    def __str__(self) -> str:
        return "\n".join(line.text for line in self.lines())

    def lines(self) -> list[Line]:
        """Return a line for each stage, then their sum, a warning and the notes."""
        lines = [Line("", str(stage)) for stage in self.stages]
        if sum(stage.is_loss for stage in self.stages) > 1:
            lines.append(Line("", f"lost in all: {self.before - self.after}"))
        trained = (self.before.trained - self.after.trained) / max(self.before.trained, 1)
        stops = sum(stage.lost_eos for stage in self.stages) / max(self.before.documents, 1)
        warnings = []
        if trained > WARN_LOST_SHARE:
            warnings.append(f"{trained:.1%} of the trained tokens are lost")
        if stops > WARN_LOST_SHARE:
            warnings.append(f"{stops:.1%} of the documents lost a stop token")
        if warnings:  # only cutting loses such
            remedy = "raise max_length or choose another overflow"
            warning = f"warning: {' and '.join(warnings)}; {remedy}"
            lines.append(Line("", warning, is_warning=True))
        return lines + [Line("", note) for note in self.notes]

    def turns_in_words(self) -> str:
        """Return the numbers of conversations and of their turns; "" without any."""
        if not self.conversations:
            return ""
        documents = quantity(self.turns, "document")
        return f"{quantity(self.conversations, 'conversation')} → {documents}, one for each turn"


def handled_in(bits: np.ndarray) -> PreparationCounts:
    """Return how many documents have each bit, given the values of the column `HANDLED`."""
    numbers = {bit: int(np.count_nonzero(bits & bit)) for bit in (*_HANDLED, TURN, FIRST)}
    stages = [Stage(numbers[bit], why) for bit, why in _HANDLED.items() if numbers[bit]]
    return PreparationCounts(
        stages=tuple(stages), conversations=numbers[FIRST], turns=numbers[TURN]
    )


def quantity(number: int, unit: str) -> str:
    plural = "es" if unit.endswith("ch") else "s"
    return f"{number:,} {unit}{plural * (number != 1)}"


def times(epochs: float) -> str:
    """Return how often an epoch draws a document.

    Examples:
        >>> times(1.0), times(2.5), times(0.3334), times(0.0001)
        ('1×', '2.5×', '0.33×', '0.0001×')
    """
    return f"{decimals(epochs)}×"


def decimals(number: float) -> str:
    """Return a number in plain decimals, two of them or two digits.

    Examples:
        >>> decimals(0.005), decimals(0.00001234), decimals(20.25), decimals(3.0)
        ('0.005', '0.000012', '20.25', '3')
    """
    return np.format_float_positional(number, 2, fractional=number >= 1, trim="-")


def times_fewer(tokens: int, computed: int) -> str:
    """Return by how much `computed` tokens are fewer.

    Examples:
        >>> times_fewer(1130, 1000), times_fewer(2400, 1000)
        ('1.13× fewer', '2.4× fewer')
    """
    ratio = tokens / max(computed, 1)
    return f"{ratio:.{2 if ratio < 2 else 1}f}× fewer"
