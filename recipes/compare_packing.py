# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing @ git+https://github.com/OWNER/trl_packing"]
# ///
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
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trl_packing.recipes.recipe_data import DataArguments, load_documents
from trl_packing.recipes.recipe_run import parse as parse_run
from trl_packing.recipes.sft_packed import DEMO_ARGUMENTS, load_model

from accelerate import PartialState
from datasets import Dataset, disable_progress_bars
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import ModelConfig, SFTTrainer, get_peft_config

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.data.prepared import records_of
from trl_packing.tools.options import exits_in_one_line

warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

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
# name -> (trainer, changes of the config)
Runs = dict[str, tuple[type[SFTTrainer], dict[str, Any]]]
RUNS: Runs = {
    "padding to max": (SFTTrainer, {"packing": False, "pads_to_max": True}),
    "padding to longest": (SFTTrainer, {"packing": False}),
    "random, no mask": (SFTTrainer, {"packing": True, "packing_strategy": "wrapped"}),
    "random": (PackedSFTTrainer, {"packing": True, "packing_strategy": "wrapped"}),
    "greedy": (PackedSFTTrainer, {"packing": True, "packing_strategy": "greedy"}),
    "this project": (PackedSFTTrainer, {"packing": True, "packing_strategy": "bfd"}),
    "... in padded steps": (PackedSFTTrainer, {"packing": True, "keeps_steps": True}),
}
SCALES: dict[str, Callable[[float], float]] = {
    "sqrt": lambda ratio: ratio**0.5,
    "linear": lambda ratio: ratio,
    "none": lambda ratio: 1.0,
}


@dataclass
class CompareArguments(DataArguments):
    """The data, and the options of the comparison."""

    num_documents: int | None = field(
        default=None, metadata={"help": "Documents drawn from the training split; default: all."}
    )
    scale_learning_rate: str = field(
        default="sqrt",
        metadata={
            "help": "Scaling of the learning rate with the documents of a step.",
            "choices": list(SCALES),
        },
    )


class Data(NamedTuple):
    train: Dataset
    test: Dataset
    tokenizer: Any


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
    data_args, args, model_args = parse(argv, DEMO)
    results = compare(RUNS, data_args, args, model_args)
    PartialState().print(table(results))
    return results


def parse(
    argv: list[str] | None, demo: dict[str, Any]
) -> tuple[CompareArguments, PackedSFTConfig, ModelConfig]:
    """Return TRL's three groups of arguments; `demo`'s if neither model nor data set is given."""
    fixed = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    found = parse_run(argv, CompareArguments, ModelConfig, demo=demo, **fixed)
    if found[0].datasets:
        raise ValueError("a comparison trains one data set; name it with --dataset_name")
    if found[2].model_name_or_path is None:
        disable_progress_bars()
    return found


def compare(
    runs: Runs, data_args: CompareArguments, args: PackedSFTConfig, model_args: ModelConfig
) -> dict[str, Result]:
    """Return the results of all runs; their own output goes to stderr."""
    results: dict[str, Result] = {}
    with redirect_stdout(sys.stderr):
        data = load_data(data_args, args, model_args)
        for name in runs:
            results[name] = run(name, runs, data_args, args, model_args, data)
            PartialState().print(f"{name}: {results[name].seconds:.1f} s")
    return results


def load_data(data_args: CompareArguments, args: PackedSFTConfig, model_args: ModelConfig) -> Data:
    """Return training and held-out documents, tokenized once for all runs."""
    model, tokenizer = load_model(copy.deepcopy(args), model_args)
    loaded = load_documents(
        data_args,
        prompt_template=args.prompt_template,
        needs_test=True,
        has_chat_template=bool(tokenizer.chat_template),
        text_field=args.dataset_text_field,
        seed=args.seed,
    )
    args.prompt_template = None  # already applied
    train = loaded.train
    if not isinstance(train, Dataset) or not isinstance(loaded.test, Dataset):
        raise ValueError(
            "a comparison needs data sets with a length; leave --dataset_streaming out"
        )
    if not records_of(train):  # prepared documents were shuffled before
        train = train.shuffle(seed=args.seed)
    if data_args.num_documents is not None:
        train = train.select(range(min(data_args.num_documents, len(train))))
    unpacked = copy.deepcopy(args)
    unpacked.packing = False
    trainer = PackedSFTTrainer(
        model, unpacked, train_dataset=train, eval_dataset=loaded.test, processing_class=tokenizer
    )
    columns = ["input_ids", "labels"]
    return Data(
        trainer.train_dataset.select_columns(columns),
        trainer.eval_dataset.select_columns(columns),
        tokenizer,
    )


