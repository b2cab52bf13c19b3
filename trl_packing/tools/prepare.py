"""`prepare_run`: the documents of a run, written once, for any number of runs.

call = TrainerCall(model, PackedSFTConfig(max_length=2048), train_dataset=rows)
made = prepare_run(call, Path("prepared"))
print(as_text(made))                            what was kept, lost and written
load_prepared("prepared")                       the data set for the trainer

The documents are those that the trainer would make, by the trainer's own code. They are written
beside the folder, which gets its name when everything is there.
"""

import copy
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from shutil import get_terminal_size
from tempfile import TemporaryDirectory
from textwrap import fill
from time import perf_counter
from typing import Any

import pyarrow as pa
import yaml
from datasets import Dataset
from datasets.fingerprint import Hasher

from trl_packing.config import PackingOptions
from trl_packing.data.checks import check_not_empty
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.prepared import (
    FORMAT,
    FORMAT_KEY,
    MANIFEST,
    folder_of,
    is_prepared,
    read_manifest,
    records_of,
)
from trl_packing.data.printable import escape_hidden
from trl_packing.data.rules import DocumentRules, RowFacts
from trl_packing.data.stages import prepare
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    IMAGE_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    document_columns,
    token_columns,
)
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import TrainerCall

_PACKAGES = ("trl_packing", "trl", "transformers", "tokenizers", "datasets")
_ROWS_AT_ONCE = 10_000  # that are hashed


