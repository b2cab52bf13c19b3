"""Loading rows from a file, a folder or the hub, or documents that are prepared."""

from pathlib import Path

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from trl_packing.data.prepared import is_prepared, load_prepared

LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    data: str, split: str = "train", *, config: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """Return the rows of a .json, .jsonl or .parquet file, a folder of them, or a hub id.

    Of a folder that `trl-packing prepare` wrote, return the prepared documents.

    Args:
        data: file, folder or hub id.
        split: a split, or a part of it: "train[:1000]". Prepared data are whole sets, which have
            the split that they were made of, or the names "train" and "eval".
        config: configuration (subset) of a data set on the hub that has several.
        cache_dir: folder in which `datasets` caches; None: its default.

    Raises:
        ValueError: for a file that does not exist or cannot be read.
    """
    if is_prepared(data):
        return load_prepared(data, split)
    loader, files = LOADERS.get(Path(data).suffix), {}
    if loader is not None:
        if not Path(data).is_file():
            raise ValueError(f"{data} does not exist")
        files, config = {"data_files": data}, None
    try:
        return load_dataset(loader or data, config, split=split, cache_dir=cache_dir, **files)
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = "it is empty" if isinstance(cause, StopIteration) else cause
        raise ValueError(f"{data} cannot be read: {reason}") from error