def run(
    name: str,
    runs: Runs,
    data_args: CompareArguments,
    args: PackedSFTConfig,
    model_args: ModelConfig,
    data: Data,
) -> Result:
    """Train a new model as `runs[name]` says, and evaluate it."""
    trainer_class, changes = runs[name]
    args, changes = copy.deepcopy(args), dict(changes)
    args.output_dir = str(Path(args.output_dir) / name.replace(" ", "_").replace(",", ""))
    per_step = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if changes.pop("pads_to_max", False):
        args.pad_to_multiple_of = args.max_length
    if changes.pop("keeps_steps", False):
        args.documents_per_step = per_step
    for setting, value in changes.items():
        setattr(args, setting, value)
    set_seed(args.seed)
    model, _ = load_model(args, model_args)
    watch = Watch()
    trainer = trainer_class(
        model,
        args,
        train_dataset=data.train,
        processing_class=data.tokenizer,
        peft_config=get_peft_config(model_args),
        callbacks=[watch],
    )
    trainer.remove_callback(PrinterCallback)
    batches = len(trainer.get_train_dataloader())
    steps = -(-batches // args.gradient_accumulation_steps)
    documents = len(data.train) / steps
    ratio = documents / per_step if args.packing else 1.0
    trainer.args.learning_rate *= SCALES[data_args.scale_learning_rate](ratio)
    trainer.train()
    return Result(
        trainer.state.global_step,
        documents,
        trainer.args.learning_rate,
        watch.seconds,
        fill_of(trainer, data),
        eval_loss(trainer.model, args, data),
        [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    )


class Watch(TrainerCallback):
    """Measure the seconds from the first step to the last, without loading and checks."""

    began: float | None = None
    seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter() if self.began is None else self.began

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.began is not None:
            self.seconds = time.perf_counter() - self.began


def fill_of(trainer: SFTTrainer, data: Data) -> float:
    """Return the share of an epoch's rows that holds tokens instead of padding or unused space."""
    report = getattr(trainer, "packing_report", None)
    if report is not None and report.utilization is not None:
        return report.utilization
    if report is not None:  # documents in flat rows
        return 1.0
    cells = sum(batch["input_ids"].numel() for batch in trainer.get_train_dataloader())
    tokens = sum(map(len, data.train["input_ids"]))
    return tokens / trainer.args.world_size / cells


def eval_loss(model: Any, args: PackedSFTConfig, data: Data) -> float:
    """Return the mean loss of all trained tokens of the held-out documents, each alone."""
    args = copy.deepcopy(args)
    args.packing, args.documents_per_step, args.pad_to_multiple_of = False, None, None
    evaluator = PackedSFTTrainer(
        model,
        args,
        train_dataset=data.test,
        eval_dataset=data.test,
        processing_class=data.tokenizer,
    )
    return evaluator.evaluate()["eval_loss"]


def table(results: dict[str, Result]) -> str:
    """Return the results as lines; speed-up compares with the first run."""
    (_, first), *_ = results.items()
    width = max(map(len, results))
    lines = [
        f"{'':<{width}}  steps  docs/step       lr  seconds  speed-up    fill  eval loss",
        *(
            f"{name:<{width}}  {r.steps:>5,}  {r.documents_per_step:>9.1f}  "
            f"{r.learning_rate:>7.1e}  {r.seconds:>7.1f}  {first.seconds / r.seconds:>7.1f}×  "
            f"{r.fill:>6.1%}  {r.eval_loss:>9.4f}"
            for name, r in results.items()
        ),
    ]
    return "\n" + "\n".join(lines)


if __name__ == "__main__":
    exits_in_one_line(main)()
