"""Whole runs with and without shared prefixes, and TRL packed: tokens, CPU seconds and memory.

    python benchmarks/prefix_runs.py --model PATH --data FOLDER \\
        --output benchmarks/results/prefix_runs.md

Each run trains all documents of a case (prefix_data.py) for one epoch, in a process of its own, in
float32, with TRL's defaults (gradient checkpointing is on). Every turn of a conversation is a
document: `train_on="every_turn"` makes them here, and TRL gets them ready-made.

    TRL, packed       SFTTrainer, packing=True
    off, bin, group   PackedSFTTrainer, with this `prefix_sharing`

Correctness comes first. The learning rate is 0, so all runs compare the same weights: the mean loss
of an epoch must be equal in all of them, and the steps of "off" and "bin" must have equal losses
and norms of gradients. Otherwise nothing is published. Time may fall by at least 0.8 of the factor
by which tokens fall; a table says where it does not. CPU seconds are those of all threads, because
other work on the machine affects them less than wall time.

`--layers 6` keeps only the first layers of the model, which takes a fraction of the time.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import provenance, publish, table
from prefix_data import CASES

TRL = "TRL, packed"
RUNS = (TRL, "off", "bin", "group")
TOLERANCE = 2e-5  # relative: float32 sums in another order
LEAST = 0.8  # of the factor of tokens
MAX_LENGTH = 4096

Measured = dict[str, Any]


def main() -> None:
    arguments = parse()
    if arguments.run:
        arguments.result.write_text(json.dumps(train(arguments)))
        return
    load = os.getloadavg()[0]
    rows = [row for case in arguments.cases for row in compare(case, arguments)]
    header = ["documents", "run", "tokens computed", "", "CPU s of the steps", "", "check, CPU s"]
    depth = f"the first {arguments.layers} layers of it" if arguments.layers else "all its layers"
    text = (
        f"# Whole runs with shared prefixes\n\n{arguments.model_name}, {depth}. Factors are "
        f'against "off". Load average {load:.1f} before, {os.getloadavg()[0]:.1f} after.\n\n'
        f"{table([*header, 'GiB'], rows)}\n{provenance()}"
    )
    publish(text, arguments.output)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a chat model, or its hub id")
    parser.add_argument("--model_name", default="SmolLM2-135M-Instruct", help="as written")
    parser.add_argument("--layers", type=int, help="use only the first ones")
    parser.add_argument("--data", required=True, type=Path, help="folder of GSM8K and Glaive")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--turns", type=int, default=1, help="of each run")
    parser.add_argument("--output", help="Markdown file to write")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one run, in a process of its own -------------------------------------------------------------


def in_own_process(case: str, run: str) -> Measured:
    """Return what `train` returns in a new process, whose peak memory is that of this run."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--case", case, "--run", run, "--result", str(result)]
        # Threads that spin while they wait take the cores from other work, for every run alike.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{case}, {run} failed:\n{done.stderr}")
        measured: Measured = json.loads(result.read_text())
    print(f"{case}, {run}: {measured['seconds']:.0f} CPU s", file=sys.stderr, flush=True)
    return measured


def train(arguments: argparse.Namespace) -> Measured:
    """Train one epoch; return CPU seconds, peak memory, and losses and counts of each step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(arguments, folder)
        steps = watch(trainer)
        began = time.process_time()
        trainer.train()
        ended = time.process_time()
    first = steps.pop("began")[0]
    logs = [log for log in trainer.state.log_history if "loss" in log]
    isolation = getattr(trainer, "_before_training", None)
    return {
        "seconds": ended - first,
        "before": first - began,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": [log["loss"] for log in logs],
        "norms": [float(log["grad_norm"]) for log in logs],
        "reason": isolation and isolation.sharing.reason,
        **steps,
    }


def build(arguments: argparse.Namespace, folder: str) -> Any:
    """Return the trainer of `arguments.run`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from trl_packing import PackedSFTConfig, PackedSFTTrainer

    case = CASES[arguments.case]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    if arguments.layers:
        model.config.num_hidden_layers = arguments.layers
        model.model.layers = model.model.layers[: arguments.layers]
    tokenizer.chat_template = case.template or tokenizer.chat_template
    settings: dict[str, Any] = {
        "max_length": MAX_LENGTH,
        "packing": True,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "learning_rate": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "dataloader_pin_memory": False,
    }
    if arguments.run == TRL:  # it does not train every turn, so it takes the documents
        documents = case.documents(arguments.data, tokenizer)
        args = SFTConfig(folder, **settings)
        return SFTTrainer(model, args, train_dataset=documents, processing_class=tokenizer)
    rows = Dataset.from_list(case.rows(arguments.data, tokenizer))
    if "messages" in rows.column_names:
        settings["train_on"] = "every_turn"
    if arguments.run == "group":
        settings["prefix_group_size"] = 16
    args = PackedSFTConfig(folder, prefix_sharing=arguments.run, **settings)
    return PackedSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)


