"""Two preparations of the same rows, compared token by token and label by label.

`trl-packing inspect --against` prepares rows once more, and compares the documents of each row:

    trl                TRL's own preparation, with the same settings
    template.jinja     the same run with this chat template
    run.yaml           the run of that file

The first token of a document is never a target, so its label is not compared.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from difflib import unified_diff
from itertools import groupby, pairwise, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden, escape_text
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import DOCUMENT_WEIGHT, IGNORE_INDEX, TOKEN_COLUMNS, TOKEN_WEIGHTS
from trl_packing.documents.weights import document_weight, token_weights
from trl_packing.tools.preview.previewed_run import PreviewedRun, numbers_of
from trl_packing.tools.preview.show import mark_trained, token_texts
from trl_packing.tools.training_command import TrainingCommand

EQUAL, DROPPED_BY_BOTH = "equal", "dropped by both"
DROPPED, TOKENS, LABELS = "dropped by one", "tokens differ", "labels differ"
WEIGHTS = "weights differ"
DIFFERENCES = (DROPPED, TOKENS, LABELS, WEIGHTS)

_EXAMPLES = 3  # differences of each kind that are kept
_BEFORE, _AFTER = 12, 60  # tokens shown before the first one that differs, and from there on

# The settings of TRL on which tokens and labels depend. The tokenizer of the run has its EOS and
# padding tokens and its chat template already.
_SETTINGS = (
    *("assistant_only_loss", "completion_only_loss", "dataset_kwargs", "dataset_num_proc"),
    *("dataset_text_field", "max_length", "truncation_mode"),
)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The documents that one preparation makes of one row, laid end to end.

    Attributes:
        ids: ``(T,)`` int64.
        labels: `IGNORE_INDEX` on the first token of each document, ``(T,)`` int64.
        weights: of each token in the loss, 0 if it is not trained, ``(T,)`` float64.
        lengths: of the documents; none if the row is dropped.
    """

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    lengths: tuple[int, ...]


def _laid_out(documents: Sequence[dict[str, Any]]) -> Tokens:
    """Return the documents of a row, of which `DOCUMENT_WEIGHT` is a column."""
    none = np.zeros(0, np.int64)
    ids = np.concatenate([none, *(document["input_ids"] for document in documents)])
    labels = np.concatenate([none, *(document["labels"] for document in documents)])
    lengths = tuple(len(document["input_ids"]) for document in documents)
    labels[np.cumsum((0, *lengths))[:-1]] = IGNORE_INDEX
    weights = [
        token_weights(document, length) * document_weight(document)
        for document, length in zip(documents, lengths, strict=True)
    ]
    weighted = np.where(labels == IGNORE_INDEX, 0.0, np.concatenate([none, *weights]))
    return Tokens(ids, labels, weighted, lengths)


class Side(NamedTuple):
    """One of the two preparations: its name, rows and settings, and whether TRL prepares them."""

    name: str
    run: PreviewedRun
    by_trl: bool = False

    def rows(self) -> Iterator[Tokens]:
        """Yield the documents of each row of the data set."""
        run = self.run.with_row_numbers().with_settings(shuffle_dataset=False)
        if any(is_packed(rows) for rows in run.sets.values()):
            raise ValueError("the rows are packed already (they have seq_lengths)")
        dataset = documents_by_trl(run) if self.by_trl else run.documents()[0]
        columns, scalars = [*TOKEN_COLUMNS], {}
        if not self.by_trl:  # TRL knows no weights
            columns.append(TOKEN_WEIGHTS)
            if DOCUMENT_WEIGHT in dataset.column_names:
                scalars[DOCUMENT_WEIGHT] = dataset.with_format("numpy")[DOCUMENT_WEIGHT][:]
        present = [name for name in columns if name in dataset.column_names]
        documents, numbers = ArrowDocuments(dataset, present, scalars), numbers_of(dataset)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(run.num_rows + 1))
        for start, stop in pairwise(bounds.tolist()):
            yield _laid_out(documents.__getitems__(order[start:stop].tolist()))


