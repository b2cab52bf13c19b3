"""Two preparations of the same rows, compared token by token and label by label.

`trl-packing inspect --against` prepares rows once more, and compares the documents of each row:

    trl                TRL's own preparation, with the same settings
    template.jinja     the same run with this chat template
    run.yaml           a run of its own if it names a model and data; if not, this run with its
                       settings

    equal             the same tokens, labels and weights
    dropped by one    one of the two keeps nothing of the row
    tokens differ     another text, other tokens for it, or another cut
    labels differ     the same tokens, others of them trained
    weights differ    the same tokens trained, with other weights

The first token of a document is never a target, so its label is not compared.
"""

import copy
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from difflib import unified_diff
from itertools import groupby, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden, escape_text
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
)
from trl_packing.documents.weights import document_weight, token_weights
from trl_packing.tools.options import read_config
from trl_packing.tools.preview.previewed_run import ROW, PreviewedRun, SourceRows, with_row_numbers
from trl_packing.tools.preview.show import mark_trained, token_texts
from trl_packing.tools.training_command import TrainerCall, TrainingCommand

DROPPED, TOKENS, LABELS = "dropped by one", "tokens differ", "labels differ"
WEIGHTS = "weights differ"
DIFFERENCES = (DROPPED, TOKENS, LABELS, WEIGHTS)
EQUAL, DROPPED_BY_BOTH = "equal", "dropped by both"

_EXAMPLES = 3  # differences of each kind that are kept
_CHUNK = 1000  # rows that are read at once
_BEFORE, _AFTER = 12, 60  # tokens shown before the first one that differs, and from there on

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


@dataclass(frozen=True, eq=False)
class Tokens:
    """The documents that one preparation makes of one row, laid end to end.

    Attributes:
        ids: token ids, ``(T,)`` int64.
        labels: `IGNORE_INDEX` on the first token of each document, ``(T,)`` int64.
        weights: weight of each token in the loss, 0 if it is not trained, ``(T,)`` float64.
        lengths: tokens of each document; none if the row is dropped.
    """

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[dict[str, np.ndarray]]) -> "Tokens":
        """Return the documents of a row, of which `DOCUMENT_WEIGHT` is a column."""
        ids, labels, weights = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        for document in documents:
            ids.append(document["input_ids"])
            labels.append(np.array(document["labels"], np.int64))
            labels[-1][:1] = IGNORE_INDEX
            of_tokens = token_weights(document, len(ids[-1])) * document_weight(document)
            weights.append(np.where(labels[-1] == IGNORE_INDEX, 0.0, of_tokens))
        lengths = tuple(len(document["input_ids"]) for document in documents)
        return cls(np.concatenate(ids), np.concatenate(labels), np.concatenate(weights), lengths)

    @property
    def num_trained(self) -> int:
        """Return the number of trained tokens."""
        return int((self.labels != IGNORE_INDEX).sum())

    def to_dict(self) -> dict[str, list]:
        """Return the arrays as lists."""
        return {name: np.asarray(values).tolist() for name, values in vars(self).items()}


@dataclass(frozen=True)
class Side:
    """One of the two preparations.

    Attributes:
        name: for a reader.
        run: the rows and the settings.
        by_trl: TRL prepares them.
    """

    name: str
    run: PreviewedRun
    by_trl: bool = False

    def rows(self) -> Iterator[Tokens]:
        """Yield the documents of each row of the data set, reading 1,000 rows at a time."""
        run = with_row_numbers(self.run).with_settings(shuffle_dataset=False)
        if is_packed(run.dataset):
            raise ValueError("the rows are packed already (they have seq_lengths): nothing differs")
        dataset = documents_by_trl(run) if self.by_trl else run.documents()[0]
        columns = [*TOKEN_COLUMNS, *([] if self.by_trl else [TOKEN_WEIGHTS])]
        of_documents = [] if self.by_trl else [DOCUMENT_WEIGHT]
        arrays = dataset.with_format("numpy")
        documents = ArrowDocuments(
            dataset,
            [name for name in columns if name in dataset.column_names],
            {name: arrays[name][:] for name in of_documents if name in dataset.column_names},
        )
        numbers = np.asarray(arrays[ROW][:], np.int64)
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(run.dataset) + 1))
        for first in range(0, len(run.dataset), _CHUNK):
            of_rows = bounds[first : first + _CHUNK + 1]
            found = documents.__getitems__(order[of_rows[0] : of_rows[-1]].tolist())
            for start, stop in pairwise((of_rows - of_rows[0]).tolist()):
                yield Tokens.of(found[start:stop])


