"""Shared prefixes: tokens and time of a step against the same documents apart.

    python benchmarks/prefixes.py --output benchmarks/results/prefixes.md      # about 2 minutes

A Llama of 4 layers × 256 hidden runs forward and backward over one row of documents, with its
prefixes shared and apart, in turns. Gradients of both must agree first. Making the row is timed
alone too, because a GPU may wait for it. Whole runs of a trainer are in prefix_runs.py, finding
prefixes in a data set in find_prefixes.py.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from machine import provenance, publish, table
from transformers import LlamaConfig, LlamaForCausalLM

from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention.install import install_attention

VOCABULARY = 1024
MOST_DIFFERENT = 5e-6  # of gradients, relative: float32 sums in another order


def answers(number: int, prompt: int, answer: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    first = rng.integers(5, VOCABULARY, prompt)
    return [np.concatenate([first, rng.integers(5, VOCABULARY, answer)]) for _ in range(number)]


CASES = {
    "16 answers of 128 tokens to a prompt of 512": answers(16, 512, 128),
    "4 answers of 128 tokens to a prompt of 2,048": answers(4, 2048, 128),
    "40 documents of 200 tokens, a system prompt of 31": answers(40, 31, 169),
    "40 documents of 200 tokens, nothing in common": answers(40, 0, 200),
}

ROWS = CASES | {
    "16 answers of 100 tokens to each of 10 prompts of 100": [
        document for seed in range(10) for document in answers(16, 100, 100, seed)
    ],
    "320 documents of 50 tokens, a system prompt of 30": answers(320, 30, 20),
}


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
    install_attention(model, resolve_attention(model))
    return model


def step(model: LlamaForCausalLM, documents: list[np.ndarray], shared: bool) -> tuple[float, int]:
    """Return CPU seconds of collation, forward and backward, and the tokens computed."""
    start = time.process_time()
    batch = PackedCollator(shares_prefixes=shared)([{"input_ids": d} for d in documents])
    labels, weights = batch.pop("labels"), batch.pop("loss_weights", None)
    batch.pop("target_counts", None)
    log_probs = model(**batch).logits.float().log_softmax(-1)[0, :-1]
    scores = log_probs.gather(-1, labels[0, 1:, None].clamp(min=0))[:, 0]
    if weights is None:
        weights = (labels != -100).float()
    model.zero_grad()
    (scores * weights[0, 1:]).sum().neg().backward()
    return time.process_time() - start, labels.shape[1]


def gradients(model: LlamaForCausalLM) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def measure(model: LlamaForCausalLM, documents: list[np.ndarray], turns: int) -> list[str]:
    found = []
    for shared in (False, True):
        step(model, documents, shared)
        found.append(gradients(model).clone())
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert error < MOST_DIFFERENT, f"gradients differ by {error:.1e}"
    times: dict[bool, list[tuple[float, int]]] = {False: [], True: []}
    for _ in range(turns):
        for shared, results in times.items():
            results.append(step(model, documents, shared))
    (apart, tokens), (together, fewer) = (
        (statistics.median(seconds for seconds, _ in times[s]), times[s][0][1]) for s in times
    )
    return [
        f"{tokens:,} → {fewer:,}",
        f"{tokens / fewer:.2f}×",
        f"{apart:.2f} → {together:.2f}",
        f"{apart / together:.2f}×",
        f"{error:.0e}",
    ]


def measure_row(documents: list[np.ndarray], turns: int) -> list[str]:
    """Return a line of the table: milliseconds that a row takes, apart and shared."""
    rows = [{"input_ids": d, "labels": d} for d in documents]
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(3 * turns):
        for shared, results in times.items():
            collate = PackedCollator(shares_prefixes=shared, tensors_only=True)
            start = time.process_time()
            collate(rows)
            results.append(1000 * (time.process_time() - start))
    medians = [statistics.median(results) for results in times.values()]
    return [f"{len(documents)}", f"{sum(map(len, documents)):,}", *(f"{m:.2f}" for m in medians)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output")
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    rows = [[name, *measure_row(docs, arguments.turns)] for name, docs in ROWS.items()]
    model = small_llama()
    steps = [[name, *measure(model, docs, arguments.turns)] for name, docs in CASES.items()]
    text = "\n".join(
        [
            "# Shared prefixes\n",
            "A step (collation, forward, backward) of a small Llama, apart → shared, in turns:\n",
            table(["documents", "tokens", "", "CPU s", "", "gradients differ by"], steps),
            "Making a row, CPU milliseconds:\n",
            table(["", "documents", "tokens", "apart", "shared"], rows),
            provenance(("torch", "transformers")),
        ]
    )
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