def documents_by_trl(run: PreviewedRun) -> Dataset:
    """Return the documents of `run` as TRL prepares them with packing=False, and all columns.

    Settings that TRL does not have (`train_on`, `overflow`, templates, ...) have no effect.
    """
    if isinstance(run.dataset, dict) or run.images.packs:
        raise ValueError("TRL prepares one data set without images; compare data sets one by one")
    tokenizer = run.preparation.processing_class
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vocabulary = len(getattr(tokenizer, "tokenizer", tokenizer))
    config = LlamaConfig(vocab_size=vocabulary, num_attention_heads=1, **sizes)
    settings: Any = {name: getattr(run.args, name) for name in _SETTINGS}
    settings |= {"packing": False, "use_cpu": True, "bf16": False, "report_to": "none"}
    # DeepSpeed, which accelerate imports, prints to stdout, where a command's JSON goes.
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        try:
            trainer = SFTTrainer(
                LlamaForCausalLM(config),
                SFTConfig(folder, **settings),
                train_dataset=run.dataset,
                processing_class=tokenizer,
                formatting_func=run.call.formatting_func,
            )
        except Exception as error:  # a template or TRL may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"TRL cannot prepare these rows: {reason}") from error
    return trainer.train_dataset


def check_against(against: str) -> None:
    """Raise ValueError if `against` is neither ``"trl"`` nor a template or a .yaml file."""
    is_known = against.endswith((".jinja", ".j2", ".yaml", ".yml")) and Path(against).is_file()
    if against != "trl" and not is_known:
        raise ValueError(f"--against {against} is neither trl nor a .jinja or .yaml file; name one")


def other_side(against: str, run: PreviewedRun, words: Sequence[str]) -> Side:
    """Return the preparation that `against` names, compared with `run` of the command `words`."""
    if against == "trl":
        return Side("TRL", run, by_trl=True)
    name = Path(against).name
    if name.endswith((".jinja", ".j2")):
        args, tokenizer = copy.copy(run.args), run.preparation.processing_class
        args.chat_template_path = against
        given = {"train_dataset": run.dataset, "processing_class": tokenizer}
        call = replace(run.call, args=args, **given)
    else:
        script = takewhile(lambda word: not word.startswith("--"), words)
        call = TrainingCommand.from_words([*script, "--config", against]).call
    return Side(name, PreviewedRun.from_call(call))


# --- the comparison -------------------------------------------------------------------------------


def compare(first: Side, second: Side) -> dict[str, Any]:
    """Compare two preparations of the same rows.

    `counts` are rows by kind: equal, dropped by both, or one of `DIFFERENCES`. `differences` are
    the first rows of each kind, with the `Tokens` of both sides as lists.

    Raises:
        ValueError: the sides have different rows, or one of them cannot be prepared.
    """
    rows, others = first.run.num_rows, second.run.num_rows
    if rows != others:
        raise ValueError(f"{first.name} has {rows:,} rows and {second.name} has {others:,}")
    counts = dict.fromkeys((EQUAL, DROPPED_BY_BOTH, *DIFFERENCES), 0)
    totals, differences = np.zeros((3, 2), np.int64), []
    for row, sides in enumerate(zip(first.rows(), second.rows(), strict=True)):
        for number, side in enumerate(sides):
            trained = int((side.labels != IGNORE_INDEX).sum())
            totals[:, number] += (len(side.lengths), len(side.ids), trained)
        kind, at = _difference(*sides)
        counts[kind] += 1
        if kind in DIFFERENCES and counts[kind] <= _EXAMPLES:
            shown = [{k: np.asarray(x).tolist() for k, x in vars(side).items()} for side in sides]
            differences.append({"row": row, "kind": kind, "first_token": at, "sides": shown})
    documents, tokens, trained_tokens = totals.tolist()
    return {
        "names": (first.name, second.name),
        "is_equal": not any(counts[kind] for kind in DIFFERENCES),
        "rows": rows,
        "counts": counts,
        "documents": documents,
        "tokens": tokens,
        "trained_tokens": trained_tokens,
        "differences": differences,
    }


