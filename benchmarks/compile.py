"""torch.compile over packed micro-batches on CPU, with and without static_shapes.

    python benchmarks/compile.py --output benchmarks/results/compile.md    # about 4 minutes

The trainer trains a Llama on documents of 16 to 200 tokens, packed into bins of 1,024. Each variant
runs in a separate process, on the same documents and bins. A graph is a forward graph that reaches
the backend (`torch._dynamo.utils.counters`). Times are CPU seconds of one core (one thread, the C++
compiler included), so that other work on the machine matters little. Compiling costs the time of
the first steps beyond the median of the later ones. The losses of all variants must agree first.
"""

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from machine import in_process, provenance, publish, table
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from trl_packing import PackedSFTConfig, PackedSFTTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.tiny import tiny_tokenizer

CAPACITY = 1024
VOCABULARY = 1024
FIRST = 8  # steps that may still compile graphs
COMPILED = {"torch_compile": True, "torch_compile_backend": "inductor"}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, static_shapes": {"static_shapes": True},
    "compiled": COMPILED,
    "compiled, static_shapes": COMPILED | {"static_shapes": True},
}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the compilers that it has started."""
    return sum(os.times()[:4])


class StepTimer(TrainerCallback):
    """Keep the CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = cpu_seconds()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(cpu_seconds() - self.began)


def documents(steps: int) -> Dataset:
    """Return documents of 16 to 200 tokens that fill a few more bins than `steps`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 200, (steps + 2) * CAPACITY // 107)
    return Dataset.from_list([{"input_ids": rng.integers(3, VOCABULARY, n)} for n in lengths])


def measure(options: dict[str, Any], steps: int, layers: int, result: Any) -> None:
    """Train in this process; send seconds of steps, losses, graphs, breaks and the report."""
    from torch._dynamo.utils import counters

    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    timer = StepTimer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=CAPACITY,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = PackedSFTTrainer(
            model,
            PackedSFTConfig(
                output_dir=folder,
                max_length=CAPACITY,
                per_device_train_batch_size=1,
                max_steps=steps,
                gradient_checkpointing=False,
                use_cpu=True,
                bf16=False,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **options,
            ),
            train_dataset=documents(steps),
            processing_class=tiny_tokenizer(),
            callbacks=[timer],
        )
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    graphs = counters["stats"]["unique_graphs"]
    padding = 1 - (trainer.packing_report.utilization or 1)
    result.send((timer.seconds, losses, graphs, padding))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    # These are read when a process starts. Compile in the process, so that its time is counted.
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",  # each variant compiles its graphs
    }
    rows = []
    expected = None
    for name, options in VARIANTS.items():
        seconds, losses, graphs, padding = in_process(
            measure, options, arguments.steps, arguments.layers
        )
        expected = expected or losses
        assert np.allclose(losses, expected, rtol=1e-3), (name, losses, expected)
        median = statistics.median(seconds[FIRST:])
        lost = sum(seconds[:FIRST]) - FIRST * median
        rows.append(
            [
                name,
                str(graphs),
                f"{1e3 * median:,.0f}",
                f"{lost:,.0f}" if graphs else "–",
                f"{padding:.2%}",
            ]
        )
    header = ["run", "graphs", "CPU ms a step", "CPU s to compile", "padding"]
    text = f"# torch.compile on packed micro-batches, CPU\n\n{table(header, rows)}\n{provenance()}"
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
