"""Memory and time of a step on one long document: as a whole, checkpointed, and in chunks.

    python benchmarks/chunks.py --output benchmarks/results/chunks.md        # about 5 minutes
    python benchmarks/chunks.py --tokens 32768 --steps 1                     # 25 minutes
    python benchmarks/chunks.py --lengths 8192 16384 32768 65536 131072      # 10 minutes

A Llama of 4 layers × 512 hidden trains a document of `--tokens` tokens a step by PackedSFTTrainer.
Each way runs in a process of its own; the losses of all must agree first. Memory is the largest
resident set of the process, beyond that before the first step.

`--lengths` are those of documents in chunks of 4,096 tokens, of a Llama of 2 layers × 128 hidden.
Keys and values are there twice: kept, and as their gradients.
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
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from trl_packing import PackedSFTConfig, PackedSFTTrainer

# Whether a way checkpoints, and the chunks of a document.
WAYS = {
    "as a whole": (False, 1),
    "gradient checkpointing": (True, 1),
    "chunks of 1/4": (False, 4),
    "chunks of 1/8": (False, 8),
}
CHUNK = 4096
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 384, "head_dim": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


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


def measure(
    tokens: int, checkpoints: bool, chunks: int, steps: int, small: bool, result: Any
) -> None:
    """Send the losses of steps, CPU seconds of the last, and MiB beyond those before the first."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    trained = step.model(1024, "fp32", tokens)
    if small:
        config = LlamaConfig(**trained.config.to_dict() | SMALL)
        trained = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1024, (2, tokens), generator=generator).tolist()
    timer = Timer()
    with tempfile.TemporaryDirectory() as folder:
        args = PackedSFTConfig(
            folder,
            max_length=tokens,
            packing=False,
            per_device_train_batch_size=1,
            max_steps=steps,
            logging_steps=1,
            isolation_check="off",
            gradient_checkpointing=checkpoints,
            max_tokens_in_memory=tokens // chunks if chunks > 1 else None,
            **ON_CPU,
        )
        trainer = PackedSFTTrainer(
            trained,
            args,
            train_dataset=Dataset.from_list([{"input_ids": row} for row in ids]),
            processing_class=step.tiny_tokenizer(),
            callbacks=[timer],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    result.send((losses, timer.seconds[-1], peak() - timer.before))


def over_lengths(lengths: list[int]) -> list[list[str]]:
    """Return a row for each length of a document in chunks."""
    rows = []
    for tokens in lengths:
        _, seconds, mib = in_process(measure, tokens, False, tokens // CHUNK, 1, True)
        held = 2 * 2 * SMALL["num_hidden_layers"] * SMALL["hidden_size"] * 4 * tokens / 2**20
        numbers = [tokens, seconds, mib, held, mib - held]
        rows.append([f"{number:,.0f}" for number in numbers])
        print(*rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192, help="of the document")
    parser.add_argument("--steps", type=int, default=2, help="of which the last one is timed")
    parser.add_argument("--lengths", nargs="*", type=int, help="of documents in chunks of 4,096")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, help="to measure")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    if arguments.lengths:
        header = ["tokens", "CPU s a step", "MiB", "of keys, values, gradients", "of the rest"]
        title = "# Memory of a step on one document in chunks of 4,096 tokens on a CPU"
        rows = over_lengths(arguments.lengths)
        publish(f"{title}\n\n{table(header, rows)}\n{provenance()}", arguments.output)
        return
    rows = []
    first: Any = None
    for way in arguments.ways:
        checkpoints, chunks = WAYS[way]
        losses, seconds, mib = in_process(
            measure, arguments.tokens, checkpoints, chunks, arguments.steps, False
        )
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
