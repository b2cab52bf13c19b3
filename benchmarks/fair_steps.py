"""The shares of sources in the tokens of optimizer steps: at random, and with exchanged bins.

    python benchmarks/fair_steps.py --output benchmarks/results/fair_steps.md

Each mixture has a source with few tokens. In a random step it varies as a random sample does; a
mixture lets steps exchange bins until they are fair. Of the same bins, before → after:

    share              mean of the source over the tokens of a step, and standard deviation
    max / mean         cost of a slot's costliest micro-batch over their mean, mean over slots, on
                       8 ranks
    document length    std over steps of the mean length of their documents, in tokens
    seconds            of planning an epoch of 1,000,000 documents, CPU time of this process

About half a minute on an idle core.
"""

import argparse
import time
from dataclasses import dataclass

import numpy as np
from machine import provenance, publish, table

from trl_packing.packing.bins import PackingPlan, pack
from trl_packing.packing.draw import MixtureDraw
from trl_packing.packing.sampler import PackedBatchSampler

ATTENTION_COST = 1 / (12 * 4096)  # an 8B Llama
DOCUMENTS = 1_000_000
RANKS = 8
BINS = (8, 16, 64)  # of a step


@dataclass(frozen=True)
class Source:
    """A source of log-normal lengths.

    Attributes:
        name: shown in the table.
        tokens: share of the tokens.
        mean: tokens of a document.
        spread: σ of the logarithm.
    """

    name: str
    tokens: float
    mean: int
    spread: float = 0.8


MIXTURES: dict[str, tuple[int, tuple[Source, ...]]] = {
    "math and a little chat, at 2,048": (
        2048,
        (Source("math", 0.97, 220, 0.4), Source("chat", 0.03, 95)),
    ),
    "web, code and a little chat, at 4,096": (
        4096,
        (Source("web", 0.94, 600), Source("code", 0.05, 1200), Source("chat", 0.01, 200)),
    ),
    "six sources, at 8,192": (
        8192,
        (
            Source("web", 0.55, 700),
            Source("code", 0.25, 1500, 1.0),
            Source("math", 0.12, 300, 0.5),
            Source("chat", 0.05, 250),
            Source("long", 0.02, 5000, 0.3),
            Source("tools", 0.01, 400),
        ),
    ),
}


class Documents:
    """Lengths and sources of a mixture, and its first epoch."""

    def __init__(self, capacity: int, sources: tuple[Source, ...], number: int):
        rng = np.random.default_rng(0)
        self.capacity = capacity
        self.names = [source.name for source in sources]
        share = np.array([source.tokens / source.mean for source in sources])
        self.sources = rng.choice(len(sources), number, p=share / share.sum())
        means = np.array([source.mean for source in sources])[self.sources]
        spread = np.array([source.spread for source in sources])[self.sources]
        drawn = rng.lognormal(np.log(means) - spread**2 / 2, spread)
        self.lengths = drawn.clip(8, capacity).astype(np.int32)
        self.draw = MixtureDraw(self.sources, np.bincount(self.sources), seed=0)

    def pack(self) -> PackingPlan:
        return pack(self.lengths, self.capacity, seed=(0, 0))

    def steps(self, plan: PackingPlan, size: int, *, fair: bool) -> np.ndarray:
        """Return the bins of all full steps, (steps, size)."""
        squares = np.add.reduceat(
            self.lengths.astype(np.int64)[plan.indices] ** 2, plan.offsets[:-1]
        )
        draw = self.draw if fair else None
        sampler = PackedBatchSampler(self.lengths, rows=True, num_ranks=size, draw=draw)
        costs = plan.tokens + (ATTENTION_COST * squares).astype(np.int64)
        bins, _ = sampler.arranged_bins(plan, costs)
        bins = bins.reshape(-1, size)
        assert len(np.unique(bins)) == bins.size, "a bin is in two steps"
        return bins

    def shares(self, step_of: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the share of each source in the tokens of every step, (steps, sources)."""
        number = len(self.names)
        cells = step_of * number + self.sources[documents]
        size = (int(step_of.max()) + 1) * number
        tokens = np.bincount(cells, self.lengths[documents], size).reshape(-1, number)
        return tokens / tokens.sum(1, keepdims=True)


def timed(call):
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def over_bins(documents: Documents) -> list[list[str]]:
    plan, pack_seconds = timed(documents.pack)
    lengths = documents.lengths[plan.indices].astype(np.int64)
    numbers = np.diff(plan.offsets)
    costs = plan.tokens + ATTENTION_COST * np.add.reduceat(lengths**2, plan.offsets[:-1])
    rows = []
    for size in BINS:
        shares, uneven, varied, seconds = [], [], [], []
        for fair in (False, True):
            bins, spent = timed(lambda size=size, fair=fair: documents.steps(plan, size, fair=fair))
            step_of_bin = np.full(len(plan), -1)
            step_of_bin[bins.ravel()] = np.repeat(np.arange(len(bins)), size)
            step = np.repeat(step_of_bin, numbers)
            shares.append(documents.shares(step[step >= 0], plan.indices[step >= 0]))
            slots = costs[bins].reshape(-1, RANKS)
            uneven.append((slots.max(1) / slots.mean(1)).mean())
            varied.append((plan.tokens[bins].sum(1) / numbers[bins].sum(1)).std())
            seconds.append(pack_seconds + spent)
        said = [f"{a:.3f} → {b:.3f}" for a, b in [uneven]]
        said += [f"{a:.1f} → {b:.1f}" for a, b in [varied]]
        said += [f"{a:.2f} → {b:.2f}" for a, b in [seconds]]
        rows += rows_of(f"{size} bins", documents.names, shares, said)
    return rows


def rows_of(step: str, names: list[str], shares, said: list[str]) -> list[list[str]]:
    """Return a row for each source; the first has the numbers of the steps."""
    before, after = shares
    rows = []
    for at, name in enumerate(names):
        mean = before[:, at].mean()
        spread = [each[:, at].std() for each in (before, after)]
        row = [step, name, f"{mean:.1%}", f"± {spread[0]:.2%} → ± {spread[1]:.2%}"]
        rows.append([*row, *(said if not at else [""] * len(said))])
    return rows


HEADER = ["a step", "source", "share", "deviation", "max / mean", "document length", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=DOCUMENTS)
    parser.add_argument("--output", help="also write the tables to this file")
    arguments = parser.parse_args()
    assert __doc__
    parts = ["# Fair steps of mixtures\n", provenance(("numpy",)), __doc__.split("\n\n", 2)[2]]
    for name, (capacity, sources) in MIXTURES.items():
        documents = Documents(capacity, sources, arguments.documents)
        parts += [f"## {name}\n", table(HEADER, over_bins(documents))]
    publish("\n".join(parts), arguments.output)


if __name__ == "__main__":
    main()
