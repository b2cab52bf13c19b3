"""Rows from a file, a folder or the hub; or a folder of prepared documents, read as a data set.

    OUT/manifest.json       sets, their settings and counts, versions
    OUT/train/, OUT/eval/   columns of training, as `save_to_disk` writes them

The data set carries a record of how it was made. Preparation compares the record with the run, and
then leaves the documents as they are.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow as pa
from datasets import (
    Dataset,
    DatasetInfo,
    Features,
    IterableDataset,
    Json,
    List,
    load_dataset,
    load_from_disk,
)
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
    return read_rows(data, split, config, cache_dir=cache_dir)


def read_rows(data: str, split: str | None, config: str | None = None, **options: Any) -> Any:
    """Return the rows of files, a folder or a hub id; `options` are those of `load_dataset`.

    Raises:
        ValueError: they do not exist, cannot be read, or are empty.
    """
    path = Path(data).expanduser()
    loader = LOADERS.get(path.suffix)
    if loader is not None:
        options = options | {"data_files": str(path)}
    elif path.is_dir():
        loader = str(path)
    elif path.is_file() or data.startswith((".", "/", "~")) or data.count("/") > 1:
        raise ValueError(f"{path} is no folder and no file that ends in {', '.join(LOADERS)}")
    name = None if loader is not None else config

    def load(**more: Any) -> Any:
        try:
            rows = load_dataset(loader or data, name, split=split, **options, **more)
            if next(iter(rows), None) is None:
                raise ValueError("it is empty")
            return rows
        except Exception as error:  # empty files raise StopIteration (5.2)
            words = str(error.__cause__ or error).split()
            reason = " ".join(words).rstrip(".") or "it is empty"
            raise ValueError(f"cannot load the data set {data}: {reason}") from error

    try:
        return load()
    except ValueError as error:
        is_in_files = isinstance(error.__cause__, (DatasetGenerationError, ImportError))
        features = features_of_json(path) if is_in_files else None  # refuses a broken line
        if features is None:
            raise
    return load(features=features, parse_agent_traces=False)


def features_of_json(path: Path) -> Features | None:
    """Return features that hold every row of JSON files, of which `datasets` reads the first 10 MB.

    None without such files. Messages keep the keys that they have.

    Raises:
        ValueError: a line is no JSON, or a column has values of several types.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*.json*"))
    samples: dict[str, dict[Any, Any]] = {}  # of each column, by type
    for file in files:
        rows = _rows_of_json(file) if LOADERS.get(file.suffix) == "json" else ()
        for row in rows:
            for name, value in row.items() if isinstance(row, dict) else ():
                samples.setdefault(name, {})[_kind_of(value)] = value
    features: dict[str, Any] = {}
    for name, by_kind in samples.items():
        kinds = by_kind.keys() - {"null", "empty list"}
        if len(kinds) > 1 and not (kinds <= {"int", "float"} or kinds <= {"ints", "floats"}):
            several = ", ".join(sorted(kinds))
            raise ValueError(
                f"the column {name!r} of {path} has values of several types ({several}); write one"
            )
        if kinds <= {"object", "objects"} and kinds:
            features[name] = Json() if kinds == {"object"} else List(Json())
            continue
        schema = pa.schema([(name, pa.infer_type([*by_kind.values()]))])
        features |= Features.from_arrow_schema(schema)
    return Features(features) if features else None


def _kind_of(value: Any) -> str:
    """Return the type of a value in JSON; a list has that of its first value."""
    if isinstance(value, list):
        return f"{_kind_of(value[0])}s" if value else "empty list"
    names = {dict: "object", str: "text", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _rows_of_json(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file: one a line, or a list."""
    number = 1  # of the first line that is parsed at once
    with file.open(encoding="utf-8-sig") as opened:
        is_list = opened.read(1) == "["
        opened.seek(0)
        try:
            if is_list:
                yield from json.load(opened)
            for number, line in enumerate(opened, 1):  # noqa: B007
                if line.strip():
                    yield json.loads(line.strip())
        except json.JSONDecodeError as error:
            raise ValueError(
                f"line {number + error.lineno - 1} of {file} is no JSON: {error.msg} (column "
                f"{error.colno}); mend or remove it"
            ) from error


def _manifest_in(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder, an empty one if there is none."""
    with suppress(OSError, ValueError):
        return json.loads((Path(folder).expanduser() / MANIFEST).read_text("utf-8"))
    return {}


def is_prepared(path: str | Path) -> bool:
    """Return whether `path` is a folder of prepared data."""
    return FORMAT_KEY in _manifest_in(path)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder of prepared data; ValueError without one of this version."""
    manifest = _manifest_in(folder)
    if FORMAT_KEY not in manifest:
        raise ValueError(f"{folder} holds no prepared data: it has no {MANIFEST}")
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
