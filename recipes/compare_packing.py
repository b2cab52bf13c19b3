"""Compare padding and several ways of packing on the same data, in one table.

The table is that of "Packing Analysis" (arXiv 2410.08081), for your model and data.

    python recipes/compare_packing.py                                          # the demo's data
    python recipes/compare_packing.py --config recipes/compare_packing.yaml    # SmolLM2 on GSM8K

    padding to max       each document is padded to max_length tokens: the paper's baseline
    padding to longest   each batch is padded to its longest document: the usual padded training
    random, no mask      all documents end to end, cut at max_length; documents see each other:
                         the paper's random packing (TRL's "wrapped")
    random               the same, but the pieces are isolated from each other
    greedy               from the longest to the shortest; a new bin when the next does not fit
    this project         best-fit decreasing: short documents fill the gaps that greedy leaves;
                         new bins every epoch
    ... in padded steps  this project, with the number of documents of a padded step in every step

TRL's trainer runs the padded rows and random packing without a mask; `PackedSFTTrainer` runs the
others. All of them train every document once an epoch, with the same number of rows a batch. A
packed step therefore holds more documents, and an epoch has fewer steps. The learning rate is
multiplied by the square root of this ratio (`--scale_learning_rate`: sqrt, linear or none). The
last line needs no scaling: with `documents_per_step` it has the steps of the padded run.

All models are evaluated on the same held-out documents, each document alone. Seconds count the
training steps only. Expected on the demo (steps, documents and fill never vary; seconds were
measured on 2 busy CPU cores; losses may differ in the last digit):

                         steps  docs/step       lr  seconds  speed-up    fill  eval loss
    padding to max         250        2.0  1.0e-03    184.8      1.0×   10.2%     1.9466
    padding to longest     250        2.0  1.0e-03     41.5      4.5×   70.4%     1.9466
    random, no mask         26       19.2  3.1e-03     26.3      7.0×   98.2%     2.6987
    random                  26       19.2  3.1e-03     16.6     11.1×   96.7%     2.4832
    greedy                  29       17.2  2.9e-03     18.3     10.1×   89.6%     2.4740
    this project            26       19.2  3.1e-03     18.0     10.3×   98.2%     2.4406
    ... in padded steps    250        2.0  1.0e-03     28.7      6.4×  100.0%     1.9466

Random packing without a mask trains on contaminated documents but is evaluated on isolated ones.
With one epoch of 500 documents, the number of steps decides the result: a small example of the
paper's "packing is for large data sets".
"""

import copy
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_packing.recipes.recipe_data import DataArguments, load_data
from trl_packing.recipes.sft_packed import DEMO_ARGUMENTS, load_model
from trl_packing.recipes.sft_packed import parse as parse_run

from accelerate import PartialState
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from transformers.hf_argparser import HfArg
from trl import ModelConfig, SFTTrainer, get_peft_config

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.data.files import records_of
from trl_packing.tools.options import exits_in_one_line

DEMO = {
    **{k: v for k, v in DEMO_ARGUMENTS.items() if k not in ("num_samples", "warmup_steps")},
    "output_dir": "outputs/compare",
    "num_documents": 500,
    "max_length": 512,
    "per_device_train_batch_size": 2,
    "num_train_epochs": 1,
    "learning_rate": 1e-3,
    "warmup_steps": 0.1,  # share of all steps
}
# Values that settings of the padded run decide.
MAX_LENGTH, PADDED_STEP = "max_length", "documents of a padded step"
# name -> (trainer, changes of the config)
Runs = dict[str, tuple[type[SFTTrainer], dict[str, Any]]]
RUNS: Runs = {
    "padding to max": (SFTTrainer, {"packing": False, "pad_to_multiple_of": MAX_LENGTH}),
    "padding to longest": (SFTTrainer, {"packing": False}),
    "random, no mask": (SFTTrainer, {"packing": True, "packing_strategy": "wrapped"}),
    "random": (PackedSFTTrainer, {"packing": True, "packing_strategy": "wrapped"}),
    "greedy": (PackedSFTTrainer, {"packing": True, "packing_strategy": "greedy"}),
    "this project": (PackedSFTTrainer, {"packing": True, "packing_strategy": "bfd"}),
    "... in padded steps": (PackedSFTTrainer, {"packing": True, "documents_per_step": PADDED_STEP}),
}
POWERS = {"sqrt": 0.5, "linear": 1.0, "none": 0.0}  # of the ratio of documents in a step


@dataclass
class CompareArguments(DataArguments):
    """The data, and the options of the comparison."""

    num_documents: int | None = HfArg(default=None, help="Documents to draw; default: all.")
    scale_learning_rate: Literal["sqrt", "linear", "none"] = HfArg(
        default="sqrt", help="Scaling of the learning rate with the documents of a step."
    )


class Result(NamedTuple):
    """The size of one run, and its results."""

    steps: int
    documents_per_step: float
    learning_rate: float
    seconds: float
    fill: float
    eval_loss: float
    losses: list[float]  # one for each logged step


