"""Which features work together: every pair is tried, and docs/feature-matrix.md is the result.

python tests/helpers/feature_matrix.py      tries all pairs (a few minutes) and writes the page

✓   one optimizer step trained (three with groups of prefixes), with an evaluation and a resumed run
    where the pair has them
A   trained with documents apart: their common prefixes are not shared
T   trained on TRL's path, which is not packed
✗   refused, by the sentence that the page quotes
–   alternatives of each other
"""

import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "feature-matrix.md"
sys.path.insert(0, str(ROOT / "tests"))

from harness import make_trainer  # noqa: E402

from helpers.padded import Padded  # noqa: E402
from helpers.tiny import tiny_dataset, tiny_tokenizer  # noqa: E402
from trl_packing import PackedSFTTrainer  # noqa: E402


@dataclass(frozen=True)
class Feature:
    """A feature of a run.

    Attributes:
        name: on the page.
        options: settings of `PackedSFTConfig`.
        arguments: makes arguments of the trainer.
        data: changes the training set.
        model: name of a tiny model.
        resumes: whether the run is resumed from its checkpoint.
        instead_of: names of features that this one is an alternative to.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    arguments: Callable[[], dict[str, Any]] = dict
    data: Callable[[Dataset], Any] | None = None
    model: str | None = None
    resumes: bool = False
    instead_of: tuple[str, ...] = ()


def _user_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    logits = outputs.logits[:, :-1].flatten(0, 1).float()
    return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100)


def _accuracy(prediction: Any) -> dict[str, float]:
    return {"shape": float(prediction.predictions.shape[-1])}


def _lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


def _tokenizer() -> Any:
    return tiny_tokenizer(chat="generation")


def _conversations(rows: int = 8) -> Dataset:
    return tiny_dataset("conversational_language_modeling", rows)


def _with_sources(dataset: Dataset) -> Dataset:
    return dataset.add_column("source", ["a", "b"] * (len(dataset) // 2))


def _as_sources(dataset: Any) -> Any:
    """Return the rows as a dictionary of two data sets, or of two streams."""
    if isinstance(dataset, Dataset):
        half = len(dataset) // 2
        return {"a": dataset.select(range(half)), "b": dataset.skip(half)}
    return {"a": dataset.take(4), "b": dataset.skip(4)}


def _with_system_prompt(dataset: Dataset) -> Dataset:
    system = {"role": "system", "content": "Be kind."}
    return dataset.map(lambda row: {"messages": [system, *row["messages"]]})


_EVALUATES = {"eval_strategy": "steps", "eval_steps": 1}

FEATURES = (
    Feature("packing", {"packing": True}),
    Feature("padding-free", {"packing": False}, instead_of=("packing",)),
    Feature("documents_per_step", {"documents_per_step": 4}),
    Feature("static_shapes", {"static_shapes": True}),
    Feature("torch_compile", {"torch_compile": True, "torch_compile_backend": "eager"}),
    Feature("gradient checkpointing", {"gradient_checkpointing": True}),
    Feature("LoRA", arguments=lambda: {"peft_config": _lora()}),
    Feature("stream", {"max_steps": 1}, data=lambda rows: rows.to_iterable_dataset()),
    Feature("evaluation", _EVALUATES, lambda: {"eval_dataset": _conversations(4)}),
    Feature(
        "source_column",
        {**_EVALUATES, "source_column": "source"},
        lambda: {"eval_dataset": _with_sources(_conversations(4))},
        data=_with_sources,
        instead_of=("evaluation",),
    ),
    Feature(
        "compute_metrics",
        _EVALUATES,
        lambda: {"eval_dataset": _conversations(4), "compute_metrics": _accuracy},
        instead_of=("evaluation",),
    ),
    Feature("resuming", {"save_strategy": "steps", "save_steps": 1}, resumes=True),
    Feature("prefixes in a bin", {"prefix_sharing": "bin"}, data=_with_system_prompt),
    Feature(
        "groups of prefixes",
        {"prefix_sharing": "group", "max_steps": 3},  # over several epochs of the rows
        data=_with_system_prompt,
        instead_of=("prefixes in a bin",),
    ),
    Feature("mixture", {"mixture": {"a": {"weight": 3}, "b": {"weight": 1}}}, data=_as_sources),
    Feature("curriculum", {"curriculum": "length"}),
    Feature("overlap", {"overflow": "overlap", "max_length": 48, "per_device_train_batch_size": 4}),
    Feature("train_on", {"train_on": "assistant"}),
    Feature("every_turn", {"train_on": "every_turn"}, instead_of=("train_on",)),
    Feature("assistant_only_loss", {"assistant_only_loss": True}),
    Feature("response_template", {"response_template": "<|im_start|>assistant\n"}),
    Feature("loss_weighting", {"loss_weighting": "document"}),
    Feature("loss_weight column", data=lambda x: x.add_column("loss_weight", [2.0] * len(x))),
    Feature("NEFTune", {"neftune_noise_alpha": 5.0}),
    Feature("balance of experts", {"router_aux_loss_coef": 0.1}, model="qwen3_moe"),
    Feature("compute_loss_func", arguments=lambda: {"compute_loss_func": _user_loss}),
    Feature("your own collator", arguments=lambda: {"data_collator": Padded()}),
)
BY_NAME = {feature.name: feature for feature in FEATURES}


@dataclass(frozen=True)
class Outcome:
    """The result of a pair: a mark, and the sentence of a refusal."""

    mark: str
    sentence: str = ""


def are_alternatives(first: Feature, second: Feature) -> bool:
    """Whether two features cannot both be asked for."""
    return (
        first.name in second.instead_of
        or second.name in first.instead_of
        or (bool(first.instead_of) and set(first.instead_of) == set(second.instead_of))
    )


def outcome(first: Feature, second: Feature, *, trains: bool = True) -> Outcome:
    """Return the outcome of a pair.

    Args:
        first: a feature.
        second: another one.
        trains: train a step. If False, only the trainer is built.
    """
    if are_alternatives(first, second):
        return Outcome("–")
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = _trainer(folder, first, second)
            if trains:
                trainer.train()
                assert trainer.state.global_step == trainer.args.max_steps
            if trains and (first.resumes or second.resumes):
                checkpoint = str(Path(folder) / "checkpoint-1")
                _trainer(folder, first, second, max_steps=2).train(checkpoint)
    except ValueError as error:
        return Outcome("✗", " ".join(str(error).split()))
    if trainer._trl_path:
        return Outcome("T")
    asked = trains and trainer._run.options.prefix_sharing != "off"
    return Outcome("A" if asked and not _shares(trainer) else "✓")


def _shares(trainer: PackedSFTTrainer) -> bool:
    """Return whether fewer tokens were computed than documents have; if not, one line says why."""
    shares = trainer._meter.so_far()["shared"] > 0
    report = str(trainer.packing_report.prefixes)
    says_why = report.startswith(("not shared: ", "nothing to share: "))
    assert shares != says_why, "one line must say why"
    return shares


def _trainer(folder: str, first: Feature, second: Feature, **more: Any) -> PackedSFTTrainer:
    torch.manual_seed(0)
    options = {"max_length": 64, "max_steps": 1, "per_device_train_batch_size": 2}
    options |= {"gradient_checkpointing": False} | first.options | second.options | more
    rows = _conversations()
    last = ("stream", "mixture")
    for feature in sorted((first, second), key=lambda f: f.name in last and last.index(f.name) + 1):
        rows = feature.data(rows) if feature.data else rows
    given = first.arguments() | second.arguments()
    return make_trainer(
        folder,
        rows,
        first.model or second.model or "llama",
        tokenizer=_tokenizer(),
        evaluated=given.pop("eval_dataset", None),
        collator=given.pop("data_collator", None),
        arguments=given,
        **options,
    )


# --- several processes: what tests compare with one -----------------------------------------------

ON_RANKS = {
    "DDP": [
        *("packing", "padding-free", "stream", "evaluation", "source_column", "compute_metrics"),
        *("resuming", "prefixes in a bin", "groups of prefixes", "mixture", "curriculum"),
        "overlap",
    ],
    "FSDP2, ZeRO-2, ZeRO-3": [
        *("packing", "padding-free", "LoRA", "stream", "evaluation", "resuming"),
        *("loss_weighting", "loss_weight column", "balance of experts"),
    ],
}

# --- the page -------------------------------------------------------------------------------------

_HEAD = """\
# Features together