def _difference(a: Tokens, b: Tokens) -> tuple[str, int]:
    """Return how the documents of one row differ, and from which token on."""
    number = min(len(a.ids), len(b.ids))
    for kind, name in ((TOKENS, "ids"), (LABELS, "labels"), (WEIGHTS, "weights")):
        differs = getattr(a, name)[:number] != getattr(b, name)[:number]
        differs = np.append(differs, a.lengths != b.lengths)
        if differs.any():
            is_dropped = bool(a.lengths) != bool(b.lengths)
            return DROPPED if is_dropped else kind, int(np.argmax(differs))
    return EQUAL if a.lengths else DROPPED_BY_BOTH, 0


# --- text -----------------------------------------------------------------------------------------


def comparison_text(comparison: dict[str, Any], tokenizers: Sequence[Any]) -> str:
    """Return the counts and the first differences, as lines of both that differ.

    row 12 · labels differ from token 9 on
    --- here
    +++ trl
     <|im_start|>assistant
    -⟦Hello.<|im_end|>⟧
    +⟦Hello.<|im_end|>
    +⟧
    """
    names, counts = [escape_hidden(name) for name in comparison["names"]], comparison["counts"]
    lines = [f"{'':16}{names[0][:20]:>20}{names[1][:20]:>20}"]
    for name in ("documents", "tokens", "trained tokens"):
        first, second = comparison[name.replace(" ", "_")]
        lines.append(f"{name:16}{first:>20,}{second:>20,}")
    for kind, number in counts.items():
        if number or kind == EQUAL:
            lines.append("\n" * (kind == EQUAL) + f"{kind:16}{quantity(number, 'row'):>20}")
    verdict = "Both preparations make the same documents: tokens, labels and weights."
    if not comparison["is_equal"]:
        different, rows = (
            sum(counts[kind] for kind in DIFFERENCES),
            quantity(comparison["rows"], "row"),
        )
        verdict = f"The preparations differ in {different:,} of {rows}."
    shown = [_lines_that_differ(d, names, tokenizers) for d in comparison["differences"]]
    return "\n\n".join(["\n".join(lines), verdict, *shown])


def _lines_that_differ(
    difference: dict[str, Any], names: Sequence[str], tokenizers: Sequence[Any]
) -> str:
    sides, at = difference["sides"], difference["first_token"]
    texts = [_texts(side, each) for side, each in zip(sides, tokenizers, strict=True)]
    first, second = (_lines(*both, at) for both in zip(texts, sides, strict=True))
    if first == second:  # other tokens of the same text
        first, second = (_token_lines(*both, at) for both in zip(texts, sides, strict=True))
    compared = unified_diff(first, second, names[0], names[1], n=len(first), lineterm="")
    where = f" from token {at:,} on" * all(side["lengths"] for side in sides)
    lines = [line for line in compared if not line.startswith("@@")]
    return "\n".join([f"row {difference['row']:,} · {difference['kind']}{where}", *lines])


def _texts(side: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return the text of each token; documents begin on a line of their own."""
    texts: list[str] = []
    for length in side["lengths"]:
        found = token_texts(side["ids"][len(texts) : len(texts) + length], tokenizer)
        texts += ["\n── next document ──\n" * bool(texts) + found[0], *found[1:]]
    return texts


def _lines(texts: Sequence[str], side: dict[str, Any], at: int) -> list[str]:
    """Return the text around token `at` in lines, its trained stretches marked."""
    if not texts:
        return ["(dropped)"]
    start, stop = max(at - _BEFORE, 0), min(at + _AFTER, len(texts))
    weighted = zip(side["weights"][start:stop], texts[start:stop], strict=True)
    stretches = groupby(weighted, key=lambda token: token[0])
    text = mark_trained([(w, "".join(t for _, t in tokens)) for w, tokens in stretches])
    return f"{'… ' * (start > 0)}{text}{' …' * (stop < len(texts))}".split("\n")


def _token_lines(texts: Sequence[str], side: dict[str, Any], at: int) -> list[str]:
    """Return a line for each token around `at`: its id, its weight, its text."""
    every = zip(side["ids"], side["weights"], map(escape_text, texts), strict=True)
    shown = [*every][max(at - _BEFORE, 0) : at + _AFTER]
    return [f"{token:>8} {weight:>6g} {text!r}" for token, weight, text in shown]