def documents_by_trl(run: PreviewedRun) -> Dataset:
    """Return the documents of `run` as TRL prepares them with packing=False, and all columns.

    Settings that TRL does not have (`train_on`, `overflow`, templates, ...) have no effect.

    Raises:
        ValueError: TRL cannot prepare these rows; the message has its reason.
    """
    if isinstance(run.dataset, SourceRows):
        raise ValueError(
            "TRL's trainer takes one data set, and train_dataset is a dictionary of several; "
            "compare them one by one"
        )
    if run.images.packs:
        raise ValueError(
            "TRL tokenizes rows with images when it makes a batch, so there are no documents to "
            "compare; a few rows are compared with its collator whenever rows are prepared"
        )
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
                formatting_func=run.formatting_func,
            )
        except Exception as error:  # a template or TRL may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"TRL cannot prepare these rows: {reason}") from error
    return trainer.train_dataset


def check_against(against: str) -> None:
    """Raise ValueError if `against` is neither ``"trl"`` nor a template or a .yaml file."""
    if against == "trl":
        return
    if not against.endswith((".jinja", ".j2", ".yaml", ".yml")):
        raise ValueError(
            f"--against {against} is no preparation; name trl, a .jinja template or a .yaml file"
        )
    if not Path(against).is_file():
        raise ValueError(f"--against {against} does not exist (looked from {Path.cwd()})")


def other_side(against: str, run: PreviewedRun, words: Sequence[str]) -> Side:
    """Return the preparation that `against` names.

    Args:
        against: ``"trl"``, a .jinja or .j2 template, or a .yaml file of options.
        run: the run that is compared with it.
        words: the training command of the run, without its launcher.

    Raises:
        ValueError: `against` is none of these, or a file that does not exist.
    """
    check_against(against)
    if against == "trl":
        return Side("TRL", run, by_trl=True)
    name = Path(against).name
    if name.endswith((".jinja", ".j2")):
        args = copy.copy(run.args)
        args.chat_template_path = against
        tokenizer = run.preparation.processing_class
        call = TrainerCall(
            run.model, args, run.dataset, tokenizer, run.collator, run.formatting_func
        )
        return Side(name, PreviewedRun.from_call(call))
    command = TrainingCommand.from_words(_words_with(Path(against), words))
    return Side(name, PreviewedRun.from_call(command.call))


def _words_with(path: Path, words: Sequence[str]) -> list[str]:
    """Return the training command that the file makes of the command `words`."""
    options = read_config(path, "--against")
    if options.keys() & {"model_name_or_path", "model"} and options.keys() & {
        "dataset_name",
        "data",
    }:
        first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
        return [*words[:first], "--config", str(path)]
    given = list(words)
    for name, value in options.items():  # the last of several options counts
        values = value if isinstance(value, list) else [value]
        given += [f"--{name}", *(v if isinstance(v, str) else json.dumps(v) for v in values)]
    return given


# --- the comparison -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Difference:
    """A row that two preparations make different documents of.

    Attributes:
        row: its number in the data set.
        kind: one of `DIFFERENCES`.
        sides: the documents of both preparations; without tokens if the row is dropped.
        at: the first token that differs.
    """

    row: int
    kind: str
    sides: tuple[Tokens, Tokens]
    at: int


