"""Rows from a file, a folder or the hub; or a folder of prepared documents, read as a data set.

    OUT/manifest.json       sets, their settings and counts, versions
    OUT/train/, OUT/eval/   columns of training, as `save_to_disk` writes them

The data set carries a record of how it was made. Preparation compares the record with the run, and
then leaves the documents as they are.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from datasets import Dataset, DatasetInfo, IterableDataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.rules import MAY_BE_NONE, Rules, settings_of

MANIFEST = "manifest.json"
FORMAT_KEY, FORMAT = "trl_packing_prepared", 4

_MARK = "trl_packing prepared "  # starts the record in the description of a data set


@dataclass(frozen=True)
class PreparedRecord:
    """The preparation of a set of documents, on record."""

    folder: str
    fingerprint: str  # of the data set, while it is as it was loaded
    settings: Mapping[str, Any]  # that shaped its documents
    flagged: bool  # messages of its rows have "train" or "weight"
    counts: PreparationCounts | None  # None for rows that were packed before

    def is_whole(self, dataset: Any) -> bool:
        """Return whether nothing was selected from `dataset`, or changed, since it was loaded."""
        return isinstance(dataset, Dataset) and dataset._fingerprint == self.fingerprint

    def check(self, rules: Rules) -> None:
        """Raise ValueError if a run makes other documents."""
        now = settings_of(rules, flagged=self.flagged)
        wrong = []
        for name, before in self.settings.items():
            value = now[name]
            if before == value or (name in MAY_BE_NONE and value is None):
                continue
            is_long = name == "tokenizer" or max(len(repr(before)), len(repr(value))) > 60
            words = f"{name}={before!r} there and {value!r} here"
            wrong.append(f"another {name.replace('_', ' ')}" if is_long else words)
        if wrong:
            raise ValueError(
                f"the prepared data in {self.folder} do not fit this run: {'; '.join(wrong)}; use "
                "the same settings here, or run `trl-packing prepare` again with those of this run"
            )


def records_of(dataset: Any) -> list[PreparedRecord]:
    """Return the records of prepared data in `dataset`; several if sets were concatenated."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return []
    lines = (dataset.info.description or "").split("\n\n")
    found = [json.loads(line.removeprefix(_MARK)) for line in lines if line.startswith(_MARK)]
    for stored in found:
        stored["counts"] = stored["counts"] and PreparationCounts.from_json(stored["counts"])
    return [PreparedRecord(**stored) for stored in found]


LOADERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(
    data: str, split: str = "train", *, config: str | None = None, cache_dir: str | None = None
) -> Dataset:
    """Return the rows of a .json, .jsonl or .parquet file, a folder of them, or a hub id.

    A folder that `trl-packing prepare` wrote gives its documents.

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
    loader = LOADERS.get(Path(data).suffix)
    files = {}
    if loader is not None:
        if not Path(data).is_file():
            raise ValueError(f"{data} does not exist")
        files = {"data_files": data}
        config = None
    try:
        return load_dataset(loader or data, config, split=split, cache_dir=cache_dir, **files)
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        cause = error.__cause__ or error
        reason = "it is empty" if isinstance(cause, StopIteration) else cause
        raise ValueError(f"{data} cannot be read: {reason}") from error


def is_prepared(path: str | Path) -> bool:
    """Return whether `path` is a folder of prepared data."""
    try:
        return FORMAT_KEY in json.loads((Path(path).expanduser() / MANIFEST).read_text("utf-8"))
    except (OSError, ValueError):
        return False


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder of prepared data; ValueError without one of this version."""
    if not is_prepared(folder):
        raise ValueError(f"{folder} holds no prepared data: it has no {MANIFEST}")
    manifest: dict[str, Any] = json.loads((Path(folder).expanduser() / MANIFEST).read_text("utf-8"))
    if manifest[FORMAT_KEY] != FORMAT:
        raise ValueError(
            f"{folder} was prepared by trl_packing {manifest['versions']['trl_packing']}, in a "
            "form that this version cannot read; prepare the data again"
        )
    return manifest


def load_prepared(folder: str | Path, name: str = "train") -> Dataset:
    """Return a set of prepared documents, for `train_dataset` or `eval_dataset` of the trainer.

    Args:
        folder: written by `trl-packing prepare`.
        name: "train", the name of an evaluation set ("eval" if there is one), or the split that a
            set was prepared from.

    Raises:
        ValueError: there is no such folder or set, or its files are damaged.
    """
    manifest = read_manifest(folder)
    sets = manifest["sets"]
    of_split = [each for each, stored in sets.items() if stored["split"] == name]
    if name not in sets:
        if len(of_split) != 1:
            splits = {each: stored["split"] for each, stored in sets.items()}
            raise ValueError(f"{folder} holds sets of the splits {splits}, not {name!r}; name one")
        name = of_split[0]
    stored = sets[name]
    text = json.dumps([manifest, name], sort_keys=True)
    fingerprint = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    record = {"folder": str(folder), "fingerprint": fingerprint}
    record |= {key: stored[key] for key in ("settings", "flagged", "counts")}
    path = Path(folder).expanduser() / folder_of(name)
    try:
        documents = load_from_disk(path)
        if len(documents) != stored["stored_rows"]:  # an Arrow stream ends where zeros begin
            raise ValueError(f"{len(documents):,} rows instead of {stored['stored_rows']:,}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); copy it again, or prepare the data again"
        ) from error
    info = DatasetInfo(
        description=_MARK + json.dumps(record),
        features=documents.features,
        dataset_name=str(folder),
    )
    return Dataset(documents.data, info=info, fingerprint=fingerprint)


def folder_of(name: str) -> str:
    """Return the name of a set as a single name of a folder."""
    return quote(name, safe="").replace(".", "%2E")
