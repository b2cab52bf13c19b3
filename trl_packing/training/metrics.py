"""Count what a run trains and how fast; the CPU waits for the device once a log. docs/metrics.md

micro-batch    counts, and those of each source            on the CPU, from the copy of each row
               sums of losses, those of each source too    on the device (loss/sums.py)
    │  share: a vector of each rank
interval       since the last log, all ranks      tokens_per_second, loss_<source>, ...
    │  add
run            since train() began                train_tokens_per_second, ...
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from trl import SFTTrainer

from trl_packing.config import PackingOptions
from trl_packing.documents.host_row import HostRow, host_row, wait_for
from trl_packing.documents.labels import SOURCE
from trl_packing.loss.sums import NUM_SUMS, OF_SOURCE, LossSums, Sources, write_means
from trl_packing.training.columns import columns_of

logger = get_logger(__name__)

GIB = 2**30

# Of documents; `room` is the tokens that fit (bins × capacity, or the row's without bins),
# `computed_tokens` those of the rows with padding, `shared` those not computed because a document
# before in the row has them.
COUNTS = ("documents", "tokens", "trained_tokens", "room", "computed_tokens", "shared", "images")

# What a person reads of an interval while the run trains.
_SHOWN = ("tokens_per_second", "computed_tokens_per_second", "utilization", "documents_per_step")


class ThroughputMeter:
    """Counts what a run trains, and writes its throughput and token metrics into the log.

    Sums and counts are vectors: `SUMS` and the losses of each source, then `COUNTS`, then documents
    and tokens of each source. `trained` has the sums of the micro-batches of this rank.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, trainer: SFTTrainer, trained: LossSums):
        self.trainer = trainer
        self.trained = trained
        self.is_running = False
        self._sources: tuple[str, ...] = ()
        self._logs: dict[str, float] = {}  # for the next log
        self._finished: dict[str, float] | None = None  # totals of the run that has ended
        self._start_from_zero()

    def _start_from_zero(self) -> None:
        self.trained.take()
        self._read = np.zeros(self.trained.width)  # of the device, not shared yet
        self._local = np.zeros(len(COUNTS) + 2 * len(self._sources))  # likewise, of the CPU
        self._interval = np.zeros(len(self._read) + len(self._local))
        self._run = self._interval.copy()
        self._waited_after: int | None = None  # the optimizer step of the last wait
        self._shared_at: int | None = None  # the optimizer step of the last `share`

    def follow_sources(self, names: tuple[str, ...]) -> None:
        """Count the sources with these names from now on; no-op if they are the same."""
        if names != self._sources:
            self._sources, self.trained.num_sources = names, len(names)
            self._start_from_zero()

    # --- counting -----------------------------------------------------------------------------

    def start_run(self, tokens_before: int) -> None:
        """Start from zero, perhaps again with a smaller batch size.

        `tokens_before` are those that TRL has counted in earlier runs of this trainer.
        """
        self._start_from_zero()
        self.is_running, self._finished, self._logs = True, None, {}
        self._tokens_before = tokens_before
        self._first_step = self._last_step = self.trainer.state.global_step
        self._seconds = self._last_seconds = 0.0
        self._since: float | None = None  # the clock runs

    def count(self, batches: Sequence[Any], room: int | None) -> None:
        """Add the micro-batches of a step of this rank.

        `room` is the tokens that fit into a micro-batch of bins; None where nothing is packed.
        """
        if not self.is_running:
            return
        # The clock starts here: before, readers start up, and a resumed run skips batches.
        self.start_clock()
        for row in map(host_row, batches):
            if row is not None:
                self._add(row, room)

    def _add(self, row: HostRow, room: int | None) -> None:
        lengths, counted = row.lengths, len(COUNTS)
        tokens = int(lengths.sum())
        self._local[:counted] += (
            len(lengths),
            tokens,
            row.num_trained,
            room or row.num_tokens,
            row.num_tokens,
            tokens - (row.num_tokens - row.padding),
            row.num_images,
        )
        if row.sources is not None and self._sources:
            documents, of_tokens = self._local[counted:].reshape(2, -1)
            ids, number = 1 + row.sources, 1 + len(self._sources)  # 0 belongs to no source
            documents += np.bincount(ids, minlength=number)[1:]
            of_tokens += np.bincount(ids, lengths, minlength=number)[1:]

    # --- the clock ----------------------------------------------------------------------------

    def start_clock(self) -> None:
        """Start the clock; no-op if it is running. On TRL's path no micro-batch is counted."""
        if self.is_running and self._since is None:
            self._since = self.clock()

    def seconds(self) -> float:
        """Return the seconds of training, without the pauses."""
        return self._seconds + (0.0 if self._since is None else self.clock() - self._since)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock inside the block, once the device has finished what is queued."""
        if not self.is_running or self._since is None:
            yield
            return
        self._wait()
        self._seconds, self._since = self.seconds(), None
        try:
            yield
        finally:
            self.start_clock()

    # --- all ranks ----------------------------------------------------------------------------

    def share_counts(self, *, log: bool = False) -> None:
        """Share the counts up to this step, which a log, an evaluation or a checkpoint reads."""
        is_new = self._shared_at != self.trainer.state.global_step
        if self.is_running and self._since is not None and (log or is_new):
            self.share(log=log)

    def share_before(self, logs: dict[str, float]) -> None:
        """Share the counts if `logs` are those of an interval, or the last ones of a run."""
        if {"loss", "learning_rate"} <= logs.keys():
            self.share_counts(log=True)
        if "train_runtime" in logs and self.is_running:
            self._finish_run(logs)

    def share(self, *, log: bool) -> None:
        """Add up the counts of all ranks, waiting for the device once.

        `log` says whether the metrics since the last log go into the next one.
        """
        trainer, rows = self.trainer, self._gather()
        step, means = trainer.state.global_step, trainer._metrics["train"]
        shared = rows[:, :-1].sum(0) / trainer.get_tp_size()  # ranks that have counted the same
        self._interval += shared
        self._run += shared
        self._shared_at = step
        self._peak_memory = float(rows[:, -1].max())
        run = self._counts(self._run)
        # A class of a user may make rows without a CPU copy. TRL would also count the padding.
        tokens = self._tokens_before + int(run["tokens"] if run["room"] else self._run[4])
        if self._interval[5] or means.get("num_tokens"):  # micro-batches were scored
            means["num_tokens"] = [tokens]
        trainer._total_train_tokens = tokens
        if log:
            seconds = self.seconds()
            past, steps = seconds - self._last_seconds, step - self._last_step
            self._logs = self._metrics(self._interval, past, steps)
            self._last_seconds, self._last_step = seconds, step
            self._write_token_means()

    def _gather(self) -> np.ndarray:
        """Return of each rank the vector since the last call, and its peak memory.

        Sums of several ranks that are still on the device are added up by the same wait.
        """
        args = self.trainer.args
        if args.world_size == 1:
            self._wait()
        most = getattr(torch.get_device_module(args.device), "max_memory_allocated", None)
        memory = most(args.device) if most else 0.0  # MPS and CPUs do not know it
        rows = np.concatenate([self._read, self._local, [memory]])[None]
        self._read, self._local = np.zeros_like(self._read), np.zeros_like(self._local)
        if args.world_size > 1:
            sent = torch.from_numpy(rows).to(args.device, non_blocking=True)
            pending = self.trained.take()
            if pending is not None:
                sent[0, : len(pending)] += pending
            rows = np.array(self.trainer.accelerator.gather(sent).tolist())
            self._waited_after = self.trainer.state.global_step
        return rows

    def _wait(self) -> None:
        """Wait until the device has finished what is queued, at most once an optimizer step."""
        if self._waited_after == self.trainer.state.global_step:
            return
        self._waited_after = self.trainer.state.global_step
        pending = self.trained.take()
        if pending is not None:
            pending = pending.to("cpu", non_blocking=True)  # readable after the wait
        wait_for(self.trainer.args.device)
        if pending is not None:
            self._read += pending.tolist()

    # --- metrics ------------------------------------------------------------------------------

    def _finish_run(self, logs: dict[str, float]) -> None:
        """Add the totals to the next log: the run is over."""
        self.share(log=False)
        self._write_token_means()
        run, seconds = self._counts(self._run), self.seconds()
        # transformers would count bins as samples.
        logs["train_samples_per_second"] = round(run["documents"] / logs["train_runtime"], 3)
        found = {name: run[name] for name in self._counted(run)} | {"seconds": seconds}
        steps = self.trainer.state.global_step - self._first_step
        found |= self._metrics(self._run, seconds, steps)
        self._logs = {f"train_{name}": value for name, value in found.items()}
        self._finished, self.is_running = run | {"seconds": seconds}, False

    def so_far(self) -> dict[str, float] | None:
        """Return `COUNTS` of all ranks and the seconds of the run, up to the current step.

        None if ranks have not shared their counts since; on TRL's path, they count nothing.
        """
        if not self.is_running:
            return self._finished
        if self._shared_at not in (None, self.trainer.state.global_step):
            return None
        return self._counts(self._run) | {"seconds": self.seconds()}

    def take_logs(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what the log that is written now shows of the interval, and all of it."""
        measured, self._logs = self._logs, {}
        if any(name.startswith("train_") for name in measured):  # the totals
            return measured, measured
        names = (*_SHOWN, *(f"loss_{name}" for name in self._sources))
        return {name: measured[name] for name in names if name in measured}, measured

    def _counts(self, sums: np.ndarray) -> dict[str, float]:
        """Return `COUNTS` of a vector by name."""
        width = self.trained.width
        numbers = zip(COUNTS, sums[width : width + len(COUNTS)].tolist(), strict=True)
        return {name: int(number) for name, number in numbers}

    def _counted(self, run: dict[str, float]) -> list[str]:
        """Return the names of the counts that the log of a run has."""
        names = ["documents", "tokens", "trained_tokens"]
        return names + ["computed_tokens"] * bool(run["shared"]) + ["images"] * bool(run["images"])

    def _metrics(self, sums: np.ndarray, seconds: float, steps: int) -> dict[str, float]:
        """Return the metrics of a vector in `seconds` and `steps`; unknown ones are left out."""
        counts, found = self._counts(sums), self._of_sources(sums)
        if not counts["room"]:  # the batches of a user's collator have no CPU copy
            return found
        if seconds > 0:
            names = self._counted(self._counts(self._run))
            found |= {f"{name}_per_second": counts[name] / seconds for name in names}
        found["utilization"] = (counts["tokens"] - counts["shared"]) / counts["room"]
        if steps:
            found["documents_per_step"] = counts["documents"] / steps
        if self._peak_memory:
            found["peak_memory_gib"] = self._peak_memory / GIB
        return found

    def _of_sources(self, sums: np.ndarray) -> dict[str, float]:
        """Return loss, documents and tokens of each source."""
        width, found = self.trained.width, {}
        scored = sums[NUM_SUMS:width].reshape(-1, OF_SOURCE)[1:]  # the first is of no source
        counted = sums[width + len(COUNTS) :].reshape(2, -1).T
        for i, name in sorted(enumerate(self._sources), key=lambda source: source[1]):
            loss, weight, trained = scored[i].tolist()
            if weight:
                found[f"loss_{name}"] = loss / weight
            if counted.any():  # the batches of a user's collator have no CPU copy
                found[f"num_documents_{name}"], found[f"num_tokens_{name}"] = map(int, counted[i])
            if scored.any():  # a user's compute_loss may never call ours
                found[f"num_trained_tokens_{name}"] = int(trained)
        return found

    def _write_token_means(self) -> None:
        """Make TRL log the means over the trained tokens of all ranks since the last log."""
        trainer, sums = self.trainer, self._interval[:NUM_SUMS].tolist()
        write_means(trainer._metrics["train"], sums, balances=trainer.aux_loss_enabled)
        if sums[2] and not sums[6]:
            logger.warning(
                f"all tokens trained since the last log, up to step {trainer.state.global_step}, "
                "have a weight of 0: raise loss_weights and loss_weight"
            )
        self._interval = np.zeros_like(self._interval)


# --- sources --------------------------------------------------------------------------------------


def training_sources(dataset: Any, source_column: str | None) -> Sources | None:
    """Return the sources of a prepared training set; None if it names none.

    The column of a mixture takes precedence over `source_column`, the setting.
    """
    if not isinstance(dataset, Dataset):
        return None
    column = SOURCE if SOURCE in dataset.column_names else source_column
    if column is None or column not in dataset.column_names:
        return None
    return Sources.of(dataset, column, "the training set")


def stream_sources(dataset: IterableDataset, options: PackingOptions) -> tuple[str, ...]:
    """Return the names of the streams that were joined to `dataset`; none of a single stream."""
    mixture: Any = options.mixture if SOURCE in columns_of(dataset) else {}
    return tuple(name for name, share in mixture.items() if share.get("weight"))
