"""`inspect --against`: two preparations of the same rows, compared token by token."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from difflib import unified_diff
from itertools import islice, pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_COLUMNS, TOKEN_WEIGHTS, Document
from trl_packing.documents.weights import document_weight, token_weights
from trl_packing.pages.show import show_document
from trl_packing.run.run import Run
from trl_packing.run.sources import documents_of
from trl_packing.tools.preview import ROW, numbers_of, run_of_call, with_row_numbers
from trl_packing.tools.training_command import TrainingCommand

EQUAL, DROPPED = "equal", "dropped by one"
# Columns by the kind of difference, from the one that decides first.
COLUMNS = {"tokens differ": "input_ids", "labels differ": "labels", "weights differ": TOKEN_WEIGHTS}
_EXAMPLES, _MOST_LINES = 3, 24  # rows of each kind that are shown, and lines of each

# The settings of TRL on which tokens and labels depend. The tokenizer of the run has its EOS and
# padding tokens and its chat template already.
_SETTINGS = (
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_kwargs",
    "dataset_num_proc",
    "dataset_text_field",
    "max_length",
    "truncation_mode",
)


class Side(NamedTuple):
    """One of the two preparations: its name, rows and settings, and whether TRL prepares them."""

    name: str
    run: Run
    by_trl: bool = False

    def rows(self) -> Iterator[Sequence[Document]]:
        """Yield the documents of each row of the data set, with the weights of their tokens.

        These are 0 on tokens that are not trained, as the first of a document.
        """
        run = with_row_numbers(self.run).with_settings(shuffle_dataset=False)
        dataset = documents_by_trl(run) if self.by_trl else run.documents()[0]
        documents = documents_of(dataset, None)
        numbers = numbers_of(dataset)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(run.num_rows + 1))
        for start, stop in pairwise(bounds.tolist()):
            found = []
            for document in documents.__getitems__(order[start:stop]):
                labels = np.array(document["labels"])
                labels[:1] = IGNORE_INDEX
                weights = token_weights(document, len(labels)) * document_weight(document)
                weights = np.where(labels == IGNORE_INDEX, 0, weights)
                found.append(
                    {
                        "input_ids": document["input_ids"],
                        "labels": labels,
                        TOKEN_WEIGHTS: weights,
                    }
                )
            yield found


def documents_by_trl(run: Run) -> Dataset:
    """Return the documents of `run`, with row numbers, as TRL prepares them with packing=False.

    Weights and settings that TRL does not have (`train_on`, `overflow`, ...) have no effect.
    """
    if isinstance(run.dataset, dict) or run.images.packs:
        raise ValueError("TRL prepares one data set without images; compare data sets one by one")
    config = LlamaConfig(
        vocab_size=len(run.rules.eos.tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    settings = {name: getattr(run.args, name) for name in _SETTINGS}
    # DeepSpeed, which accelerate imports, prints to stdout, where a command's JSON goes.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        trainer = SFTTrainer(
            LlamaForCausalLM(config),
            SFTConfig(
                folder, packing=False, use_cpu=True, bf16=False, report_to="none", **settings
            ),
            train_dataset=run.dataset,
            processing_class=run.rules.processing_class,
            formatting_func=run.call.formatting_func,
        )
    return trainer.train_dataset.select_columns([*TOKEN_COLUMNS, ROW])


def other_side(against: str, run: Run, words: Sequence[str]) -> Side:
    """Return the preparation that `against` names, compared with `run` of the command `words`."""
    if against == "trl":
        return Side("TRL", run, by_trl=True)
    script = takewhile(lambda word: not word.startswith("--"), words)
    call = TrainingCommand.from_words([*script, "--config", against]).call
    return Side(Path(against).name, run_of_call(call))


def compare(first: Side, second: Side) -> dict[str, Any]:
    """Compare two preparations of the same rows, and return plain values for JSON.

    `counts` are rows by kind. `differences` are the first rows of each kind other than equal, with
    the lines in which their documents differ.

    Raises:
        ValueError: the sides have different rows, or one of them cannot be prepared.
    """
    rows = first.run.num_rows
    others = second.run.num_rows
    if rows != others:
        raise ValueError(f"{first.name} has {rows:,} rows and {second.name} has {others:,}")
    counts = dict.fromkeys((EQUAL, DROPPED, *COLUMNS), 0)
    differences = []
    for row, both in enumerate(zip(first.rows(), second.rows(), strict=True)):
        kind = _kind(*both)
        counts[kind] += 1
        if kind != EQUAL and counts[kind] <= _EXAMPLES:
            lines = _lines_that_differ((first, second), both)
            differences.append({"row": row, "kind": kind, "lines": lines})
    return {"rows": rows, "counts": counts, "differences": differences}


def _kind(ours: Sequence[Document], others: Sequence[Document]) -> str:
    """Return how the documents of one row differ."""
    if bool(ours) != bool(others):
        return DROPPED
    for kind, name in COLUMNS.items():
        pairs = zip(ours, others, strict=False)
        if len(ours) != len(others) or not all(np.array_equal(a[name], b[name]) for a, b in pairs):
            return kind
    return EQUAL


def _lines_that_differ(sides: Sequence[Side], both: Sequence[Sequence[Document]]) -> list[str]:
    """Return lines of text that differ; where the text is equal, of ids."""
    texts, ids = [], []
    for side, documents in zip(sides, both, strict=True):
        tokenizer = side.run.rules.eos.tokenizer
        texts.append("\n".join(show_document(d, tokenizer) for d in documents).split("\n"))
        ids.append([str(d["input_ids"].tolist()) for d in documents])
    lines = texts if texts[0] != texts[1] else ids
    one, other = (escape_hidden(side.name) for side in sides)
    return [*islice(unified_diff(lines[0], lines[1], one, other, lineterm=""), _MOST_LINES)]


def comparison_text(found: dict[str, Any]) -> str:
    """Return the counts, and the first rows that differ as lines of both."""
    lines = [f"{k:16}{quantity(n, 'row'):>12}" for k, n in found["counts"].items() if n]
    for each in found["differences"]:
        lines += ["", f"row {each['row']:,} · {each['kind']}", *each["lines"]]
    return "\n".join(lines)
