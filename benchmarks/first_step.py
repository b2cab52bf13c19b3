"""Seconds from the start of Python to the end of the first step, stage by stage, beside TRL packed.

    python benchmarks/first_step.py --model PATH --data gsm8k_train.jsonl \\
        --output benchmarks/results/first_step.md                       # about 10 minutes, 2 cores

    import         the trainer and its config
    load           tokenizer, model and rows
    prepare        the constructor: rows become documents
    before         train() up to the first step: loader, check of isolation
    step           the first one

Two runs: the model of `--model` on all rows of `--data` as messages, and a random Llama of 4 layers
× 512 hidden on documents of 256 tokens that come tokenized, in rows of 4,096. Each runs in its own
process with an empty cache, and the trainers take turns; a stage is the median of the turns. The
ratio is of CPU seconds. Threads do not spin while they wait (OMP_WAIT_POLICY).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ON_CPU, provenance, publish, table

START = time.perf_counter()  # libraries are imported inside of functions, which time them
CLASSES = ("trl", "trl_packing")
RUNS = {"model": "on all rows as messages", "llama": "Llama of 4 layers, 256-token documents"}
STAGES = ("import", "load", "prepare", "before", "step")


class Stages:
    """The wall and CPU seconds at which each stage has ended."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[float, float]] = {}
        self._before = (START, 0.0)

    def end(self, name: str) -> None:
        """Note that stage `name` ends now; no-op if it has ended before."""
        if name not in self.found:
            now = time.perf_counter(), time.process_time()
            self.found[name] = now[0] - self._before[0], now[1] - self._before[1]
            self._before = now


def child(arguments: argparse.Namespace) -> None:
    """Train one step in this process, and print the seconds of its stages as JSON."""
    stages = Stages()
    if arguments.trainer == "trl":
        from trl import SFTConfig as Config
        from trl import SFTTrainer as Trainer
    else:
        from trl_packing import PackedSFTConfig as Config
        from trl_packing import PackedSFTTrainer as Trainer
    stages.end("import")
    from transformers import TrainerCallback

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
            stages.end("before")

        def on_step_end(self, *_: Any, **kwargs: Any) -> None:
            stages.end("step")

    model, tokenizer, rows, max_length = load(arguments)
    stages.end("load")
    with tempfile.TemporaryDirectory() as folder:
        args = Config(
            folder,
            packing=True,
            max_length=max_length,
            per_device_train_batch_size=1,
            max_steps=1,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            **ON_CPU,
        )
        trainer = Trainer(
            model, args, train_dataset=rows, processing_class=tokenizer, callbacks=[Timer()]
        )
        stages.end("prepare")
        trainer.train()
    Path(arguments.child).write_text(json.dumps(stages.found))


def load(arguments: argparse.Namespace) -> tuple[Any, Any, Any, int]:
    """Return model, tokenizer, rows and the length of rows of a run."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.run == "llama":
        import step

        return step.model(1024, "fp32", 4096), tokenizer, step.documents(4096, 1024, 64), 4096
    rows = load_dataset("json", data_files=arguments.data, split="train")
    user, answer = arguments.prompt_column, arguments.completion_column

    def as_messages(row: dict[str, str]) -> dict[str, Any]:
        question = {"role": "user", "content": row[user]}
        return {"messages": [question, {"role": "assistant", "content": row[answer]}]}

    rows = rows.map(as_messages, remove_columns=rows.column_names)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32")
    return model, tokenizer, rows, 1024


def measured(trainer: str, run: str) -> dict[str, tuple[float, float]]:
    """Return what `child` measures in a new process with an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *sys.argv, "--child", str(result)]
        environment = os.environ | {"HF_HOME": folder, "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(
            [*command, "--trainer", trainer, "--run", run],
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            sys.exit(f"{trainer} failed:\n{done.stderr}")
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of a model with a chat template")
    parser.add_argument("--model_name", default="SmolLM2-135M", help="as written in the table")
    parser.add_argument("--data", required=True, help="a JSONL file")
    parser.add_argument("--prompt_column", default="question")
    parser.add_argument("--completion_column", default="answer")
    parser.add_argument("--runs", nargs="*", default=[*RUNS], choices=[*RUNS])
    parser.add_argument("--turns", type=int, default=3, help="runs of each trainer")
    parser.add_argument("--output", help="Markdown file to write")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", choices=CLASSES, help=argparse.SUPPRESS)
    parser.add_argument("--run", choices=[*RUNS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    text = "# From the start of Python to the end of the first step\n"
    for run in arguments.runs:
        turns = []
        for _ in range(arguments.turns):
            turns.append({trainer: measured(trainer, run) for trainer in CLASSES})
            print(run, turns[-1], file=sys.stderr, flush=True)
        name = f"{arguments.model_name} " if run == "model" else ""
        text += f"\n{name}{RUNS[run]}:\n\n{stage_table(turns)}"
    publish(f"{text}\n{provenance()}", arguments.output)


def stage_table(turns: list[dict[str, Any]]) -> str:
    """Return the medians of all stages of both trainers as a table."""

    def median(trainer: str, stage: str, kind: int) -> float:
        return statistics.median(turn[trainer][stage][kind] for turn in turns)

    rows = []
    sums = [0.0] * 4
    for stage in STAGES:
        numbers = [median(trainer, stage, kind) for kind in (0, 1) for trainer in CLASSES]
        sums = [total + number for total, number in zip(sums, numbers, strict=True)]
        rows.append([stage, *(f"{number:.2f}" for number in numbers)])
        rows[-1].append(f"{numbers[3] / numbers[2]:.2f}")
    rows.append(["in all", *(f"{number:.2f}" for number in sums), f"{sums[3] / sums[2]:.2f}"])
    return table(["stage", "TRL, s", "here, s", "TRL, CPU s", "here, CPU s", "ratio"], rows)


if __name__ == "__main__":
    main()
