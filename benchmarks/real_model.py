"""Seconds and memory of one real model on real chats: TRL padded, TRL packed, and this package.

    python benchmarks/real_model.py --model PATH --data gsm8k_train.jsonl \\
        --output benchmarks/results/real_model.md --readme README.md     # about 10 minutes, 2 cores

Every run trains the same documents for one epoch, in a process that does nothing else, with TRL's
defaults (gradient checkpointing included) in float32. With `--turns 3` the runs take turns, so that
a machine with drifting speed favors none.

    TRL, padded       `--batch` documents a step, each a row as long as the longest of them
    trl_packing       the same documents in every step, in bins, without padding
    TRL, packed       one bin of `--max_length` tokens a step

Correctness comes first. The losses of the first two must agree in every step, and all three must
train every document once; otherwise nothing is published. Seconds are those of `train()`, which
include the isolation check. Memory is the largest resident set of the process (Linux).

`--data` is a JSON, JSONL or Parquet file, a folder of such files or a hub id, in any form that
recipes/recipe_data.py knows. `--readme` replaces the lines between the two comments that name this
script.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machine import ON_CPU, provenance, publish, table

PADDED, PACKED, OURS = "TRL, padded", "TRL, packed", "trl_packing"
RUNS = (PADDED, OURS, PACKED)
TOLERANCE = 1e-4  # relative; float32 rounding, which grows over the steps
SECONDS = ("seconds", "seconds_before_first_step", "cpu_seconds")
RESULTS = "benchmarks/results/real_model.md"
README_LINES = re.compile(r"(?<=<!-- benchmarks/real_model.py -->\n).*?(?=<!-- end -->)", re.S)

Turn = dict[str, dict[str, Any]]  # run -> what `train` returned


def main() -> None:
    arguments = parse()
    if arguments.run:
        arguments.result.write_text(json.dumps(train(arguments)))
        return
    turns = []
    for _ in range(arguments.turns):
        turns.append({run: in_own_process(run) for run in RUNS})
        check(turns[-1], arguments.documents)
    name = arguments.model_name
    text = f"# {name} on a CPU\n\n{report(turns, arguments)}\n{provenance()}"
    readme = readme_lines(turns, arguments)
    publish(text, arguments.output)
    print(f"\nfor the README:\n\n{readme}")
    if arguments.readme:
        replace_lines(arguments.readme, readme)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a model, or its hub id")
    parser.add_argument("--data", required=True, help="file, folder or hub id")
    parser.add_argument("--model_name", default="SmolLM2-135M", help="as written in the tables")
    parser.add_argument("--data_name", default="GSM8K chats", help="as written in the tables")
    parser.add_argument("--prompt_column", default="question")
    parser.add_argument("--completion_column", default="answer")
    parser.add_argument("--documents", type=int, default=64, help="the first ones of the data")
    parser.add_argument("--batch", type=int, default=8, help="documents of a padded step")
    parser.add_argument("--max_length", type=int, default=2048, help="tokens of a bin")
    parser.add_argument("--turns", type=int, default=1, help="runs of each trainer")
    parser.add_argument("--output", help="Markdown file to write")
    parser.add_argument("--readme", type=Path, help="file whose lines are replaced")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


# --- one run, in a process of its own -------------------------------------------------------------


def in_own_process(run: str) -> dict[str, Any]:
    """Return what `train` returns in a new process, whose peak memory is that of this run.

    This process must stay small: on Linux, a child inherits the peak of its parent.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--run", run, "--result", str(result)]
        # Threads that spin while they wait take the cores from other work, for every run alike.
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{run} failed:\n{done.stderr}")
        measured = json.loads(result.read_text())
    print(f"{run}: {measured['seconds']:.0f} s, {measured['gib']:.1f} GiB", file=sys.stderr)
    return measured


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train one epoch; return seconds, peak memory, and loss, documents and tokens of each step."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(arguments, folder)
        steps = watch(trainer)
        began, cpu_began = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
        first = steps.pop("began")[0] - began
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "seconds_before_first_step": first,
        "gib": gib,
        "losses": losses,
        **steps,
    }


def build(arguments: argparse.Namespace, folder: str) -> Any:
    """Return the trainer of `arguments.run`."""
    from trl_packing.recipes.recipe_data import DataArguments, load_data

    from trl import SFTConfig, SFTTrainer

    from trl_packing import PackedSFTConfig, PackedSFTTrainer

    classes = (SFTConfig, SFTTrainer)
    changes: dict[str, Any] = {"packing": True, "per_device_train_batch_size": 1}
    if arguments.run == PADDED:
        changes = {"packing": False, "per_device_train_batch_size": arguments.batch}
    elif arguments.run == OURS:
        classes = (PackedSFTConfig, PackedSFTTrainer)
        changes["documents_per_step"] = arguments.batch
    data = DataArguments(
        dataset_name=arguments.data,
        prompt_column=arguments.prompt_column or None,
        completion_column=arguments.completion_column or None,
    )
    named = PackedSFTConfig(folder, bf16=False)
    rows = load_data(data, named, SimpleNamespace(chat_template="any"))[0].take(arguments.documents)
    args = classes[0](
        output_dir=folder,
        max_length=arguments.max_length,
        num_train_epochs=1,
        logging_steps=1,
        dataloader_pin_memory=False,
        **ON_CPU,
        **changes,
    )
    return classes[1](arguments.model, args, train_dataset=rows)