def main(argv: list[str] | None = None) -> dict[str, Result]:
    """Train each line of the table; print and return the results."""
    results = compare(RUNS, *parse(argv, DEMO))
    PartialState().print(table(results))
    return results


def parse(argv: list[str] | None, demo: dict[str, Any]) -> Any:
    """Return TRL's three groups of arguments; `demo`'s if neither model nor data set is given."""
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return parse_run(argv, CompareArguments, demo=demo, **fixed)


def compare(
    runs: Runs, data_args: CompareArguments, args: PackedSFTConfig, model_args: ModelConfig
) -> dict[str, Result]:
    """Return the results of all runs; their own output goes to stderr."""
    power = POWERS[data_args.scale_learning_rate]
    results: dict[str, Result] = {}
    with redirect_stdout(sys.stderr):
        data = load(data_args, args, model_args)
        for name, (trainer_class, changes) in runs.items():
            results[name] = run(trainer_class, changes, name, args, model_args, data, power)
            PartialState().print(f"{name}: {results[name].seconds:.1f} s")
    return results


def load(
    data_args: CompareArguments, args: PackedSFTConfig, model_args: ModelConfig
) -> tuple[Dataset, Dataset, Any]:
    """Return training and held-out documents, tokenized once for all runs, and the tokenizer."""
    unpacked = copy.deepcopy(args)
    unpacked.packing = False
    model, tokenizer = load_model(unpacked, model_args)
    train, test = load_data(data_args, unpacked, tokenizer, needs_test=True)
    args.prompt_template = None  # applied
    if not isinstance(train, Dataset) or not isinstance(test, Dataset):
        raise ValueError("a comparison trains one data set with a length: name it as dataset_name")
    if not records_of(train):  # prepared documents were shuffled before
        train = train.shuffle(seed=args.seed)
    if data_args.num_documents is not None:
        train = train.take(min(data_args.num_documents, len(train)))
    built = PackedSFTTrainer(model, unpacked, None, train, test, tokenizer)
    sets = (built.train_dataset, built.eval_dataset)
    return *(documents.select_columns(["input_ids", "labels"]) for documents in sets), tokenizer


def run(
    trainer_class: type[SFTTrainer],
    changes: dict[str, Any],
    name: str,
    args: PackedSFTConfig,
    model_args: ModelConfig,
    data: tuple[Dataset, Dataset, Any],
    power: float,
) -> Result:
    """Train a new model with `changes`, and evaluate it."""
    train, test, tokenizer = data
    args = copy.deepcopy(args)
    args.output_dir = str(Path(args.output_dir) / name.replace(" ", "_").replace(",", ""))
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    decided = {MAX_LENGTH: args.max_length, PADDED_STEP: per_step}
    for setting, value in changes.items():
        setattr(args, setting, decided.get(value, value))
    set_seed(args.seed)
    model, _ = load_model(args, model_args)
    watch = Watch()
    peft = get_peft_config(model_args)
    options: Any = {"processing_class": tokenizer, "peft_config": peft, "callbacks": [watch]}
    trainer = trainer_class(model, args, train_dataset=train, **options)
    steps = -(-len(trainer.get_train_dataloader()) // args.gradient_accumulation_steps)
    documents = len(train) / steps
    if args.packing:
        trainer.args.learning_rate *= (documents / per_step) ** power
    trainer.train()
    alone = copy.deepcopy(args)
    alone.packing, alone.documents_per_step, alone.pad_to_multiple_of = False, None, None
    evaluator = PackedSFTTrainer(trainer.model, alone, None, test, test, tokenizer)
    return Result(
        trainer.state.global_step,
        documents,
        trainer.args.learning_rate,
        watch.seconds,
        fill_of(trainer, train),
        evaluator.evaluate()["eval_loss"],  # the mean of all trained tokens, each document alone
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    )


class Watch(TrainerCallback):
    """Measure the seconds from the first step to the last, without loading and checks."""

    began: float | None = None
    seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = self.began or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - (self.began or 0)


def fill_of(trainer: SFTTrainer, train: Dataset) -> float:
    """Return the share of an epoch's rows that holds tokens instead of padding or unused space."""
    report = getattr(trainer, "packing_report", None)
    if report is not None:
        return report.utilization or 1.0  # None: documents in flat rows
    cells = sum(batch["input_ids"].numel() for batch in trainer.get_train_dataloader())
    return sum(map(len, train["input_ids"])) / trainer.args.world_size / cells


def table(results: dict[str, Result]) -> str:
    """Return the results as lines; speed-up compares with the first run."""
    first = next(iter(results.values()))
    width = max(map(len, results))
    lines = [f"\n{'':<{width}}  steps  docs/step       lr  seconds  speed-up    fill  eval loss"]
    for name, r in results.items():
        lines.append(
            f"{name:<{width}}  {r.steps:>5,}  {r.documents_per_step:>9.1f}  "
            f"{r.learning_rate:>7.1e}  {r.seconds:>7.1f}  {first.seconds / r.seconds:>7.1f}×  "
            f"{r.fill:>6.1%}  {r.eval_loss:>9.4f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    exits_in_one_line(main)()
