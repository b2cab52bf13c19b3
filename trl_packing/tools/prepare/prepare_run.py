"""`prepare_run`: the documents of a run, written once, for any number of runs.

call = TrainerCall(model, PackedSFTConfig(max_length=2048), train_dataset=rows)
made = prepare_run(call, Path("prepared"))
print(made)                                     what was kept, lost and written
load_prepared("prepared")                       the data set for the trainer

The documents are those that the trainer would make, by the trainer's own code.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.fingerprint import Hasher

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.document_rules import DocumentRules, RowFacts
from trl_packing.data.preparation import prepare
from trl_packing.data.prepared import (
    FORMAT,
    FORMAT_KEY,
    MANIFEST,
    check_content,
    is_prepared,
    read_manifest,
)
from trl_packing.data.shards import SHARD_BYTES, write_shards
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, TOKEN_COLUMNS
from trl_packing.formatting.tokenized_parts import (
    ROWS_OF_A_PROCESS,
    TokenizedParts,
    hash_of_rows,
)
from trl_packing.tools.command.trainer_call import TrainerCall
from trl_packing.tools.prepare.run_sets import folder_of, run_and_sets_of, sources_of
from trl_packing.tools.prepare.workplace import Workplace
from trl_packing.tools.preview.previewed_run import PreviewedRun

_PACKAGES = ("trl_packing", "trl", "transformers", "tokenizers", "datasets")

# Text depends on these: parts that others have made are made again.
_MAKERS = ("trl_packing", "transformers", "tokenizers")


@dataclass(frozen=True)
class PreparedRun:
    """A folder of prepared data.

    Attributes:
        folder: its path.
        manifest: its content.
        seconds: that it took; None if the folder was there before.
    """

    folder: Path
    manifest: Mapping[str, Any]
    seconds: float | None


def prepare_run(
    call: TrainerCall,
    out: Path,
    *,
    options: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    rows_of_a_part: int = ROWS_OF_A_PROCESS,
) -> PreparedRun:
    """Write the training and evaluation sets of a trainer into the folder `out`.

    Args:
        call: the arguments of the trainer.
        out: does not exist, is empty, or holds the same data already.
        options: those of a recipe's command line, which the recipe compares later.
        shard_bytes: size of a file.
        rows_of_a_part: rows that a process tokenizes between two places to continue at.

    Raises:
        ValueError: the data cannot be prepared, or `out` cannot be written.
    """
    started, out = perf_counter(), check_place(out)
    run, sets = run_and_sets_of(call)
    facts = RowFacts.of(sets["train"], run.preparation, run.formatting_func)
    rules = {name: _rules_of(run, rows, facts) for name, rows in sets.items()}
    hashes = {name: _hash_of_source(rows, call.formatting_func) for name, rows in sets.items()}
    function = Hasher.hash(call.formatting_func)
    key = _hash([[asdict(each) for each in rules.values()], function, _versions(_MAKERS)])
    work = Workplace(out, key)
    if is_prepared(out) and not work.folder.exists():
        return PreparedRun(out, _same(out, run, hashes), None)
    with work.in_use():
        if is_prepared(out):  # by a command that has ended since, or was killed at its end
            same = PreparedRun(out, _same(out, run, hashes), None)
            work.forget_parts()
            return same
        preparation = replace(run.preparation, parts=TokenizedParts(work.parts, rows_of_a_part))
        run = replace(run, preparation=preparation)
        written = {
            name: _write_set(name, rows, run, rules[name], work.result, shard_bytes)
            | {"data": {"hash": hashes[name], "columns": rows.column_names}}
            for name, rows in sets.items()
        }
        manifest = {
            FORMAT_KEY: FORMAT,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": _versions(_PACKAGES),
            "tokenizer": run.preparation.row_format.chat.tokenizer.name_or_path,
            "options": dict(options or {}),
            "sets": written,
        }
        text = json.dumps(manifest, indent=1, default=str)
        (work.result / MANIFEST).write_text(text, encoding="utf-8")
        work.publish()
    return PreparedRun(out, manifest, perf_counter() - started)


def prepare_sources(
    call: TrainerCall, out: Path, *, options: Mapping[str, Any] | None = None
) -> dict[str, PreparedRun]:
    """Write each source of a mixture into a folder of its own in `out`.

    Args:
        call: the arguments of the trainer, with a dictionary as training set.
        out: holds nothing, or folders of these sources.
        options: those of a recipe's command line.

    Returns:
        What is prepared, by source.

    Raises:
        ValueError: a source cannot be prepared, naming it; those before it are complete.
    """
    if out.is_file() or is_prepared(out):
        found = "is a file" if out.is_file() else "holds other prepared data"
        raise ValueError(f"{out} {found}; name a new folder for the sources")
    calls = sources_of(call)
    folders = {name: check_place(out / folder_of(name)) for name in calls}
    made = {}
    for name, each in calls.items():
        try:
            made[name] = prepare_run(each, folders[name], options=options)
        except ValueError as error:
            raise ValueError(f"the source {name!r}: {error}") from error
    return made


def kept_in(out: Path) -> Path | None:
    """Return the folder with the finished parts, or sources, of an interrupted command."""
    places = (out.with_name(f"{out.name}.partial"), out)
    return next((each for each in places if each.is_dir() and not is_prepared(each)), None)


def check_place(out: Path) -> Path:
    """Return `out`, without links, if it can become a folder of prepared data.

    Raises:
        ValueError: it cannot.
    """
    if out.is_symlink() or out.name in ("", ".."):
        out = out.resolve()
    if out.is_mount():
        raise ValueError(
            f"{out} is a mounted disk and cannot be replaced; name a folder in it: {out / 'data'}"
        )
    if out.is_file():
        raise ValueError(f"{out} is a file; name a folder for the prepared data: DATA OUT")
    if out.is_dir() and any(out.iterdir()) and not is_prepared(out):
        raise ValueError(f"{out} holds other files; name a new folder for the prepared data")
    return out


def _same(out: Path, run: PreviewedRun, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of prepared data if this preparation would make the same.

    Raises:
        ValueError: it would make others, or a file is damaged.
    """
    manifest = read_manifest(out)
    stored = manifest["sets"]
    rules = DocumentRules.from_json(stored["train"]["rules"])
    differences = [*rules.differences(run.preparation)]
    makers = {name: manifest["versions"].get(name) for name in _MAKERS}
    if makers != _versions(_MAKERS):
        differences.append("made by other versions")
    if {name: each["data"]["hash"] for name, each in stored.items()} != hashes:
        differences.append("of other rows")
    if not differences:
        check_content(out, manifest)
        return manifest
    raise ValueError(
        f"{out} holds other prepared data ({'; '.join(differences)}); name a new folder, or "
        "delete it"
    )


