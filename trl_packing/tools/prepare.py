"""`prepare_run`: the documents of a run, written once, for any number of runs.

The documents are those that the trainer would make, by the trainer's own code. They are written
beside the folder, which gets its name when everything is there.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from datasets import Dataset

from trl_packing.data.bad_rows import check_not_empty
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.files import FORMAT, FORMAT_KEY, MANIFEST, folder_of, records_of
from trl_packing.data.messages import has_flags
from trl_packing.data.printable import escape_hidden
from trl_packing.data.rules import settings_of
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    IMAGE_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    document_columns,
    token_columns,
)
from trl_packing.run.run import Run, TrainerCall
from trl_packing.tools.preview import run_of_call

_PACKAGES = ("trl_packing", "trl", "transformers", "tokenizers", "datasets")


def prepare_run(
    call: TrainerCall, out: Path, *, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the sets of a trainer into the folder `out`, which does not exist or is empty.

    Returns the manifest, its folder, and the seconds that it took. `options` are those of a
    recipe's command line, which the recipe compares later.

    Raises:
        ValueError: the data cannot be prepared, or `out` cannot be written.
    """
    started = perf_counter()
    check_place(out)
    place = out.resolve()  # a link stays one
    sets = _sets_of(call)
    run = run_of_call(call)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{place.name}.", dir=place.parent) as beside:
            result = Path(beside) / "result"
            written = {name: _write_set(name, rows, run, result) for name, rows in sets.items()}
            manifest = {
                FORMAT_KEY: FORMAT,
                "versions": {package: version(package) for package in _PACKAGES},
                "tokenizer": run.rules.row_format.chat.tokenizer.name_or_path,
                "options": dict(options or {}),
                "sets": written,
            }
            (result / MANIFEST).write_text(
                json.dumps(manifest, indent=1, default=str), encoding="utf-8"
            )
            size = sum(file.stat().st_size for file in result.rglob("*.arrow"))
            os.rename(result, place)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    return {
        "folder": str(out),
        "bytes": size,
        "seconds": perf_counter() - started,
        **manifest,
    }


def check_place(out: Path) -> None:
    """Raise ValueError if `out` cannot become a folder of prepared data."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out} is there already; name a new folder for the prepared data")


def _sets_of(call: TrainerCall) -> dict[str, Dataset]:
    """Return the data sets by name: "train", and "eval" or the keys of a dictionary."""
    args, evaluated = call.args, call.eval_dataset
    if isinstance(call.train_dataset, dict):
        raise ValueError("the data sets of a mixture are prepared one by one; name one of them")
    if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        raise ValueError("skip_prepare_dataset=True leaves nothing to prepare; leave it out")
    if getattr(args, "assistant_only_loss", False):
        raise ValueError("assistant_only_loss=True needs conversations; set train_on='assistant'")
    if not isinstance(evaluated, dict):
        evaluated = {} if evaluated is None else {"eval": evaluated}
    if "train" in evaluated:
        raise ValueError("an evaluation set is called 'train'; give it another name")
    sets = {"train": call.train_dataset, **evaluated}
    for name, rows in sets.items():
        if not isinstance(rows, Dataset) or {*IMAGE_COLUMNS} & {*rows.column_names}:
            raise ValueError(f"the {name} dataset is a stream or has images: it cannot be prepared")
        check_not_empty(rows, name)
        if records_of(rows):
            raise ValueError(f"the {name} dataset is prepared already; train it as it is")
    return sets


def _write_set(name: str, rows: Dataset, run: Run, result: Path) -> dict[str, Any]:
    """Prepare one set, write it into `result`, and return its entry of the manifest."""
    rules = run.rules
    flagged = has_flags(rows, rows[0])
    settings = settings_of(rules, flagged=flagged)
    # The training set decides for all sets whether prompts are trained, as in TRL.
    settings["completion_only_loss"] = rules.row_format.completion_only
    documents, counts = run.prepare(rows, name)
    assert isinstance(documents, Dataset)
    present = documents.column_names
    named = document_columns(present, run.options.named_columns())
    packed = [SEQ_LENGTHS] if SEQ_LENGTHS in present else []
    kept = [*token_columns(present), *named, *packed]
    documents.select_columns(kept).save_to_disk(result / folder_of(name))
    tokens = ArrowDocuments(documents, [*TOKEN_COLUMNS, *packed])
    trained = tokens.num_trained()
    drops = counts is None or any(stage.is_untrained for stage in counts.stages)
    if not drops and trained.all() and not run.args.shuffle_dataset:
        # Runs with and without packing differ in the documents that they drop for having nothing
        # to train, and they shuffle before or after that.
        del settings["packing"]
    return {
        "hash": documents._fingerprint,  # tells data sets apart whose numbers are equal
        "split": None if rows.split is None else str(rows.split),
        "rows": len(rows),
        "stored_rows": len(documents),
        "documents": tokens.num_documents,
        "tokens": int(tokens.lengths().sum()),
        "trained": int(trained.sum()),
        "settings": settings,
        "flagged": flagged,
        "counts": None if counts is None else asdict(counts),
    }


def as_text(made: Mapping[str, Any]) -> str:
    """Return the lines to print.

    train        7,473 rows → 7,473 documents · 1,600,284 tokens · 1,020,118 trained (64%)
    written      prepared · 6.4 MB · 3 s
    train with   --dataset_name prepared and the same settings; others are refused
    """
    lines = []
    for name, stored in made["sets"].items():
        rows = quantity(stored["rows"], "row")
        documents = quantity(stored["documents"], "document")
        tokens, trained = stored["tokens"], stored["trained"]
        line = (
            f"{rows} → {documents} · {tokens:,} tokens · "
            f"{trained:,} trained ({trained / max(tokens, 1):.0%})"
        )
        lines.append((name, line))
        if stored["counts"] is not None:
            sentences = str(PreparationCounts.from_json(stored["counts"])).splitlines()
            lines += [("", sentence) for sentence in sentences]
    folder = made["folder"]
    written = f"{folder} · {made['bytes'] / 1e6:,.1f} MB · {made['seconds']:,.0f} s"
    how = f"--dataset_name {folder} and the same settings; others are refused"
    lines += [("written", written), ("train with", how)]
    return "\n".join(escape_hidden(f"{name:<12} {text}") for name, text in lines)
