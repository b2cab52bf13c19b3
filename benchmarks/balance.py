"""The cost of balancing ranks in fairness, by window size, and the time of planning.

    python benchmarks/balance.py --output benchmarks/results/balance.md

A slot is the set of micro-batches that all ranks run at the same time. It lasts as long as its
costliest one. Each step should still be a fair sample. Compared with steps of random bins:

    max / mean         cost of a slot's costliest micro-batch over their mean, mean over slots
    document length    std over steps of the mean length of their documents, ÷ that of random steps
    token's length     the same for the mean length of a token's document: Σ len² / Σ len

Accumulation is 1, the hardest case: each step is one slot. About a minute on an idle core.
"""

import argparse
import os
import resource
import subprocess
import sys
import time

import numpy as np
from machine import provenance, publish, table

from trl_packing.packing.bins import PackingPlan, pack
from trl_packing.packing.sampler import PackedBatchSampler

ATTENTION_COST = 1 / (12 * 4096)  # an 8B Llama
RANKS = (8, 64, 512)
WINDOWS = (1, 4, 8, 16, 32, 64, 128, 256)
NUM_BINS = 512 * 256


def chat(number: int) -> np.ndarray:
    """Return log-normal lengths, mean 300, up to 8,192."""
    drawn = np.random.default_rng(0).lognormal(np.log(300) - 0.9**2 / 2, 0.9, number)
    return drawn.clip(16, 8192).astype(np.int32)


def wide(number: int) -> np.ndarray:
    """Return log-normal lengths, mean 1,000, cut at 32,768."""
    drawn = np.random.default_rng(0).lognormal(np.log(1000) - 1.4**2 / 2, 1.4, number)
    return drawn.clip(16, 32768).astype(np.int32)


def heavy(number: int) -> np.ndarray:
    """Return log-normal lengths with a Pareto tail, cut at 32,768."""
    rng = np.random.default_rng(0)
    drawn = rng.lognormal(np.log(500) - 0.9**2 / 2, 0.9, number)
    is_long = rng.random(number) < 0.03
    drawn[is_long] = 2000 * (1 + rng.pareto(1.1, is_long.sum()))
    return drawn.clip(16, 32768).astype(np.int32)


SETS = {
    "log-normal (mean 300, σ 0.9) at 8,192": (chat, 8192),
    "log-normal (mean 1,000, σ 1.4) at 32,768": (wide, 32768),
    "log-normal (mean 500, σ 0.9), 3 % Pareto from 2,000 (α 1.1), at 32,768": (heavy, 32768),
}


class Bins:
    """A plan of about NUM_BINS bins, and sums over the documents of each bin."""

    def __init__(self, draw, capacity: int):
        mean = draw(100_000).mean()
        self.lengths = draw(int(NUM_BINS * 1.001 * capacity / mean))
        self.plan: PackingPlan = pack(self.lengths, capacity, seed=0)
        of_documents = self.lengths[self.plan.indices].astype(np.int64)
        self.squares = np.add.reduceat(of_documents**2, self.plan.offsets[:-1])
        self.documents = np.diff(self.plan.offsets)
        self.costs = self.plan.tokens + ATTENTION_COST * self.squares

    def steps(self, ranks: int, window: int, *, accumulation: int = 1, seed: int = 0) -> np.ndarray:
        """Return the bins of all full steps, (steps, ranks × accumulation)."""
        sampler = PackedBatchSampler(
            self.lengths,
            rows=True,
            num_ranks=ranks,
            accumulation=accumulation,
            balance_window=window,
            seed=seed,
        )
        bins, _ = sampler.arranged_bins(self.plan, self.costs.astype(np.int64))
        bins = bins.reshape(-1, ranks * accumulation)
        assert len(np.unique(bins)) == bins.size, "a bin is in two steps"
        return bins

    def sorted_steps(self, ranks: int) -> np.ndarray:
        """Return the whole epoch sorted by cost: the best balance, with unfair steps."""
        whole = len(self.costs) // ranks * ranks
        return np.argsort(-self.costs)[:whole].reshape(-1, ranks)

    def measured(self, steps: np.ndarray, ranks: int) -> np.ndarray:
        """Return max / mean, and the variations of both means of length."""
        slots = self.costs[steps].reshape(-1, ranks)
        tokens = self.plan.tokens[steps].sum(1)
        return np.array(
            [
                (slots.max(1) / slots.mean(1)).mean(),
                (tokens / self.documents[steps].sum(1)).std(),
                (self.squares[steps].sum(1) / tokens).std(),
            ]
        )

    def row(self, name: str, ranks: int, steps: np.ndarray, at_random: np.ndarray) -> list[str]:
        unevenness, *variations = self.measured(steps, ranks)
        ratios = [f"{v / r:.2f}×" for v, r in zip(variations, at_random[1:], strict=True)]
        return [name, f"{unevenness:.3f}", *ratios]


HEADER = ["max / mean", "document length", "token's length"]


def over_windows(bins: Bins) -> str:
    rows = []
    for ranks in RANKS:
        at_random = bins.measured(bins.steps(ranks, 1), ranks)
        for window in WINDOWS:
            name = "1 (random)" if window == 1 else str(window)
            row = bins.row(name, ranks, bins.steps(ranks, window), at_random)
            rows.append([str(ranks), *row])
        row = bins.row("epoch sorted by cost", ranks, bins.sorted_steps(ranks), at_random)
        rows.append([str(ranks), *row])
    return table(["ranks", "window", *HEADER], rows)


def planning() -> str:
    """Plan in a separate process, so that its peak memory is that of planning."""
    load = os.getloadavg()[0]
    done = subprocess.run(
        [sys.executable, __file__, "--child"], capture_output=True, text=True, check=True
    )
    rows = [line.split(",") for line in done.stdout.splitlines()]
    said = f"10,000,000 documents (mean 300) at 8,192, 512 ranks; load average {load:.1f} before.\n"
    return f"{said}\n{table(['', 'seconds', 'CPU seconds', 'peak GiB'], rows)}"


def child() -> None:
    lengths = chat(10_000_000)
    print(f"lengths alone,,,{peak_gib():.2f}")
    sampler = timed(
        "constructor (bins of the first epoch)",
        lambda: PackedBatchSampler(
            lengths, 8192, num_ranks=512, rank=3, attention_cost=ATTENTION_COST
        ),
    )
    timed("first epoch of a rank", lambda: exhaust(sampler, 0))
    timed("next epoch of a rank", lambda: exhaust(sampler, 1))


def exhaust(sampler: PackedBatchSampler, epoch: int) -> None:
    sampler.set_epoch(epoch)
    assert sum(1 for _ in sampler) == len(sampler)


def timed(name: str, call):
    """Print the seconds, the CPU seconds and the peak memory of `call`; return its result."""
    start, cpu = time.perf_counter(), time.process_time()
    result = call()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    print(f"{name},{seconds:.2f},{cpu:.2f},{peak_gib():.2f}")
    return result


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="also write the tables to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child()

    parts = ["# Balanced ranks, fair steps\n", provenance(("numpy",))]
    parts += ["## Planning, in a process of its own\n", planning()]
    assert __doc__
    parts.append(__doc__.split("\n\n", 2)[2])
    for name, (draw, capacity) in SETS.items():
        bins = Bins(draw, capacity)
        parts += [f"## {name}\n", over_windows(bins)]
    publish("\n".join(parts), arguments.output)
    return None


if __name__ == "__main__":
    main()
