"""Sources of a stream, which tells them only by being read: numbered alike on all ranks.

source of each document     code  code  web  null           in the process that reads
numbers in a micro-batch       0     0    1     2           with the names (code, web, None)
    │  all ranks agree on new names before a step is trained
numbers in the run             1     1    0    -1           with the names (web, code)
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_packing.data.stream import Document, class_name
from trl_packing.documents.host_row import host_row
from trl_packing.documents.labels import SOURCE_IDS
from trl_packing.models.sharding import gather_objects

logger = logging.getLogger(__name__)

# Names of the sources of a micro-batch, in the order of their numbers; None is no source.
Names = tuple[str | None, ...]


@dataclass(frozen=True)
class SourceColumn:
    """A column of a stream that holds the source of each document.

    Attributes:
        name: of the column.
        classes: names of its numbers, if it is a ClassLabel; None otherwise.
    """

    name: str
    classes: Sequence[str] | None = None

    def numbered(self, documents: Iterable[Document]) -> tuple[list[Document], Names]:
        """Return `documents` with `SOURCE_IDS` instead of this column, and the names of the ids.

        Examples:
            >>> SourceColumn("kind").numbered([{"kind": "web"}, {"kind": None}, {"kind": "web"}])
            ([{'source_ids': 0}, {'source_ids': 1}, {'source_ids': 0}], ('web', None))
        """
        numbers: dict[str | None, int] = {}
        found = []
        for document in documents:
            others = {name: value for name, value in document.items() if name != self.name}
            source = self._source(document.get(self.name))
            found.append(others | {SOURCE_IDS: numbers.setdefault(source, len(numbers))})
        return found, tuple(numbers)

    def _source(self, value: Any) -> str | None:
        """Return the source that a value names; None if it names none."""
        value = value.item() if isinstance(value, np.generic) else value
        if self.classes is not None and isinstance(value, int):
            return class_name(value, self.classes)
        return str(value) if isinstance(value, (str, int)) else None


class SourceNames:
    """The names of the sources that a stream has shown so far.

    Args:
        column: holds them.
        most: number of names beyond which sources are not told apart.
        gather: returns the values that the ranks pass.

    Attributes:
        names: of all sources, in the order in which they were met; none if there are too many.
    """

    def __init__(
        self,
        column: SourceColumn,
        *,
        most: int,
        gather: Callable[[Any], list[Any]] = gather_objects,
    ):
        self.column = column
        self.most = most
        self.names: tuple[str, ...] = ()
        self._gather = gather
        self._has_too_many = self._has_warned = False

    def lacks(self, names: Iterable[str | None]) -> bool:
        """Return whether some of `names` are new."""
        return not self._has_too_many and not {*names} - {None} <= {*self.names}

    def agree(self, names: Iterable[str | None]) -> None:
        """Add the names that the ranks pass. All ranks call it, also those without new ones."""
        met = dict.fromkeys(name for found in self._gather([*names]) for name in found if name)
        known = dict.fromkeys([*self.names, *met])
        self._has_too_many = len(known) > self.most
        self.names = () if self._has_too_many else tuple(known)
        if self._has_too_many:
            logger.warning(
                f"the training log has no losses by source from here on: the column "
                f"{self.column.name!r} of the stream has more than {self.most:,} different values, "
                "and each would be a metric; name a column with fewer of them"
            )

    def renumber(self, batch: Mapping[str, Any], names: Names) -> None:
        """Replace numbers of a micro-batch by those of the run, in place: −1 without a name.

        Args:
            batch: made of documents that `SourceColumn.numbered` returned.
            names: likewise.
        """
        if None in names and not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"some documents of the stream have no {self.column.name!r}, or a value that is "
                "neither a text nor a whole number: they are trained, and the training log counts "
                "them for no source"
            )
        known = {name: number for number, name in enumerate(self.names)}
        numbers = np.array([-1, *(known.get(name or "", -1) for name in names)])  # -1 stays
        if SOURCE_IDS in batch:
            ids = batch[SOURCE_IDS]
            ids.copy_(torch.from_numpy(numbers)[ids + 1])
        row = host_row(batch)
        if row is not None and row.sources is not None:
            row.sources[:] = numbers[row.sources + 1]
