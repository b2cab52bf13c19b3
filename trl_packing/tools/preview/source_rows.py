"""Rows of several data sets, numbered as one: those of a `train_dataset` that is a dictionary.

math    rows 0 … 799
chat    rows 800 … 1,299
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset


class SourceRows:
    """The data sets of a dictionary, which are prepared one by one.

    Args:
        datasets: by the names of their sources.
    """

    def __init__(self, datasets: dict[str, Dataset]):
        self.datasets = datasets

    def __len__(self) -> int:
        return sum(map(len, self.datasets.values()))

    @property
    def column_names(self) -> list[str]:
        """The columns of any of the data sets."""
        return list(
            dict.fromkeys(name for rows in self.datasets.values() for name in rows.column_names)
        )

    @property
    def _starts(self) -> np.ndarray:
        return np.cumsum([0, *map(len, self.datasets.values())])

    def locate(self, row: int) -> tuple[str, int]:
        """Return the source of a row, and its number there."""
        at = int(np.searchsorted(self._starts, row, side="right")) - 1
        return [*self.datasets][at], row - int(self._starts[at])

    def select(self, rows: Sequence[int] | np.ndarray) -> "SourceRows":
        """Return some of the rows, source by source."""
        of_source: dict[str, list[int]] = {}
        for row in rows:
            name, number = self.locate(int(row))
            of_source.setdefault(name, []).append(number)
        return SourceRows({name: self.datasets[name].select(of_source[name]) for name in of_source})

    def add_column(self, name: str, column: Any) -> "SourceRows":
        """Return the rows with one more column, of a value for each of them."""
        parts = np.split(np.asarray(column), self._starts[1:-1])
        return SourceRows(
            {
                source: rows.add_column(name, part)
                for (source, rows), part in zip(self.datasets.items(), parts, strict=True)
            }
        )
