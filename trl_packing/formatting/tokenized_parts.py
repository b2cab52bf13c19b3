"""A long tokenization in parts, each in a file of its own, so that an interrupted one continues.

rows        0 … 24,999        25,000 … 49,999      50,000 …
files       8f3a….arrow       c41e….arrow          missing: made now

A file is named by a hash of its rows. After a correction in one row, only its part is made again.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, concatenate_datasets

# Some seconds of work for a process. A part that was interrupted is made again.
ROWS_OF_A_PROCESS = 25_000

_ROWS_AT_ONCE = 10_000  # that are hashed


@dataclass(frozen=True)
class TokenizedParts:
    """Files that keep the parts of data sets that are tokenized by the same rules.

    `datasets` writes each file under another name and renames it when it is whole.

    Attributes:
        folder: of the files; other rules need another one.
        rows_of_a_process: rows of a part, for each process.
    """

    folder: Path
    rows_of_a_process: int = ROWS_OF_A_PROCESS

    def map(self, rows: Dataset, function: Callable[..., Any], **options: Any) -> Dataset:
        """Return what ``rows.map(function, **options)`` returns, part by part.

        Args:
            rows: without a format.
            function: takes the number of the first row of a part as `first_row`.
            options: of `Dataset.map`; "fn_kwargs" and "desc" must be among them.
        """
        size = self.rows_of_a_process * (options.get("num_proc") or 1)
        starts = range(0, len(rows), size)
        arguments, title = options.pop("fn_kwargs"), options.pop("desc")
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = []
        for number, start in enumerate(starts):
            part = rows.select(range(start, min(start + size, len(rows))))
            step = f", part {number + 1} of {len(starts)}" if len(starts) > 1 else ""
            name = hash_of_rows(part)
            parts.append(
                part.map(
                    function,
                    fn_kwargs={**arguments, "first_row": start},
                    cache_file_name=str(self.folder / f"{name}.arrow"),
                    load_from_cache_file=True,
                    new_fingerprint=name,  # that of `datasets` would hash the tokenizer each time
                    desc=f"{title}{step}",
                    **options,
                )
            )
        return concatenate_datasets(parts)


def hash_of_rows(rows: Dataset) -> str:
    """Return a hash of the columns and values of `rows`, wherever they are stored."""
    digest = hashlib.blake2b(repr(rows.features).encode(), digest_size=16)
    for table in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
        # A copy: slices are stored with other offsets and null bits than whole columns.
        copy = table.take(pa.array(range(len(table)))).combine_chunks()
        for batch in copy.to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()
