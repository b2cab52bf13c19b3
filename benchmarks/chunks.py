"""Memory and time of a step on one long document: as a whole, checkpointed, and in chunks.

    python benchmarks/chunks.py --output benchmarks/results/chunks.md        # about 5 minutes

A Llama of 4 layers × 512 hidden trains a document of `--tokens` tokens a step by PackedSFTTrainer.
Each way runs in a process of its own; the losses of all must agree first. Memory is the largest
resident set of the process, beyond that before the first step.
"""

import argparse
import resource
import tempfile
import time
import warnings
from typing import Any

import step
import torch
from datasets import Dataset
from machine import ON_CPU, in_process, provenance, publish, table
from transformers import TrainerCallback

from trl_packing import PackedSFTConfig, PackedSFTTrainer

WAYS: dict[str, dict[str, Any]] = {
    "as a whole": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "chunks of 1/4": {"max_tokens_in_memory": 4},
    "chunks of 1/8": {"max_tokens_in_memory": 8},
}


class Timer(TrainerCallback):
    """Keeps the CPU seconds of each step, and the memory before the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.seconds:
            self.before = peak()
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.process_time() - self.began)


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(way: str, tokens: int, result: Any) -> None:
    """Send the losses of two steps, CPU seconds of the second, and MiB beyond those before."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    settings = {"gradient_checkpointing": False} | WAYS[way]
    if "max_tokens_in_memory" in settings:
        settings["max_tokens_in_memory"] = tokens // settings["max_tokens_in_memory"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1024, (2, tokens), generator=generator).tolist()
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        args = PackedSFTConfig(
            folder,
            max_length=tokens,
            packing=False,
            per_device_train_batch_size=1,
            max_steps=2,
            logging_steps=1,
            isolation_check="off",
            **ON_CPU,
            **settings,
        )
        trainer = PackedSFTTrainer(
            step.model(1024, "fp32", tokens),
            args,
            train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
            processing_class=step.tiny_tokenizer(),
            callbacks=[timer],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result.send((losses, timer.seconds[-1], peak() - timer.before))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the document")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    rows = []
    first: Any = None
    for way in WAYS:
        losses, seconds, mib = in_process(measure, way, arguments.tokens)
        first = first or (losses, seconds, mib)
        assert max(abs(a - b) for a, b in zip(losses, first[0], strict=True)) < 1e-4, losses
        ratios = [f"{seconds / first[1]:.2f}", f"{mib / first[2]:.2f}"]
        rows.append([way, f"{seconds:.1f}", ratios[0], f"{mib:,.0f}", ratios[1]])
        print(*rows[-1], flush=True)
    header = ["a document", "CPU s a step", "÷ whole", "MiB", "÷ whole"]
    title = f"# A step on one document of {arguments.tokens:,} tokens on a CPU"
    publish(f"{title}\n\n{table(header, rows)}\n{provenance()}", arguments.output)


if __name__ == "__main__":
    main()
