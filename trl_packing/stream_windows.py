"""Windows of a stream: documents that are packed together, and how to find them again.

stream    d0 d1 d2 d3 │ d4 d5 d6 │ d7 …
windows   number 0      number 1   number 2, begins at a state of the stream, behind 7 documents
"""

import json
import zlib
from typing import Any

import datasets
import numpy as np

from trl_packing.labels import WEIGHT_COLUMN, document_weights
from trl_packing.stream_parts import Document
from trl_packing.weighting import document_weight


class Source:
    """The documents of a part, in order, with a place to come back to.

    part: an iterable of documents.
    state: what `place` returned; reading goes on behind it.
    skipped: documents to leave out first, for a part that does not know its place.

    Raises ValueError, when read, if a document is longer than `capacity`.
    """

    def __init__(self, part: Any, capacity: int | None, state: Any = None, skipped: int = 0):
        self._part = part
        self._capacity = capacity
        self.num_read = skipped
        if state is not None:
            self._part.load_state_dict(state)
        self._documents = iter(self._part)
        if state is None:
            for _ in zip(range(skipped), self._documents, strict=False):
                pass

    def place(self) -> Any:
        """Return the state behind the last document, None if the part does not know it."""
        if not isinstance(self._part, datasets.IterableDataset) or not self.num_read:
            return None
        return self._part.state_dict()

    def size_of(self, document: Document) -> int:
        """Return its tokens, or 1 if documents are not packed."""
        return 1 if self._capacity is None else max(1, len(document["input_ids"]))

    def next(self) -> Document | None:
        """Return the next document, None at the end."""
        document = next(self._documents, None)
        if document is None:
            return None
        length = len(document["input_ids"])
        if self._capacity is not None and length > self._capacity:
            raise ValueError(
                f"document {self.num_read} of the stream has {length} tokens but capacity is "
                f"{self._capacity}; raise max_length or set overflow='truncate' or 'split'"
            )
        check_weights(document, f"document {self.num_read} of the stream")
        self.num_read += 1
        return document


def check_weights(document: Document, which: str) -> None:
    """Raise ValueError, naming the document, if it has weights that cannot be: null ones, too."""
    document_weight(document, which)
    if WEIGHT_COLUMN in document:
        try:
            document_weights(document, len(document["input_ids"]))
        except ValueError as problem:
            raise ValueError(f"{which}: {problem}") from None


class Window:
    """Documents of `source` up to a size, in tokens if it has a capacity, else in documents.

    number, num_batches_before: windows, and micro-batches of them, before this one.
    """

    def __init__(self, source: Source, full: int, number: int = 0, num_batches_before: int = 0):
        self.number = number
        self.num_batches_before = num_batches_before
        self.documents: list[Document] = []
        self._num_documents_before = source.num_read
        self._state = source.place()
        self._source = source
        self._full = full
        self._size = 0

    def following(self) -> "Window":
        """Return the window behind this one, empty so far; set its `num_batches_before`."""
        return Window(self._source, self._full, self.number + 1)

    def beginning_at(self, state: Any) -> "Window":
        """Return this window, whose place is at `state` of the stream."""
        self._state = state
        return self

    def read_up_to(self, share: float) -> "Window":
        """Read until this share of the window is there, or the stream ends."""
        while self._size < share * self._full:
            document = self._source.next()
            if document is None:
                break
            self.documents.append({name: _compact(value) for name, value in document.items()})
            self._size += self._source.size_of(document)
        return self

    def checksum(self) -> int:
        value = 0
        for document in self.documents:
            value = zlib.crc32(np.asarray(document["input_ids"]).tobytes(), value)
        return value

    def place(self) -> str:
        """Return where the window begins, in JSON (`streaming.Place`)."""
        begin = {
            "number": self.number,
            "documents": self._num_documents_before,
            "batches": self.num_batches_before,
            "state": self._state,
            "checksum": self.checksum(),
        }
        return json.dumps(begin, default=_plain)


def _compact(value: Any) -> Any:
    # A list of Python integers takes five times the memory, and the collator wants an array anyway.
    return np.asarray(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a NumPy number or array of a stream's state as JSON knows it."""
    return value.tolist()
