"""Time of a packed training step on CPU, compared with TRL's packing=True.

    python benchmarks/step.py --output benchmarks/results/step.md      # about 10 minutes, 2 cores

A Llama of 4 layers × 512 hidden trains on documents of about 256 tokens; a third of each is prompt.
Each trainer runs in a separate process, as for a user, on the same documents in rows of T tokens.
The processes take turns, so that a machine with drifting speed favors neither. They do not take
turns at every step, because a waiting process loses memory pages, and the faster one would wait
longer. A step is the time between `on_step_begin` and `on_step_end`. A turn is the median of its
steps after a warm-up, and the ratio is the median over pairs of turns. The losses of both must
agree first (on Llama, TRL's packed rows are exact too).

The floor is the time of nothing but the matrix products of the linear layers, forward and backward,
the head's on trained positions only, in a process of its own. Every exact step computes them.

`--keep-pages` gives TRL the same allocator settings, which keep freed pages
(trl_packing/training/malloc.py).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from machine import ON_CPU, in_process, provenance, publish, table
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.tiny import tiny_tokenizer

# (tokens a row, vocabulary, dtype, promised ratio)
CASES = [
    (4096, 1024, "fp32", 2.5),
    (8192, 1024, "fp32", 4.0),
    (16384, 1024, "fp32", 7.0),
    (4096, 32000, "fp32", 3.0),
    (4096, 1024, "bf16", 2.5),
    (4096, 32000, "bf16", 3.0),
]
DOCUMENT = 256
WARM_UP = 2  # steps that still grow the allocator's memory

KEEP_PAGES = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
}


@dataclass
class StepTimer(TrainerCallback):
    """Times `steps` full steps after the warm-up, then ends the run.

    Holds their seconds a token, and the losses of all steps.
    """

    full: int
    steps: int
    seconds_a_token: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    tokens_before: float = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.perf_counter() - self.began

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            num_tokens = logs["num_tokens"] - self.tokens_before
            self.tokens_before = logs["num_tokens"]
            is_full = num_tokens > 0.9 * self.full  # the last row of an epoch is shorter
            if state.global_step > WARM_UP and is_full:
                self.seconds_a_token.append(self.seconds / num_tokens)
            control.should_training_stop = len(self.seconds_a_token) >= self.steps


def documents(num_tokens: int, vocabulary: int, rows: int) -> Dataset:
    """Return documents of lengths around `DOCUMENT` that fill `rows` rows to the last token."""
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(rows * num_tokens // (2 * DOCUMENT)):
        shift = int(torch.randint(0, DOCUMENT // 2, (), generator=generator))
        for length in (DOCUMENT - shift, DOCUMENT + shift):  # pairs of 2 × DOCUMENT tokens
            ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
            prompt = length // 3
            examples.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return Dataset.from_list(examples)


def model(vocabulary: int, dtype: str, max_length: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        max_position_embeddings=max_length,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16 if dtype == "bf16" else torch.float32)


def trainer(trainer_class: type, case: tuple, timer: StepTimer, folder: str) -> SFTTrainer:
    num_tokens, vocabulary, dtype, _ = case
    return trainer_class(
        model(vocabulary, dtype, num_tokens),
        SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=num_tokens,
            per_device_train_batch_size=1,
            max_steps=WARM_UP + timer.steps + 1,
            gradient_checkpointing=False,
            logging_steps=1,
            learning_rate=0.0,
            **ON_CPU,
        ),
        train_dataset=documents(num_tokens, vocabulary, rows=WARM_UP + timer.steps + 2),
        processing_class=tiny_tokenizer(),
        callbacks=[timer],
    )


def measure(trainer_class: type, case: tuple, steps: int, result: Any) -> None:
    """Train in this process; send the seconds for each token of a step, and the mean loss."""
    warnings.filterwarnings("ignore")
    timer = StepTimer(case[0], steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer(trainer_class, case, timer, folder).train()
    result.send((statistics.median(timer.seconds_a_token), statistics.mean(timer.losses)))


def measure_products(case: tuple, times: int, result: Any) -> None:
    """Send the seconds a token of the products of all linear layers, forward and backward."""
    num_tokens, vocabulary, dtype, _ = case
    trained = model(vocabulary, dtype, num_tokens)
    head = trained.get_output_embeddings()
    layers = [module for module in trained.modules() if isinstance(module, nn.Linear)]
    inputs = {}  # by shape, so that all lie in memory before the clock runs
    for layer in layers:
        rows = num_tokens * 2 // 3 if layer is head else num_tokens  # a third is prompt
        made = torch.randn(rows, layer.in_features), torch.randn(rows, layer.out_features)
        inputs[layer.weight.shape] = [tensor.to(layer.weight.dtype) for tensor in made]
    seconds = []
    with torch.no_grad():
        for _ in range(times + 1):
            began = time.perf_counter()
            for layer in layers:
                x, gradient = inputs[layer.weight.shape]
                torch.mm(x, layer.weight.t())
                torch.mm(gradient, layer.weight)
                torch.mm(gradient.t(), x)
            seconds.append(time.perf_counter() - began)
    result.send(statistics.median(seconds[1:]) / num_tokens)


def compare(case: tuple, steps: int, turns: int) -> list[str]:
    num_tokens, vocabulary, dtype, promised = case
    pairs = []
    floors = []
    for _ in range(turns):
        floors.append(in_process(measure_products, case, 2 * steps))
        (trl, trl_loss), (ours, our_loss) = (
            in_process(measure, trainer_class, case, steps)
            for trainer_class in (SFTTrainer, PackedSFTTrainer)
        )
        # Random weights and learning rate 0, so that steps differ only by their tokens.
        assert abs(trl_loss - our_loss) < 0.01 * trl_loss, (trl_loss, our_loss)
        pairs.append((trl, ours))
    ratio = statistics.median(theirs / own for theirs, own in pairs)
    floor = statistics.median(own / bare for (_, own), bare in zip(pairs, floors, strict=True))
    microseconds = [1e6 * statistics.median(column) for column in zip(*pairs, strict=True)]
    return [
        f"{num_tokens:,}",
        f"{vocabulary:,}",
        dtype,
        *(f"{number:,.0f}" for number in microseconds),
        f"{1e6 * statistics.median(floors):,.0f}",
        f"{floor:.2f}",
        f"{ratio:.1f}×",
        f"≥ {promised}×" + ("" if ratio >= promised else " (missed)"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=2, help="turns of each trainer")
    parser.add_argument("--cases", type=int, nargs="*", help="indices of cases, default all")
    parser.add_argument("--keep-pages", action="store_true", help="both keep freed pages")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    if arguments.keep_pages and not KEEP_PAGES.items() <= os.environ.items():
        # The allocator reads these when the process starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEEP_PAGES)
    warnings.filterwarnings("ignore")
    chosen = [CASES[i] for i in arguments.cases] if arguments.cases else CASES
    rows = [compare(case, arguments.steps, arguments.turns) for case in chosen]
    header = ["row T", "vocabulary", "dtype", "TRL µs/token", "ours µs/token", "floor µs/token"]
    header += ["ours / floor", "ratio", "promised"]
    text = f"# A packed training step on CPU\n\n{table(header, rows)}\n{provenance()}"
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
