"""Writing prepared documents as shards: Arrow streams of about equal size.

documents     input_ids, labels, weights, source      columns that training reads, others dropped
    │  cast   token ids and labels to 32 bits
    ▼
00000.arrow   00001.arrow   …                         each flushed to the disk
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, document_columns, token_columns

SHARD_BYTES = 500_000_000

_BYTES_AT_ONCE = 64_000_000
_AS_INT32 = List(Value("int32"))


def write_shards(
    documents: Dataset,
    folder: Path,
    *,
    named: Sequence[str] = (),
    shard_bytes: int = SHARD_BYTES,
) -> list[dict[str, Any]]:
    """Write `documents` into `folder`, which is made.

    Returns the entries of the manifest: name, size, rows and hash of each file.

    Args:
        documents: prepared.
        folder: for the shards.
        named: columns to keep beside those of tokens and weights, as settings name them.
        shard_bytes: a shard ends when it has this size.
    """
    kept = _kept_columns(documents, named)
    documents = documents.select_columns(kept)
    features = Features({name: _stored_type(documents, name) for name in kept})
    rows = documents.with_format("arrow")
    at_once = _rows_of(min(shard_bytes, _BYTES_AT_ONCE), documents)
    folder.mkdir(parents=True)
    shards: list[dict[str, Any]] = []
    done = 0
    while done < len(rows):
        file, first = folder / f"{len(shards):05d}.arrow", done
        done = _write_shard(rows, first, file, features.arrow_schema, at_once, shard_bytes)
        shards.append(
            {
                "file": f"{folder.name}/{file.name}",
                "bytes": file.stat().st_size,
                "rows": done - first,
                "sha256": hash_of_file(file),
            }
        )
    return shards


def hash_of_file(file: Path) -> str:
    """Return the SHA-256 of the content of `file`, as `sha256sum` prints it."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write_shard(
    rows: Dataset, start: int, file: Path, schema: pa.Schema, at_once: int, shard_bytes: int
) -> int:
    """Write rows from `start` until the shard is full, and return the first row after it."""
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        while start < len(rows) and sink.tell() < shard_bytes:
            stop = min(start + at_once, len(rows))
            table = rows[start:stop].select(schema.names).cast(schema).combine_chunks()
            writer.write_table(table)
            start = stop
    sync(file)
    return start


def _rows_of(size: int, documents: Dataset) -> int:
    """Return how many documents have about `size` bytes of ids and labels."""
    tokens = int(ArrowDocuments(documents, ["input_ids"]).lengths().sum())
    return max(1, size * len(documents) // max(1, 8 * tokens))


def sync(path: Path) -> None:
    """Wait until a file or a folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _kept_columns(documents: Dataset, named: Sequence[str]) -> list[str]:
    columns = documents.column_names
    packed = [name for name in (SEQ_LENGTHS,) if name in columns]
    return [*token_columns(columns), *document_columns(columns, named), *packed]


def _stored_type(documents: Dataset, name: str) -> Any:
    kind = documents.features[name]
    is_tokens = name in ("input_ids", "labels", SEQ_LENGTHS)
    return _AS_INT32 if is_tokens else kind