@dataclass(eq=False)
class Comparison:
    """Two preparations of one data set.

    Attributes:
        names: of the preparations.
        rows: rows of the data set.
        counts: rows by kind: equal, dropped by both, or one of `DIFFERENCES`.
        totals: documents, tokens and trained tokens of each preparation, ``(2, 3)`` int64.
        differences: the first rows of each kind of difference.
    """

    names: tuple[str, str]
    rows: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((EQUAL, DROPPED_BY_BOTH, *DIFFERENCES), 0)
    )
    totals: np.ndarray = field(default_factory=lambda: np.zeros((2, 3), np.int64))
    differences: list[Difference] = field(default_factory=list)

    @property
    def different(self) -> int:
        """Return the rows that differ."""
        return sum(self.counts[kind] for kind in DIFFERENCES)

    @property
    def is_equal(self) -> bool:
        """Whether both preparations make the same documents."""
        return self.different == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON holds."""
        names = ("documents", "tokens", "trained_tokens")
        return {
            "names": self.names,
            "is_equal": self.is_equal,
            "rows": self.rows,
            "counts": self.counts,
            **dict(zip(names, self.totals.T.tolist(), strict=True)),
            "differences": [
                {"row": d.row, "kind": d.kind, "first_token": d.at}
                | {"sides": [side.to_dict() for side in d.sides]}
                for d in self.differences
            ],
        }


def compare(first: Side, second: Side) -> Comparison:
    """Compare two preparations of the same rows.

    Raises:
        ValueError: the sides have different rows, or one of them cannot be prepared.
    """
    rows = len(first.run.dataset)
    if rows != len(second.run.dataset):
        raise ValueError(
            f"{first.name} has {rows:,} rows and {second.name} has {len(second.run.dataset):,}; "
            "compare preparations of the same rows"
        )
    found = Comparison((first.name, second.name), rows)
    for row, sides in enumerate(zip(first.rows(), second.rows(), strict=True)):
        found.totals += [[len(side.lengths), len(side.ids), side.num_trained] for side in sides]
        kind, at = _difference(*sides)
        found.counts[kind] += 1
        if kind in DIFFERENCES and found.counts[kind] <= _EXAMPLES:
            found.differences.append(Difference(row, kind, sides, at))
    return found


def _difference(a: Tokens, b: Tokens) -> tuple[str, int]:
    """Return how the documents of one row differ, and from which token on."""
    number = min(len(a.ids), len(b.ids))
    same_lengths = a.lengths == b.lengths
    for kind, name in ((TOKENS, "ids"), (LABELS, "labels"), (WEIGHTS, "weights")):
        differs = getattr(a, name)[:number] != getattr(b, name)[:number]
        if differs.any() or not same_lengths:
            kind = kind if bool(a.lengths) == bool(b.lengths) else DROPPED
            return kind, int(np.argmax(differs)) if differs.any() else number
    return EQUAL if a.lengths else DROPPED_BY_BOTH, 0


# --- text -----------------------------------------------------------------------------------------


def comparison_text(comparison: Comparison, tokenizers: Sequence[Any]) -> str:
    """Return the counts and the first differences, as lines of both that differ.

    row 12 · labels differ from token 9 on
    --- here
    +++ trl
     <|im_start|>assistant
    -⟦Hello.<|im_end|>⟧
    +⟦Hello.<|im_end|>
    +⟧

    Args:
        comparison: of two preparations.
        tokenizers: of both.
    """
    names = [escape_hidden(name) for name in comparison.names]
    lines = [f"{'':16}{names[0][:20]:>20}{names[1][:20]:>20}"]
    totals = zip(("documents", "tokens", "trained tokens"), *comparison.totals, strict=True)
    lines += [f"{name:16}{first:>20,}{second:>20,}" for name, first, second in totals]
    for kind, number in comparison.counts.items():
        if number or kind == EQUAL:
            lines.append("\n" * (kind == EQUAL) + f"{kind:16}{quantity(number, 'row'):>20}")
    verdict = "Both preparations make the same documents: tokens, labels and weights."
    if not comparison.is_equal:
        of = quantity(comparison.rows, "row")
        verdict = f"The preparations differ in {comparison.different:,} of {of}."
    shown = [_lines_that_differ(d, names, tokenizers) for d in comparison.differences]
    return "\n\n".join(["\n".join(lines), verdict, *shown])


def _lines_that_differ(
    difference: Difference, names: Sequence[str], tokenizers: Sequence[Any]
) -> str:
    shown = [
        (_texts(side, tokenizer), side, difference.at)
        for side, tokenizer in zip(difference.sides, tokenizers, strict=True)
    ]
    first, second = (_lines(*side) for side in shown)
    if first == second:  # other tokens of the same text
        first, second = (_token_lines(*side) for side in shown)
    compared = unified_diff(first, second, names[0], names[1], n=len(first), lineterm="")
    where = f" from token {difference.at:,} on" * all(side.lengths for side in difference.sides)
    heading = f"row {difference.row:,} · {difference.kind}{where}"
    return "\n".join([heading, *(line for line in compared if not line.startswith("@@"))])


def _texts(side: Tokens, tokenizer: Any) -> list[str]:
    """Return the text of each token; documents begin on a line of their own."""
    texts: list[str] = []
    for length in side.lengths:
        found = token_texts(side.ids[len(texts) : len(texts) + length].tolist(), tokenizer)
        texts += ["\n── next document ──\n" * bool(texts) + found[0], *found[1:]]
    return texts


def _lines(texts: Sequence[str], side: Tokens, at: int) -> list[str]:
    """Return the text around token `at` in lines, its trained stretches marked."""
    start, stop = max(at - _BEFORE, 0), min(at + _AFTER, len(texts))
    if not texts:
        return ["(dropped)"]
    weighted = zip(side.weights[start:stop].tolist(), texts[start:stop], strict=True)
    stretches = groupby(weighted, key=lambda token: token[0])
    text = mark_trained([(w, "".join(t for _, t in tokens)) for w, tokens in stretches])
    return f"{'… ' * (start > 0)}{text}{' …' * (stop < len(texts))}".split("\n")


def _token_lines(texts: Sequence[str], side: Tokens, at: int) -> list[str]:
    """Return a line for each token around `at`: its id, its weight, its text."""
    shown = range(max(at - _BEFORE, 0), min(at + _AFTER, len(texts)))
    return [f"{side.ids[i]:>8} {side.weights[i]:>6g} {escape_text(texts[i])!r}" for i in shown]
