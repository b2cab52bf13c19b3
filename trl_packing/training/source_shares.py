"""`SourceShare`: the documents of a source, and what an epoch draws of them, as the report has it.

sources      chat   0.5× of 1,000 documents ·  80,000 tokens (20%) · 40,000 trained
             math     2× of 800 documents   · 320,000 tokens (80%) · 99,000 trained
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trl_packing.data.counts import quantity
from trl_packing.training.report_layout import Line

_MOST_LINES = 12


@dataclass(frozen=True)
class SourceShare:
    """A source, and the documents that the first epoch draws of it.

    Attributes:
        name: of the source.
        documents: that it has.
        drawn: documents that an epoch draws, with repetitions.
        tokens: of these.
        trained: trained tokens of these.
    """

    name: str
    documents: int
    drawn: int
    tokens: int
    trained: int

    @property
    def epochs(self) -> float:
        """Times that an epoch draws each document of the source."""
        return self.drawn / self.documents if self.documents else 0.0


def source_lines(sources: Sequence[SourceShare]) -> list[Line]:
    """Return the lines of the report on several sources; none on a single one drawn once."""
    if len(sources) < 2 and all(source.drawn == source.documents for source in sources):
        return []
    total = max(sum(source.tokens for source in sources), 1)
    largest = sorted(sources, key=lambda source: -source.tokens)
    shown = [source for source in sources if source in largest[:_MOST_LINES]]
    lines = [_line(source, source.tokens / total) for source in shown]
    if len(shown) < len(sources):
        tokens = sum(source.tokens for source in largest[_MOST_LINES:])
        others = quantity(len(sources) - len(shown), "other source")
        lines.append(f"{others} · {tokens:,} tokens ({tokens / total:.1%})")
    return [("sources" if not i else "", line) for i, line in enumerate(lines)]


def _line(source: SourceShare, share: float) -> str:
    return (
        f"{source.name}: {times(source.epochs)} {quantity(source.documents, 'document')} · "
        f"{source.tokens:,} tokens ({share:.1%}) · {source.trained:,} trained"
    )


def times(epochs: float) -> str:
    """Return how often an epoch draws a document.

    Examples:
        >>> times(1.0), times(2.5), times(0.3334), times(0.0001)
        ('1×', '2.5×', '0.33×', '0.0001×')
    """
    return f"{epochs:.2g}×" if epochs < 1 else f"{epochs:.2f}".rstrip("0").rstrip(".") + "×"
