"""Speed and utilization of `pack`, compared with TRL's `pack_dataset` (strategy bfd).

    python benchmarks/pack.py --output benchmarks/results/pack.md

Correctness is checked before anything is timed. Times are CPU seconds of runs that take turns, so
that other work on the machine slows all of them equally. About two minutes on two idle cores.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from trl_packing.packing.bins import PackingPlan, pack

CAPACITY = 4096
MEAN, SIGMA = 300, 0.9
COMMAND = "python benchmarks/pack.py --output benchmarks/results/pack.md"


def log_normal(number: int, *, longest: int = CAPACITY, distinct: bool = False) -> np.ndarray:
    """Return log-normal lengths, cut at `longest`; `distinct` keeps the first draw of each."""
    rng = np.random.default_rng(0)
    lengths = np.empty(30 * number if distinct else number, dtype=np.int32)
    # Draw in parts, because drawing must not need more memory than packing, which is measured.
    for part in np.array_split(lengths, max(1, len(lengths) // 100_000)):
        drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, len(part))
        part[:] = np.clip(drawn, 1, longest)
    if not distinct:
        return lengths
    _, first = np.unique(lengths, return_index=True)
    return lengths[np.sort(first)[:number]]


def check(plan: PackingPlan, lengths: np.ndarray) -> None:
    """Stop unless every document is in exactly one bin and no bin is over capacity."""
    np.testing.assert_array_equal(np.bincount(plan.indices, minlength=len(lengths)), 1)
    tokens = np.add.reduceat(lengths[plan.indices].astype(np.int64), plan.offsets[:-1])
    np.testing.assert_array_equal(tokens, plan.tokens)
    assert tokens.max() <= plan.capacity


def best_seconds(*calls, repeats: int = 5) -> list[float]:
    """Return the CPU seconds of each call: the fastest of a few runs, which take turns."""
    turns = [[_seconds(call) for call in calls] for _ in range(repeats)]
    return [min(seconds) for seconds in zip(*turns, strict=True)]


def _seconds(call) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def time_trl(lengths: np.ndarray) -> tuple[float, int, float]:
    """Return CPU seconds, bins and utilization of `trl.pack_dataset` on documents of `lengths`."""
    import pyarrow as pa
    import trl
    from datasets import Dataset, disable_progress_bars
    from datasets.table import InMemoryTable

    disable_progress_bars()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))
    tokens = pa.array(np.zeros(int(lengths.sum(dtype=np.int64)), dtype=np.uint8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, tokens)})
    dataset = Dataset(InMemoryTable(table))

    start = time.process_time()
    packed = trl.pack_dataset(dataset, CAPACITY, "bfd", {"keep_in_memory": True})
    seconds = time.process_time() - start
    seq_lengths = packed.data.column("seq_lengths").combine_chunks().flatten().to_numpy()
    assert np.array_equal(np.sort(seq_lengths), np.sort(lengths)), "TRL lost or cut a document"
    return seconds, len(packed), int(lengths.sum(dtype=np.int64)) / (len(packed) * CAPACITY)


def against_trl(number: int) -> str:
    lengths = log_normal(number)
    check(pack(lengths, CAPACITY), lengths)
    check(pack(lengths, CAPACITY, seed=0), lengths)
    theirs, their_bins, their_fill = time_trl(lengths)
    rows = [("trl.pack_dataset(strategy='bfd')", theirs, their_bins, their_fill)]
    settings = [(strategy, None) for strategy in ("bfd", "next_fit", "greedy")] + [("bfd", 0)]
    calls = [partial(pack, lengths, CAPACITY, strategy, seed) for strategy, seed in settings]
    for (strategy, seed), call, seconds in zip(settings, calls, best_seconds(*calls), strict=True):
        plan = call()
        name = f"pack(strategy={strategy!r}" + (f", seed={seed})" if seed is not None else ")")
        rows.append((name, seconds, len(plan), plan.utilization))
    return table(
        ["", "CPU seconds", "lengths/s", "bins", "fill", "times TRL's speed"],
        [
            [
                name,
                f"{s:.3f}",
                f"{number / s:,.0f}",
                f"{bins:,}",
                f"{fill:.2%}",
                f"{theirs / s:,.0f}×",
            ]
            for name, s, bins, fill in rows
        ],
    )


def ten_million() -> str:
    """Measure in a separate process, so that its peak memory is that of `pack`."""
    rows = []
    for seed in (None, 0):
        child = [sys.executable, __file__, "--child", "10000000", str(seed)]
        done = subprocess.run(child, capture_output=True, text=True, check=True)
        seconds, peak, before, bins, fill = map(float, done.stdout.split())
        cells = [f"{seconds:.2f}", f"{peak:.2f}", f"{before:.2f}", f"{bins:,.0f}", f"{fill:.3%}"]
        rows.append([str(seed), *cells])
    return table(["seed", "CPU seconds", "peak RSS, GiB", "before pack, GiB", "bins", "fill"], rows)


def child(number: int, seed: int | None) -> None:
    lengths = log_normal(number)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    start = time.process_time()
    plan = pack(lengths, CAPACITY, seed=seed)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    check(plan, lengths)
    print(seconds, peak, before, len(plan), plan.utilization)


def pairs(plan: PackingPlan) -> np.ndarray:
    """Return each pair of documents that share a bin, encoded as one number."""
    found = []
    for documents in plan:
        ordered = np.sort(documents).astype(np.int64)
        one, other = np.triu_indices(len(ordered), 1)
        found.append((ordered[one] << 32) + ordered[other])
    return np.concatenate(found)


def repeated_pairs() -> str:
    rows = []
    for number, distinct, capacity in [
        (1000, True, 4096),
        (1000, False, 4096),
        (1000, False, 8192),
        (20_000, False, 8192),
        (200_000, False, 8192),
    ]:
        lengths = log_normal(number, longest=capacity, distinct=distinct)
        assert len(lengths) == number
        one, other = (pack(lengths, capacity, seed=(0, epoch)) for epoch in (0, 1))
        check(one, lengths)
        assert len(one) == len(other) == len(pack(lengths, capacity))
        share = len(np.intersect1d(pairs(one), pairs(other))) / len(pairs(one))
        (seconds,) = best_seconds(partial(pack, lengths, capacity, seed=0), repeats=3)
        kind = f"{number:,}{' distinct' if distinct else ''}"
        cells = [f"{capacity:,}", f"{lengths.mean():.0f}", f"{len(one):,}"]
        shares = [f"{share:.2%}", f"{1 / len(one):.2%}", f"{1000 * seconds:.0f}"]
        rows.append([kind, *cells, *shares])
    header = ["documents", "capacity", "mean length", "bins", "pairs that meet again"]
    return table([*header, "if drawn at random", "CPU ms a plan"], rows)


def small_sets() -> str:
    """Measure the planning of a stream's window, or of a small data set."""
    rng = np.random.default_rng(0)
    sets = {
        f"{number:,} {kind}": (lengths, CAPACITY)
        for number in (3, 30, 300, 999)
        for kind, lengths in {
            "log-normal": log_normal(number),
            "distinct log-normal": log_normal(number, distinct=True),
            "uniform": rng.integers(1, CAPACITY, number),
        }.items()
    }
    rows = []
    for name, (lengths, capacity) in sets.items():
        plans = [pack(lengths, capacity, seed=(0, epoch)) for epoch in (0, 1)]
        for plan in plans:
            check(plan, lengths)
        (seconds,) = best_seconds(partial(pack, lengths, capacity, seed=0), repeats=9)
        shared = [pairs(plan) for plan in plans]
        share = len(np.intersect1d(shared[0], shared[1])) / max(len(shared[0]), 1)
        cells = [f"{len(plans[0]):,}", f"{share:.1%}", f"{1 / len(plans[0]):.1%}"]
        rows.append([name, *cells, f"{1000 * seconds:.1f}"])
    header = ["documents", "bins", "pairs that meet again", "if drawn at random"]
    return table([*header, "CPU ms a plan"], rows)


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a GitHub-flavored table."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine() -> str:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x
        ]
        cpu = names[0] if names else cpu
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "trl", "datasets"))
    load = f"load average {os.getloadavg()[0]:.1f} at the start"
    return f"{cpu}, {os.cpu_count()} cores, {load}; Python {platform.python_version()}, {packages}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="also write the tables to this file")
    parser.add_argument("--documents", type=int, default=1_000_000, help="for the table with TRL")
    parser.add_argument("--child", nargs=2, metavar=("NUMBER", "SEED"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        number, seed = arguments.child
        return child(int(number), None if seed == "None" else int(seed))

    large = ten_million()  # first, because on Linux a child process inherits the parent's peak
    lengths = f"log-normal lengths (mean {MEAN}, σ {SIGMA})"
    parts = ["# pack", f"`{COMMAND}`", machine()]
    parts += [
        f"## {arguments.documents:,} {lengths} at {CAPACITY:,}",
        against_trl(arguments.documents),
    ]
    parts += [f"## 10,000,000 {lengths} at {CAPACITY:,}, in a process of its own", large]
    parts += ["## Pairs of documents that share a bin in two epochs", repeated_pairs()]
    parts += [f"## Less than 1,000 documents at {CAPACITY:,}", small_sets()]
    report = "\n\n".join(parts) + "\n"
    print(report)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(report)
    return None


if __name__ == "__main__":
    main()
