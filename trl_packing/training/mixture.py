"""The mixture of a run: the documents that an epoch draws of each source.

train_dataset={"math": …, "chat": …}   the sources are its names               (source_sets.py)
source_column="source"                 the sources are the values of a column
    │  mixture, mixture_unit, mixture_temperature
    ▼
documents an epoch of each source  →  places of an epoch                        (packing/draw.py)
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SOURCE
from trl_packing.loss.sources import Sources
from trl_packing.packing.document_order import packing_seed
from trl_packing.packing.draw import MixtureDraw, drawn_by_epochs, drawn_by_weight
from trl_packing.training.source_metrics import training_sources
from trl_packing.training.source_shares import SourceShare

# A plan of an epoch holds some numbers for each document that it draws: 100 GB for so many.
_MOST_DRAWN = 1_000_000_000


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
        ids, number = self.sources.ids, len(self.sources.names)
        drawn = np.arange(len(ids)) if self.draw is None else self.draw.documents(0)
        held = self.sources.num_documents
        of_drawn = ids[drawn]
        counts = held if self.draw is None else self.draw.counts
        tokens = np.bincount(of_drawn, lengths[drawn], minlength=number)
        targets = np.bincount(of_drawn, trained[drawn], minlength=number)
        columns = (held, counts, tokens.astype(np.int64), targets.astype(np.int64))
        return tuple(
            SourceShare(name, *numbers)
            for name, *numbers in zip(
                self.sources.names, *(column.tolist() for column in columns), strict=True
            )
        )


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
    column = SOURCE if SOURCE in columns else options.source_column
    if column is None or column not in columns:
        raise ValueError(_no_sources(options, columns))
    if is_packed(documents):
        raise ValueError(
            f"{_setting(options)} cannot draw documents of rows that were packed before (they have "
            "seq_lengths); leave it out, or pass the documents"
        )
    sources = Sources.of(dataset, column, "the training set")
    counts = documents_an_epoch(sources, documents, options)
    return Mixture(sources, MixtureDraw(sources.ids, counts, packing_seed(args)))


def documents_an_epoch(
    sources: Sources, documents: ArrowDocuments, options: PackingOptions
) -> np.ndarray:
    """Return the documents that an epoch draws of each source, ``(sources,)`` int64.

    Args:
        sources: of the documents.
        documents: the training set.
        options: with a mixture, or its temperature.

    Raises:
        ValueError: the mixture names other sources, or draws nothing.
    """
    sizes = np.bincount(sources.ids, minlength=len(sources.names))
    shares = _shares(options, sources.names)
    epochs = np.array([shares.get(name, {}).get("epochs", 1.0) for name in sources.names])
    counts = drawn_by_epochs(epochs, sizes)
    weighted = [i for i, name in enumerate(sources.names) if "weight" in shares.get(name, {})]
    temperature = 1.0
    if options.mixture_temperature is not None:
        weighted = [i for i, name in enumerate(sources.names) if name not in shares]
        temperature = options.mixture_temperature
        if not weighted:
            raise ValueError(
                f"mixture_temperature={temperature} has no effect, because mixture has epochs for "
                "every source; leave one of them out"
            )
    if weighted:
        units = _units(sources, documents, options.mixture_unit)[weighted]
        given: list[float] = units.tolist()
        if options.mixture_temperature is None:
            given = [shares[sources.names[i]]["weight"] for i in weighted]
        _check_units(sources.names, weighted, units, options.mixture_unit)
        if any(given):
            counts[weighted] = drawn_by_weight(given, sizes[weighted], units, temperature)
        else:
            counts[weighted] = 0
    if not counts.sum():
        raise ValueError("mixture draws no document: every source has a weight or epochs of 0")
    _check_number(counts, sources.names)
    return counts


def _check_number(counts: np.ndarray, names: tuple[str, ...]) -> None:
    if (counts > _MOST_DRAWN).any():
        most = int(np.argmax(counts))
        raise ValueError(
            f"an epoch of the mixture draws {counts[most]:,} documents of {names[most]!r}, and "
            f"{_MOST_DRAWN:,} are the most; lower its epochs, or raise num_train_epochs instead"
        )


def _check_units(names: tuple[str, ...], weighted: list[int], units: np.ndarray, unit: str) -> None:
    empty = [names[i] for i, number in zip(weighted, units, strict=True) if not number]
    if empty:
        raise ValueError(
            f"mixture_unit={unit!r}, but the source {empty[0]!r} has no {unit.replace('_', ' ')}; "
            "leave the source out, or count in documents"
        )


def _units(sources: Sources, documents: ArrowDocuments, unit: str) -> np.ndarray:
    """Return the documents or tokens of each source, ``(sources,)``."""
    if unit == "documents":
        return np.bincount(sources.ids, minlength=len(sources.names))
    values = documents.lengths() if unit == "tokens" else documents.num_trained()
    return np.bincount(sources.ids, values, minlength=len(sources.names))


def _shares(options: PackingOptions, names: tuple[str, ...]) -> Mapping[str, Mapping[str, float]]:
    """Return the shares that the user has named. Raise ValueError for one of another source."""
    given = options.mixture or {}
    assert isinstance(given, dict)
    shares = {str(name): share for name, share in given.items()}
    unknown = [name for name in shares if name not in names]
    if unknown:
        raise ValueError(
            f"mixture names {unknown[0]!r}, but the sources are {', '.join(names)} (those with a "
            "document to train); name one of them"
        )
    return shares


def _setting(options: PackingOptions) -> str:
    return "mixture" if options.mixture is not None else "mixture_temperature"


def _no_sources(options: PackingOptions, columns: list[str]) -> str:
    named = (
        "the training set has no column of sources"
        if options.source_column is None
        else f"the training set has no column {options.source_column!r} (it has {columns})"
    )
    return (
        f"{_setting(options)} draws sources, but {named}; pass train_dataset as a dictionary of "
        "data sets, or name the column with source_column"
    )
