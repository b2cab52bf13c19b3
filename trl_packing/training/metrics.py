"""Count what a run trains and how fast; the CPU waits for the device once a log. docs/metrics.md

micro-batch    counts, and those of each source            on the CPU, from the copy of each row
               sums of losses, those of each source too    on the device (loss/sums.py)
    │  share: a vector of each rank
interval       since the last log, all ranks      tokens_per_second, loss_<source>, ...
    │  add
run            since train() began                train_tokens_per_second, ...
"""

import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger

from trl_packing.documents.host_row import host_row, send, wait_for
from trl_packing.loss.sums import LossSums, Sums, write_means

logger = get_logger(__name__)

# Of documents; `room` is the tokens that fit (bins × capacity, or the row's without bins),
# `computed_tokens` those of the rows with padding, `shared` those not computed because a document
# before in the row has them.
COUNTS = ("documents", "tokens", "trained_tokens", "room", "computed_tokens", "shared")

# What a person reads of an interval while the run trains.
_SHOWN = ("tokens_per_second", "computed_tokens_per_second", "utilization", "documents_per_step")


class Counted(NamedTuple):
    """A vector of what was trained, by name: `counts` are `COUNTS`, and `tokens` of each source."""

    sums: Sums
    counts: dict[str, int]
    tokens: list[int]