def _rules_of(run: PreviewedRun, rows: Dataset, train: RowFacts) -> DocumentRules:
    facts = RowFacts.of(rows, run.preparation, run.formatting_func)
    # The training set decides for all sets whether prompts are trained, as in TRL.
    facts = replace(facts, are_completions=train.are_completions)
    return DocumentRules.of(run.preparation, facts)


def _write_set(
    name: str,
    rows: Dataset,
    run: PreviewedRun,
    rules: DocumentRules,
    result: Path,
    shard_bytes: int,
) -> dict[str, Any]:
    """Prepare one set, write its shards, and return its entry of the manifest."""
    documents, counts = prepare(
        rows, run.preparation, formatting_func=run.formatting_func, name=name
    )
    assert isinstance(documents, Dataset)
    named = PackingOptions.of(run.args).named_columns()
    folder = result / folder_of(name)
    shards = write_shards(documents, folder, named=named, shard_bytes=shard_bytes)
    columns = [*TOKEN_COLUMNS, *([SEQ_LENGTHS] if SEQ_LENGTHS in documents.column_names else [])]
    tokens = ArrowDocuments(documents, columns)
    trained = tokens.num_trained()
    if _fits_any_packing(counts, trained, run):
        rules = rules.for_any_packing()
    return {
        "split": None if rows.split is None else str(rows.split),
        "rows": len(rows),
        "documents": tokens.num_documents,
        "tokens": int(tokens.lengths().sum()),
        "trained": int(trained.sum()),
        "shards": shards,
        "rules": asdict(rules),
        "counts": None if counts is None else asdict(counts),
    }


def _fits_any_packing(
    counts: PreparationCounts | None, trained: np.ndarray, run: PreviewedRun
) -> bool:
    """Return whether runs with and without packing train the same documents in one order.

    They differ in the documents that they drop for having nothing to train, and they shuffle before
    or after that.
    """
    if counts is None or run.args.shuffle_dataset:
        return False
    drops = any("trained token" in stage.why for stage in counts.stages)
    return not drops and bool(trained.all())


def _hash_of_source(rows: Dataset, formatting_func: Any) -> str:
    function = "" if formatting_func is None else Hasher.hash(formatting_func)
    return hash_of_rows(rows) + function


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # pragma: no cover
            found[package] = "?"
    return found


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