def watch(trainer: Any) -> dict[str, list[Any]]:
    """Return lists that will hold the start of each step and its tokens, computed and trained."""
    steps: dict[str, list[Any]] = {"began": [], "computed": [], "trained": []}
    take = trainer.get_batch_samples

    def counted(*arguments: Any) -> Any:
        steps["began"].append(time.process_time())
        batches, num_items = take(*arguments)
        tokens, trained = 0, 0
        for batch in batches:
            counts = batch.get("target_counts")  # of a row with shared prefixes
            tokens += batch["input_ids"].numel()
            trained += int((batch["labels"] != -100 if counts is None else counts).sum())
        steps["computed"].append(tokens)
        steps["trained"].append(trained)
        return batches, num_items

    trainer.get_batch_samples = counted
    return steps


# --- the results ----------------------------------------------------------------------------------


def compare(case: str, arguments: argparse.Namespace) -> list[list[str]]:
    """Return the lines of the table for one case, after its runs agree."""
    turns = []
    for _ in range(arguments.turns):
        turns.append({run: in_own_process(case, run) for run in arguments.runs})
        check(case, turns[-1])
    seconds = {
        run: statistics.median(turn[run]["seconds"] for turn in turns) for run in arguments.runs
    }
    tokens = {run: sum(turns[0][run]["computed"]) for run in arguments.runs}
    return [
        [
            CASES[case].name if number == 0 else "",
            run,
            f"{tokens[run]:,}",
            f"{tokens['off'] / tokens[run]:.2f}×",
            f"{seconds[run]:.1f}",
            _factor(seconds["off"] / seconds[run], tokens["off"] / tokens[run], run),
            "" if run == TRL else f"{turns[0][run]['before']:.1f}",
            f"{max(turn[run]['gib'] for turn in turns):.1f}",
        ]
        for number, run in enumerate(arguments.runs)
    ]


def _factor(time_factor: float, token_factor: float, run: str) -> str:
    missed = run in ("bin", "group") and time_factor < LEAST * token_factor
    return f"{time_factor:.2f}×" + (" (less than 0.8 of the tokens)" if missed else "")


def check(case: str, turn: dict[str, Measured]) -> None:
    """Stop unless all runs trained the same tokens with the same loss, and two in equal steps."""
    off = turn["off"]
    trained = sum(turn["off"]["trained"])
    for run, measured in turn.items():
        if measured["reason"]:
            sys.exit(f"{case}, {run} did not share: {measured['reason']}")
        if sum(measured["trained"]) != trained:
            sys.exit(f"{case}, {run} trained {sum(measured['trained'])} tokens, not {trained}")
        if not _close(_mean_loss(measured), _mean_loss(off)):
            sys.exit(f"{case}, {run}: loss {_mean_loss(measured)}, not {_mean_loss(off)}")
    for name in ("losses", "norms"):
        for ours, theirs in zip(turn.get("bin", off)[name], off[name], strict=True):
            if not _close(ours, theirs):
                sys.exit(f"{case}: {name} of a step differ: {theirs} apart, {ours} shared")


def _mean_loss(measured: Measured) -> float:
    pairs = zip(measured["losses"], measured["trained"], strict=True)
    return sum(loss * trained for loss, trained in pairs) / sum(measured["trained"])


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * abs(b)


if __name__ == "__main__":
    main()