@dataclass(eq=False)
class ThroughputMeter:
    """Counts what a run trains, and writes its throughput and token metrics into the log.

    Sums and counts are vectors: those of `LossSums`, then `COUNTS`, then tokens of each source.
    """

    clock = staticmethod(time.perf_counter)

    args: Any  # those of the trainer
    accelerator: Accelerator
    trained: LossSums  # of the micro-batches of this rank
    tp_size: int  # ranks that count the same micro-batch
    balances: bool  # the loss has a term for the balance of experts
    means: MutableMapping[str, list[float]]  # that TRL logs next
    set_total: Callable[[int], None]  # of the tokens that TRL logs
    is_packed: bool  # on TRL's path, TRL counts alone
    is_running: bool = False
    _sources: tuple[str, ...] = ()
    _logs: dict[str, float] = field(default_factory=dict)  # for the next log
    _finished: dict[str, float] | None = None  # totals of the run that has ended

    def set_sources(self, names: tuple[str, ...]) -> None:
        """Count the sources with these names in the next run; no-op if they are the same."""
        if names != self._sources:
            self._sources = names
            self.trained.num_sources = len(names)
            self.trained.take()
            self.is_running = False

    def start_run(self, state: Any, total: int) -> None:
        """Start from zero, perhaps again with a smaller batch size.

        `state` is that of the run, `total` the tokens of earlier runs of the same trainer.
        """
        self.trained.take()
        self._local = np.zeros(self.trained.width + len(COUNTS) + len(self._sources))
        self._interval, self._run = self._local.copy(), self._local.copy()  # of all ranks
        self.state, self.tokens_before = state, total
        self._added_up_at: int | None = None  # the optimizer step of the last `add_up`
        self._first_step = self._last_step = state.global_step
        self._seconds = self._last_seconds = 0.0
        self._since: float | None = None  # the clock runs
        self.is_running = True
        self._finished = None
        self._logs = {}

    def count(self, batches: Sequence[Any], room: int | None) -> None:
        """Add the micro-batches of a step of this rank.

        `room` is the tokens that fit into a micro-batch of bins; None where nothing is packed.
        """
        # The clock starts here: before, readers start up, and a resumed run skips batches.
        self.start_clock()
        counts, of_sources = np.split(self._local[self.trained.width :], [len(COUNTS)])  # views
        for row in filter(None, map(host_row, batches)):
            if not row.is_counted:
                continue
            lengths = row.lengths
            tokens = int(lengths.sum())
            computed = row.num_tokens
            shared = tokens - (computed - row.padding)
            counts += len(lengths), tokens, row.num_trained, room or computed, computed, shared
            if row.sources is not None and self._sources:  # 0 belongs to no source
                of_sources += np.bincount(1 + row.sources, lengths, 1 + len(of_sources))[1:]

    def start_clock(self) -> None:
        """Start the clock; no-op if it is running. On TRL's path no micro-batch is counted."""
        if self.is_running and self._since is None:
            self._since = self.clock()

    def seconds(self) -> float:
        """Return the seconds of training, without the pauses."""
        return self._seconds + (0.0 if self._since is None else self.clock() - self._since)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Add up what was counted, and stop the clock inside the block."""
        if not self.is_running or self._since is None:
            yield
            return
        if self.is_packed:
            self.add_up()
        self._seconds = self.seconds()
        self._since = None
        try:
            yield
        finally:
            self.start_clock()

    def add_up(self) -> None:
        """Add up the counts of all ranks, waiting for the device once; no-op within a step."""
        step = self.state.global_step
        if self._added_up_at == step:
            return
        self._added_up_at, rows = step, self._gather()
        shared = rows[:, :-1].sum(0) / self.tp_size  # ranks that have counted the same
        self._interval += shared
        self._run += shared
        self._peak_memory = float(rows[:, -1].max())
        sums, counts, _ = self._read(self._run)
        # A class of a user may make rows without a CPU copy. TRL would also count the padding.
        tokens = self.tokens_before + int(counts["tokens"] if counts["room"] else sums.tokens)
        if self._read(self._interval).sums.micro_batches or self.means.get("num_tokens"):
            self.means["num_tokens"] = [tokens]
        self.set_total(tokens)

    def _gather(self) -> np.ndarray:
        """Return of each rank the vector since the last call, and its peak memory."""
        args = self.args
        pending = self.trained.take()
        most = getattr(torch.get_device_module(args.device), "max_memory_allocated", None)
        memory = most(args.device) if most else 0.0  # MPS and CPUs do not know it
        vector = torch.from_numpy(np.append(self._local, memory))
        self._local = np.zeros_like(self._local)
        if args.world_size > 1:
            vector = send(vector, args.device)
        else:
            if pending is not None:
                pending = pending.to("cpu", non_blocking=True)  # readable after the wait
            wait_for(args.device)
        if pending is not None:
            vector[: len(pending)] += pending
        return np.array(self.accelerator.gather(vector[None]).tolist())

    def add_up_before(self, logs: dict[str, float]) -> None:
        """Add up the counts if `logs` are those of an interval, or the last ones of a run."""
        is_interval = {"loss", "learning_rate"} <= logs.keys()
        is_end = "train_runtime" in logs
        if not self.is_running or not (is_interval or is_end):
            return
        self.add_up()
        seconds = self.seconds()
        step = self.state.global_step
        if is_interval:
            self._logs = self._metrics(
                self._interval, seconds - self._last_seconds, step - self._last_step
            )
            self._last_seconds, self._last_step = seconds, step
        self._write_token_means()
        if is_end:
            run = self._read(self._run).counts
            found = {"seconds": seconds}
            if run["room"]:
                # transformers would count bins as samples.
                logs["train_samples_per_second"] = round(
                    run["documents"] / logs["train_runtime"], 3
                )
                found |= {name: run[name] for name in self._counted()}
            found |= self._metrics(self._run, seconds, step - self._first_step)
            self._logs = {f"train_{name}": value for name, value in found.items()}
            self._finished = run | {"seconds": seconds}
            self.is_running = False

    def so_far(self) -> dict[str, float] | None:
        """Return `COUNTS` of all ranks and the seconds of the run, up to the current step.

        None if the counts of ranks were not added up since; on TRL's path, they count nothing.
        """
        if not self.is_running:
            return self._finished
        if self._added_up_at not in (None, self.state.global_step):
            return None
        return self._read(self._run).counts | {"seconds": self.seconds()}

    def take_logs(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what the log that is written now shows of the interval, and all of it."""
        measured = self._logs
        self._logs = {}
        names = (*_SHOWN, *(f"loss_{name}" for name in self._sources))
        shown = {n: x for n, x in measured.items() if n in names or n.startswith("train_")}
        return shown, measured

    def _read(self, vector: np.ndarray) -> Counted:
        """Return what a vector holds."""
        ends = self.trained.width, self.trained.width + len(COUNTS)
        sums, counts, tokens = np.split(vector, ends)
        return Counted(
            Sums.of(sums),
            dict(zip(COUNTS, map(int, counts), strict=True)),
            [int(n) for n in tokens],
        )

    def _counted(self) -> list[str]:
        """Return the names of the counts that the logs of this run have."""
        names = ["documents", "tokens", "trained_tokens"]
        if self._read(self._run).counts["shared"] > 0:
            names.append("computed_tokens")
        return names

    def _metrics(self, vector: np.ndarray, seconds: float, steps: int) -> dict[str, float]:
        """Return the metrics of a vector in `seconds` and `steps`; unknown ones are left out."""
        counted = self._read(vector)
        counts, by_source = counted.counts, counted.sums.by_source
        found: dict[str, float] = {}
        is_scored = any(map(any, by_source))  # a user's compute_loss may never call ours
        for name, sums, tokens in zip(self._sources, by_source, counted.tokens, strict=True):
            if sums.weight:
                found[f"loss_{name}"] = sums.loss / sums.weight
            if any(counted.tokens):  # the batches of a user's collator have no CPU copy
                found[f"num_tokens_{name}"] = tokens
            if is_scored:
                found[f"num_trained_tokens_{name}"] = int(sums.trained)
        if not counts["room"]:
            return found
        if seconds > 0:
            found |= {f"{name}_per_second": counts[name] / seconds for name in self._counted()}
        found["utilization"] = (counts["tokens"] - counts["shared"]) / counts["room"]
        if steps:
            found["documents_per_step"] = counts["documents"] / steps
        if self._peak_memory:
            found["peak_memory_gib"] = self._peak_memory / 2**30
        return found

    def _write_token_means(self) -> None:
        """Make TRL log the means over the trained tokens of all ranks since the last log."""
        sums = self._read(self._interval).sums
        write_means(self.means, sums, balances=self.balances)
        if sums.trained and not sums.weight:
            logger.warning(
                f"all tokens trained since the last log, up to step {self.state.global_step}, "
                "have a weight of 0: raise loss_weights and loss_weight"
            )
        self._interval = np.zeros_like(self._interval)
