"""The mixture of a run: the documents that an epoch draws of each source.

train_dataset={"math": …, "chat": …}   the sources are its names               (run_data.py)
source_column="source"                 the sources are the values of a column
    │  mixture, mixture_unit, mixture_temperature
    ▼
documents an epoch of each source  →  places of an epoch                        (packing/draw.py)
"""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SOURCE
from trl_packing.loss.sums import Sources
from trl_packing.packing.draw import MixtureDraw, drawn_by_epochs, drawn_by_weight, packing_seed
from trl_packing.training.metrics import training_sources

# A plan of an epoch holds some numbers for each document that it draws: 100 GB for so many.
_MOST_DRAWN = 1_000_000_000


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


@dataclass(frozen=True, eq=False)
class Mixture:
    """The sources of a training set, and how often an epoch draws each.

    Attributes:
        sources: of every document.
        draw: the documents of each epoch; None draws every document once.
    """

    sources: Sources
    draw: MixtureDraw | None

    def settings(self) -> dict[str, Any] | None:
        """Return the mixture as a checkpoint saves it; None where every document comes once."""
        if self.draw is None:
            return None
        counts = dict(zip(self.sources.names, self.draw.counts.tolist(), strict=True))
        return {"documents": counts, "sources": zlib.crc32(self.draw.source_ids.tobytes())}

    def shares(self, lengths: np.ndarray, trained: np.ndarray) -> tuple[SourceShare, ...]:
        """Return what the first epoch draws of each source.

        Args:
            lengths: tokens of every document, or packed row, ``(documents,)``.
            trained: trained tokens of each.
        """
        names, held, ids = self.sources.names, self.sources.num_documents, self.sources.ids
        drawn, counts = np.arange(len(ids)), held
        if self.draw is not None:
            drawn, counts = self.draw.documents(0), self.draw.counts
        tokens, targets = (
            np.bincount(ids[drawn], values[drawn], len(names)) for values in (lengths, trained)
        )
        numbers = np.stack([held, counts, tokens, targets]).astype(np.int64).T.tolist()
        return tuple(SourceShare(name, *row) for name, row in zip(names, numbers, strict=True))


def is_mixed(options: PackingOptions) -> bool:
    """Return whether the settings ask for a mixture."""
    return options.mixture is not None or options.mixture_temperature is not None


def mixture_of(documents: ArrowDocuments, args: Any) -> Mixture | None:
    """Return the mixture of a training set; None if its sources are not known.

    Args:
        documents: the training set.
        args: the settings of the run.

    Raises:
        ValueError: a mixture is asked for, but the sources are not known or are other ones.
    """
    options = PackingOptions.of(args)
    dataset, columns = documents.dataset, documents.dataset.column_names
    if not is_mixed(options):
        found = training_sources(dataset, options.source_column)
        return None if found is None else Mixture(found, None)
    setting = "mixture" if options.mixture is not None else "mixture_temperature"
    column = SOURCE if SOURCE in columns else options.source_column
    if column is None or column not in columns:
        has = (
            "no column of sources" if column is None else f"no column {column!r} (it has {columns})"
        )
        raise ValueError(
            f"{setting} draws sources, but the training set has {has}; pass train_dataset as a "
            "dictionary of data sets, or name the column with source_column"
        )
    if is_packed(documents):
        raise ValueError(
            f"{setting} cannot draw documents of rows that were packed before (they have "
            "seq_lengths); leave it out, or pass the documents"
        )
    sources = Sources.of(dataset, column, "the training set")
    counts = _documents_an_epoch(sources, documents, options)
    return Mixture(sources, MixtureDraw(sources.ids, counts, packing_seed(args)))


def _documents_an_epoch(
    sources: Sources, documents: ArrowDocuments, options: PackingOptions
) -> np.ndarray:
    """Return the documents that an epoch draws of each source, ``(sources,)`` int64."""
    names, unit, temperature = sources.names, options.mixture_unit, options.mixture_temperature
    given: Any = options.mixture or {}
    shares: dict[str, Any] = {str(name): share for name, share in given.items()}
    if unknown := [name for name in shares if name not in names]:
        raise ValueError(
            f"mixture names {unknown[0]!r}, but the sources are {', '.join(names)} (those with a "
            "document to train); name one of them"
        )
    epochs = np.array([shares.get(name, {}).get("epochs", 1.0) for name in names])
    counts = drawn_by_epochs(epochs, sources.num_documents)
    by_size = temperature is not None  # the sources without epochs are drawn by their sizes
    weighted = [
        at
        for at, name in enumerate(names)
        if (name not in shares if by_size else "weight" in shares.get(name, {}))
    ]
    if by_size and not weighted:
        raise ValueError(
            f"mixture_temperature={temperature} has no effect, because mixture has epochs for "
            "every source; leave one of them out"
        )
    units = sources.num_documents
    if unit != "documents":
        values = documents.lengths() if unit == "tokens" else documents.num_trained()
        units = np.bincount(sources.ids, values, minlength=len(names))
    for at in weighted:
        if not units[at]:
            raise ValueError(
                f"mixture_unit={unit!r}, but the source {names[at]!r} has no "
                f"{unit.replace('_', ' ')}; leave the source out, or count in documents"
            )
    weights = [shares[names[i]]["weight"] for i in weighted] if not by_size else units[weighted]
    counts[weighted] = 0
    if np.any(weights):
        sizes = sources.num_documents[weighted]
        counts[weighted] = drawn_by_weight([*weights], sizes, units[weighted], temperature or 1.0)
    if not counts.sum():
        raise ValueError("mixture draws no document: every source has a weight or epochs of 0")
    if counts.max() > _MOST_DRAWN:
        raise ValueError(
            f"an epoch of the mixture draws {counts.max():,} documents of "
            f"{names[counts.argmax()]!r}, and {_MOST_DRAWN:,} are the most; lower its epochs, or "
            "raise num_train_epochs instead"
        )
    return counts
