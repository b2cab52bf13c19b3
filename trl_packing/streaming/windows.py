"""Windows of a stream: documents that are packed together, and the places where windows begin.

stream    d0 d1 d2 d3 │ d4 d5 d6 │ d7 …
windows   number 0      number 1   number 2: begins at a state of the stream, after 7 documents
"""

import json
import zlib
from typing import Any

import datasets
import numpy as np

from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import Document, check_lengths
from trl_packing.documents.labels import TOKEN_WEIGHTS
from trl_packing.documents.weights import document_weight, token_weights


class DocumentSource:
    """The documents of some shards, in order, with a state from which reading can continue.

    Args:
        shards: an iterable of documents.
        capacity: tokens that a document may have; None sets no limit.
        state: a state that `state` returned; reading continues there.
        skipped: documents before that state. Shards without a state read and skip this many.
        limits: limits of the model.

    Raises:
        ValueError: while reading, a document is longer than `capacity` or exceeds `limits`.
    """

    def __init__(
        self,
        shards: Any,
        capacity: int | None,
        state: Any = None,
        skipped: int = 0,
        limits: ModelLimits = NO_LIMITS,
    ):
        self._shards = shards
        self._limits = limits
        self._capacity = capacity
        self.num_read = skipped
        if state is not None:
            self._shards.load_state_dict(state)
        self._documents = iter(self._shards)
        if state is None:
            for _ in zip(range(skipped), self._documents, strict=False):
                pass

    def state(self) -> Any:
        """Return the state behind the last document, None if the shards have none."""
        if not isinstance(self._shards, datasets.IterableDataset) or not self.num_read:
            return None
        return self._shards.state_dict()

    def size_of(self, document: Document) -> int:
        """Return the tokens of a document, or 1 if documents are not packed."""
        return 1 if self._capacity is None else max(1, len(document["input_ids"]))

    def next(self) -> Document | None:
        """Return the next document, or None at the end."""
        document = next(self._documents, None)
        if document is None:
            return None
        length = len(document["input_ids"])
        if self._capacity is not None and length > self._capacity:
            raise ValueError(
                f"document {self.num_read} of the stream has {length} tokens but capacity is "
                f"{self._capacity}; raise max_length or set overflow='truncate' or 'drop'"
            )
        check_weights(document, f"document {self.num_read} of the stream")
        check_lengths(document, self.num_read)
        document = {name: _compact(value) for name, value in document.items()}
        self._limits.check_document(document, f"document {self.num_read} of the stream")
        self.num_read += 1
        return document


def check_weights(document: Document, which: str) -> None:
    """Raise ValueError, naming the document, if a weight is null or out of range."""
    document_weight(document, which)
    if TOKEN_WEIGHTS in document:
        try:
            token_weights(document, len(document["input_ids"]))
        except ValueError as problem:
            raise ValueError(f"{which}: {problem}") from None


class Window:
    """Documents of a source up to a size.

    Args:
        source: yields the documents.
        full_size: in tokens if the source has a capacity, else in documents.
        number: windows before this one.
    """

    def __init__(self, source: DocumentSource, full_size: int, number: int = 0):
        self.number = number
        self.documents: list[Document] = []
        self._num_documents_before = source.num_read
        self._state = source.state()
        self._source = source
        self._full_size = full_size
        self._size = 0

    def next(self) -> "Window":
        """Return the next window, still empty."""
        return Window(self._source, self._full_size, self.number + 1)

    def beginning_at(self, state: Any) -> "Window":
        """Return this window, with `state` as the state of the stream where it begins."""
        self._state = state
        return self

    def read_up_to(self, share: float) -> "Window":
        """Read documents until this share of the window is full, or the stream ends."""
        while self._size < share * self._full_size:
            document = self._source.next()
            if document is None:
                break
            self.documents.append(document)
            self._size += self._source.size_of(document)
        return self

    def checksum(self) -> int:
        """Return a checksum of all tokens."""
        value = 0
        for document in self.documents:
            value = zlib.crc32(np.asarray(document["input_ids"]).tobytes(), value)
        return value

    def place(self) -> str:
        """Return where the window begins, in JSON (`Place` in reader.py)."""
        begin = {
            "number": self.number,
            "documents": self._num_documents_before,
            "state": self._state,
            "checksum": self.checksum(),
        }
        return json.dumps(begin, default=_plain)


def _compact(value: Any) -> Any:
    # A list of Python integers takes five times the memory, and the collator needs an array anyway.
    return np.asarray(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a NumPy number or array of a stream's state as a JSON value."""
    return value.tolist()