def watch(trainer: Any) -> dict[str, list[Any]]:
    """Return lists that will hold the start, the documents and the tokens of each step."""
    steps: dict[str, list[Any]] = {"began": [], "documents": [], "tokens": [], "computed": []}
    compute = trainer.training_step

    def counted(model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        mask, boundaries = inputs.get("attention_mask"), inputs.get("cu_seq_lens_q")
        size = inputs["input_ids"].numel()
        documents = len(inputs["input_ids"]) if boundaries is None else len(boundaries) - 1
        steps["began"].append(time.perf_counter())
        steps["documents"].append(documents)
        steps["tokens"].append(size if mask is None else int(mask.sum()))
        steps["computed"].append(size)
        return compute(model, inputs, *rest)

    trainer.training_step = counted
    return steps


# --- the results ----------------------------------------------------------------------------------


def check(turn: Turn, documents: int) -> None:
    """Stop unless all runs trained the same tokens, and two of them with the same losses."""
    tokens = sum(turn[PADDED]["tokens"])
    for run, measured in turn.items():
        counted = sum(measured["documents"]), sum(measured["tokens"])
        if counted != (documents, tokens):
            sys.exit(f"{run} trained {counted} documents and tokens, not {(documents, tokens)}")
    for padded, ours in zip(turn[PADDED]["losses"], turn[OURS]["losses"], strict=True):
        if abs(padded - ours) > TOLERANCE * padded:
            sys.exit(f"the losses of a step differ: {padded} padded, {ours} here")


def medians(turns: list[Turn], run: str) -> tuple[float, float]:
    """Return the median seconds and the largest memory of a run."""
    seconds = statistics.median(turn[run]["seconds"] for turn in turns)
    return seconds, max(turn[run]["gib"] for turn in turns)


def report(turns: list[Turn], arguments: argparse.Namespace) -> str:
    """Return the settings, a table of the runs, and one of the losses."""
    header = ["", "seconds", "before the first step", "CPU seconds", "peak memory, GiB"]
    header += ["documents of each step", "tokens computed"]
    rows = []
    for run in RUNS:
        first = turns[0][run]
        (seconds, gib) = medians(turns, run)
        each = [", ".join(f"{turn[run][key]:.0f}" for turn in turns) for key in SECONDS]
        if len(turns) > 1:
            each[0] = f"{seconds:.0f} ({each[0]})"
        documents = ", ".join(map(str, first["documents"]))
        rows.append([run, *each, f"{gib:.1f}", documents, f"{sum(first['computed']):,}"])
    losses = [turns[0][run]["losses"] for run in (PADDED, OURS)]
    loss_rows = [
        [str(step), f"{padded:.6f}", f"{ours:.6f}"]
        for step, (padded, ours) in enumerate(zip(*losses, strict=True), 1)
    ]
    medians_of = ", the median (and those of each turn)" if len(turns) > 1 else ""
    return (
        f"{arguments.documents} {arguments.data_name} of {sum(turns[0][OURS]['tokens']):,} tokens "
        f"in all, max_length={arguments.max_length}, float32, TRL's defaults (gradient "
        f"checkpointing is on). Seconds are those of `train()`{medians_of}.\n\n"
        f"{table(header, rows)}\n"
        f"## Losses of the steps of {arguments.batch} documents\n\n"
        f"{table(['step', PADDED, OURS], loss_rows)}"
    )


def readme_lines(turns: list[Turn], arguments: argparse.Namespace) -> str:
    """Return the README's sentence and table."""
    measured = {run: medians(turns, run) for run in RUNS}
    faster, smaller = (
        padded / ours for padded, ours in zip(measured[PADDED], measured[OURS], strict=True)
    )
    trl = f"TRL {'.'.join(version('trl').split('.')[:2])}"
    names = {
        PADDED: f"{trl}, padded: {arguments.batch} documents a step",
        PACKED: f"{trl}, packed: {arguments.max_length:,} tokens a step",
        OURS: "**trl_packing**: the steps of the padded run",
    }
    title = f"{arguments.model_name}, {arguments.documents} {arguments.data_name}"
    lines = [f"| {title} | training | peak memory |", "| --- | ---: | ---: |"]
    for run, name in names.items():
        seconds, gib = measured[run]
        lines.append(f"| {name} | {seconds:.0f} s | {gib:.1f} GiB |")
    sentence = (
        f"- **{faster:.1f}× as fast** as TRL's padded run, with {1 / smaller:.0%} of its memory: "
        f"a real model on {os.cpu_count()} CPU cores in float32 ([details]({RESULTS})).\n"
    )
    return "\n".join([sentence, *lines]) + "\n"


def replace_lines(readme: Path, lines: str) -> None:
    """Replace the lines of `readme` between the two comments."""
    text, number = README_LINES.subn(lambda _: lines, readme.read_text())
    if number != 1:
        sys.exit(f"{readme} must hold <!-- benchmarks/real_model.py --> and <!-- end --> once")
    readme.write_text(text)


if __name__ == "__main__":
    main()