def prepare_run(
    call: TrainerCall, out: Path, *, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write the training and evaluation sets of a trainer into the folder `out`.

    Args:
        call: the arguments of the trainer.
        out: does not exist, is empty, or holds the same data already.
        options: those of a recipe's command line, which the recipe compares later.

    Returns:
        The manifest, with the folder and the seconds that it took, None if it was there before.

    Raises:
        ValueError: the data cannot be prepared, or `out` cannot be written.
    """
    started = perf_counter()
    check_place(out)
    sets = _sets_of(call)
    run = PreviewedRun.from_call(call)
    hashes = {name: _hash_of(rows, call.formatting_func) for name, rows in sets.items()}
    if is_prepared(out):
        return {"folder": str(out), "seconds": None, **_same(out, run, hashes)}
    facts = RowFacts.of(sets["train"], run.preparation, run.formatting_func)
    place = out.resolve()  # a link stays one
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{place.name}.", dir=place.parent) as beside:
            result = Path(beside) / "result"
            manifest = {
                FORMAT_KEY: FORMAT,
                "versions": {package: version(package) for package in _PACKAGES},
                "tokenizer": run.preparation.row_format.chat.tokenizer.name_or_path,
                "options": dict(options or {}),
                "sets": {
                    name: _write_set(name, rows, run, facts, result) | {"hash": hashes[name]}
                    for name, rows in sets.items()
                },
            }
            text = json.dumps(manifest, indent=1, default=str)
            (result / MANIFEST).write_text(text, encoding="utf-8")
            os.rename(result, place)
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    return {"folder": str(out), "seconds": perf_counter() - started, **manifest}


def prepare_sources(
    call: TrainerCall, out: Path, *, options: Mapping[str, Any] | None = None
) -> dict[str, dict[str, Any]]:
    """Write each source of a mixture into a folder of its own in `out`, as for a run on it alone.

    Args:
        call: the arguments of the trainer, with a dictionary as training set.
        out: holds nothing, or folders of these sources.
        options: those of a recipe's command line.

    Returns:
        The manifests, by source, as `prepare_run` returns them.

    Raises:
        ValueError: a source cannot be prepared, naming it; those before it are complete.
    """
    if out.is_file() or is_prepared(out):
        found = "is a file" if out.is_file() else "holds other prepared data"
        raise ValueError(f"{out} {found}; name a new folder for the sources")
    if call.eval_dataset is not None:
        raise ValueError(
            "the sources of a mixture are prepared for training, and this run also has rows to "
            "evaluate: leave out test_split_size and eval_strategy, or the eval_dataset"
        )
    args = copy.copy(call.args)
    for setting in ("mixture", "mixture_unit", "mixture_temperature"):
        setattr(args, setting, getattr(PackingOptions, setting))
    made = {}
    for name, rows in call.train_dataset.items():
        alone = replace(call, args=args, train_dataset=rows)
        try:
            made[name] = prepare_run(alone, out / folder_of(name), options=options)
        except ValueError as error:
            raise ValueError(f"the source {name!r}: {error}") from error
    return made


def check_place(out: Path) -> None:
    """Raise ValueError if `out` cannot become a folder of prepared data."""
    if out.is_file():
        raise ValueError(f"{out} is a file; name a folder for the prepared data: DATA OUT")
    if out.is_dir() and any(out.iterdir()) and not is_prepared(out):
        raise ValueError(f"{out} holds other files; name a new folder for the prepared data")


def _sets_of(call: TrainerCall) -> dict[str, Dataset]:
    """Return the data sets by name: "train", and "eval" or the keys of a dictionary."""
    args, evaluated = call.args, call.eval_dataset
    if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        raise ValueError("skip_prepare_dataset=True leaves nothing to prepare; leave it out")
    if getattr(args, "assistant_only_loss", False):
        raise ValueError(
            "assistant_only_loss=True needs conversations when training starts, and prepared data "
            "are tokens; set train_on='assistant', which trains the same turns by any template"
        )
    if not isinstance(evaluated, dict):
        evaluated = {} if evaluated is None else {"eval": evaluated}
    if "train" in evaluated:
        raise ValueError("an evaluation set is called 'train'; give it another name")
    sets = {"train": call.train_dataset, **evaluated}
    for name, rows in sets.items():
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"the {name} dataset is {type(rows).__name__}, which cannot be prepared: only data "
                "sets of known length are; load it without streaming, or prepare each of a "
                "dictionary by itself"
            )
        check_not_empty(rows, name)
        if records_of(rows):
            raise ValueError(f"the {name} dataset is prepared already; train it as it is")
        if {*IMAGE_COLUMNS} & {*rows.column_names}:
            raise ValueError(
                f"the {name} dataset has images, which are loaded while it is trained; it cannot "
                "be prepared"
            )
    return sets


def _same(out: Path, run: PreviewedRun, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest of prepared data if this preparation would make the same.

    Raises:
        ValueError: it would make others.
    """
    manifest = read_manifest(out)
    rules = DocumentRules.from_json(manifest["sets"]["train"]["rules"])
    differences = [*rules.differences(run.preparation)]
    if {name: stored["hash"] for name, stored in manifest["sets"].items()} != hashes:
        differences.append("of other rows")
    if differences:
        raise ValueError(
            f"{out} holds other prepared data ({'; '.join(differences)}); name a new folder, or "
            "delete it"
        )
    return manifest


def _write_set(
    name: str, rows: Dataset, run: PreviewedRun, train: RowFacts, result: Path
) -> dict[str, Any]:
    """Prepare one set, write it into `result`, and return its entry of the manifest."""
    facts = RowFacts.of(rows, run.preparation, run.formatting_func)
    # The training set decides for all sets whether prompts are trained, as in TRL.
    facts = replace(facts, are_completions=train.are_completions)
    rules = DocumentRules.of(run.preparation, facts)
    documents, counts = prepare(
        rows, run.preparation, formatting_func=run.formatting_func, name=name
    )
    assert isinstance(documents, Dataset)
    packed = [SEQ_LENGTHS] if SEQ_LENGTHS in documents.column_names else []
    named = PackingOptions.of(run.args).named_columns()
    present = documents.column_names
    kept = [*token_columns(present), *document_columns(present, named), *packed]
    documents.select_columns(kept).save_to_disk(result / folder_of(name))
    tokens = ArrowDocuments(documents, [*TOKEN_COLUMNS, *packed])
    trained = tokens.num_trained()
    drops = counts is None or any("trained token" in stage.why for stage in counts.stages)
    if not drops and trained.all() and not run.args.shuffle_dataset:
        # Runs with and without packing differ in the documents that they drop for having nothing
        # to train, and they shuffle before or after that.
        rules = rules.for_any_packing()
    return {
        "split": None if rows.split is None else str(rows.split),
        "rows": len(rows),
        "stored_rows": len(documents),
        "documents": tokens.num_documents,
        "tokens": int(tokens.lengths().sum()),
        "trained": int(trained.sum()),
        "rules": asdict(rules),
        "counts": None if counts is None else asdict(counts),
    }


def _hash_of(rows: Dataset, formatting_func: Any) -> str:
    """Return a hash of the columns and values of `rows`, wherever they are stored."""
    digest = hashlib.blake2b(repr(rows.features).encode(), digest_size=16)
    for table in rows.with_format("arrow").iter(_ROWS_AT_ONCE):
        # A copy: slices are stored with other offsets and null bits than whole columns.
        whole = table.take(pa.array(range(len(table)))).combine_chunks()
        for batch in whole.to_batches():
            digest.update(batch.serialize())
    function = "" if formatting_func is None else Hasher.hash(formatting_func)
    return digest.hexdigest() + function


# --- text -----------------------------------------------------------------------------------------


def as_text(made: Mapping[str, Any]) -> str:
    """Return the lines to print.

    train        7,473 rows → 7,473 documents · 1,600,284 tokens · 1,020,118 trained (64%)
    written      prepared · 6.4 MB · 3 s
    train with   --dataset_name prepared and the same settings; others are refused
    """
    name = f"--dataset_name {made['folder']}"
    last = _line("train with", f"{name} and the same settings; others are refused")
    return "\n".join([*_lines(made), last])


def sources_as_text(made: Mapping[str, Mapping[str, Any]], mixture: Any) -> str:
    """Return the lines to print for the sources of a mixture, with the entries that name them.

    Args:
        made: the manifests, by source.
        mixture: the setting, whose shares become those of the entries.
    """
    lines = [line for name, each in made.items() for line in _lines(each, name)]
    shares = mixture if isinstance(mixture, dict) else {}
    entries = [
        {"path": each["folder"], "source": name, **shares.get(name, {})}
        for name, each in made.items()
    ]
    lines.append(_line("train with", "the same settings and, in place of the entries before:"))
    text = yaml.safe_dump({"datasets": entries}, sort_keys=False, allow_unicode=True)
    return "\n".join(lines) + f"\n\n{text.rstrip()}"


def _lines(made: Mapping[str, Any], source: str | None = None) -> Iterator[str]:
    for name, stored in made["sets"].items():
        share = stored["trained"] / stored["tokens"] if stored["tokens"] else 0
        yield _line(
            source or name,
            f"{quantity(stored['rows'], 'row')} → {quantity(stored['documents'], 'document')} · "
            f"{stored['tokens']:,} tokens · {stored['trained']:,} trained ({share:.0%})",
        )
        if stored["counts"] is not None:
            for sentence in str(PreparationCounts.from_json(stored["counts"])).splitlines():
                yield _line("", sentence)
    size = sum(file.stat().st_size for file in Path(made["folder"]).rglob("*.arrow"))
    where = f"{made['folder']} · {size / 1e6:,.1f} MB"
    if made["seconds"] is None:
        yield _line("unchanged", f"{where}, of the same rows and settings")
    else:
        yield _line("written", f"{where} · {made['seconds']:,.0f} s")


def _line(name: str, text: str) -> str:
    width = min(get_terminal_size((80, 24)).columns, 100)
    start = f"{escape_hidden(name):<12} "
    indent: Any = {"initial_indent": start, "subsequent_indent": " " * 13}
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    return fill(escape_hidden(text), width, **indent, **whole)