Every pair of features was tried on a tiny model, on one CPU process: a step was trained (three with
groups of prefixes), with an evaluation and a resumed run where the pair has them.
`python tests/helpers/feature_matrix.py` writes this page, and `tests/test_feature_matrix.py` checks
it. The number of a column is that of the row with the feature. torch_compile ran with the backend
"eager".

| mark | meaning |
| --- | --- |
| ✓ | trained |
| A | trained with documents apart: their prefixes are not shared, and one line says why |
| T | trained on TRL's path, with a warning: your collator makes the batches |
| ✗ | refused before training, by the sentence [below](#refusals) |
| – | alternatives of each other |

"""

_RANKS_HEAD = """
## Several processes

✓: a test compares two processes with one, over several steps. Other features run there too, but no
test compares them.

"""


def all_outcomes(*, trains: bool = True) -> dict[tuple[str, str], Outcome]:
    """Return the outcomes of all pairs, by the names of their features."""
    return {(a.name, b.name): outcome(a, b, trains=trains) for a, b in combinations(FEATURES, 2)}


def page(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """Return the text of the page."""

    def mark(row: Feature, other: Feature) -> str:
        pairs = ((row.name, other.name), (other.name, row.name))
        return next((outcomes[pair].mark for pair in pairs if pair in outcomes), "")

    numbered = list(enumerate(FEATURES, start=1))
    return "\n".join(
        [
            _HEAD + f"| | feature {_row(*(number for number, _ in numbered))}",
            "| ---: | --- |" + " :-: |" * len(FEATURES),
            *(_row(n, row.name, *(mark(row, other) for other in FEATURES)) for n, row in numbered),
            _RANKS_HEAD + _row("feature", *ON_RANKS),
            "| --- |" + " :-: |" * len(ON_RANKS),
            *(_row(f.name, *("✓" * (f.name in on) for on in ON_RANKS.values())) for f in FEATURES),
            "\n## Refusals\n\n| | | sentence |\n| --- | --- | --- |",
            *(_row(*p, _in_table(o.sentence)) for p, o in outcomes.items() if o.mark == "✗"),
            "",
        ]
    )


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _in_table(text: str) -> str:
    return re.sub(r"([|<>])", r"\\\1", text)


def marks_on(text: str) -> dict[tuple[str, str], str]:
    """Return the marks of the first table of a page, by the names of the features."""
    rows = re.findall(r"^\| \d+ \| ([^|]+) \|(.*)\|$", text, re.M)
    names = [name for name, _ in rows]
    cells = [[cell.strip() for cell in row.split("|")] for _, row in rows]
    return {(names[i], names[j]): cells[i][j] for i, j in combinations(range(len(names)), 2)}


def refusals_on(text: str) -> dict[tuple[str, str], str]:
    """Return the quoted sentences, by the names of the features."""
    rows: Iterable[tuple[str, str, str]] = re.findall(
        r"^\| ([^|\n]+) \| ([^|\n]+) \| (.+) \|$", text.partition("## Refusals")[2], re.M
    )
    return {(a, b): re.sub(r"\\([|<>])", r"\1", words) for a, b, words in rows if a in BY_NAME}


if __name__ == "__main__":
    found = all_outcomes()
    PAGE.write_text(page(found), encoding="utf-8")
    print({mark: sum(o.mark == mark for o in found.values()) for mark in "✓T✗–"})
