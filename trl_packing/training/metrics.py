"""Measure how fast a run trains, without making the CPU wait for the device between logs.

    count           micro-batches of a step, from the CPU copy of each row
    share           the counts of all ranks, once a log; the only wait for the device
    log_run         the totals, which `train()` returns too
    pause           the clock, while the run evaluates or saves

docs/metrics.md defines each of the names.
"""

import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.flops import ModelFlops, NotCountable, model_flops
from trl_packing.documents.host_row import HostRow, host_row
from trl_packing.loss.sums import NUM_SUMS, LossSums, added, counts_for_nothing, write_means
from trl_packing.training.device_sums import DeviceSums
from trl_packing.training.devices import peak_flops_of, peak_memory_bytes
from trl_packing.training.source_metrics import SourceMeter
from trl_packing.training.throughput import Counts, Machine, Throughput, machine_of

logger = get_logger(__name__)

# What a person reads of an interval while the run trains.
_SHOWN = (
    "tokens_per_second",
    "computed_tokens_per_second",
    "utilization",
    "documents_per_step",
    "mfu",
)
_NOTHING = (0.0,) * NUM_SUMS

# TRL's `_metrics` of training: a list for every name, of which it logs the mean.
Means = MutableMapping[str, list[float]]


class ThroughputMeter:
    """Counts what a run trains, and writes its throughput and token metrics into the log.

    Args:
        trainer: its model, accelerator, arguments and state are read.
        trained: sums of the micro-batches of this rank.

    Attributes:
        sources: counts what is trained of each source.
    """

    clock = staticmethod(time.perf_counter)

    def __init__(self, trainer: SFTTrainer, trained: LossSums):
        self.trainer = trainer
        self.sources = SourceMeter(trained)
        self._device_sums = DeviceSums(trainer, trained)
        self.throughput: Throughput | None = None  # while the run trains
        self._finished: tuple[Counts, float] | None = None  # totals of the run that has ended
        self._shared_at: int | None = None  # the optimizer step of the last `share`
        self._machine = Machine()
        self._logs: dict[str, float] = {}  # for the next log
        self._tokens_before = 0
        self._model_flops: ModelFlops | None = None
        self._must_count_flops = False
        self._num_scored = 0.0  # tokens of the run in rows that were scored, padding included
        self._log_sums: Sequence[float] = _NOTHING  # of all ranks since the last log

    @property
    def is_running(self) -> bool:
        """Whether a run trains."""
        return self.throughput is not None

    # --- counting -----------------------------------------------------------------------------

    def start_run(self, tokens_before: int) -> None:
        """Start from zero; a run that finds a smaller batch size starts more than once.

        Args:
            tokens_before: tokens that TRL has counted in earlier runs of this trainer.
        """
        self.throughput = Throughput(self.trainer.state.global_step, self.clock)
        self._finished = self._shared_at = None
        self.sources.start_run()
        self._device_sums.start_run()
        self._log_sums, self._logs, self._num_scored = _NOTHING, {}, 0.0
        self._tokens_before = tokens_before
        self._model_flops = None
        self._must_count_flops = True

    def count(self, batches: Sequence[Any], room: int | None) -> None:
        """Add the micro-batches of a step. A user's `training_step` need not count any.

        Args:
            batches: micro-batches of this rank.
            room: tokens that fit into a micro-batch of bins; None where nothing is packed.
        """
        if self.throughput is None:
            return
        if self._must_count_flops:
            self._must_count_flops = False
            self._model_flops = self._count_flops() if self.peak_flops() else None
        # The clock starts here: before, readers start up, and a resumed run skips batches.
        self.throughput.watch.start()
        for row in map(host_row, batches):
            if row is not None:
                self.throughput.add(self._counts(row, room))
                self.sources.count(row)

    def _counts(self, row: HostRow, room: int | None) -> Counts:
        lengths, flops = row.lengths, self._model_flops
        tokens, targets = int(lengths.sum()), int(row.is_trained.sum())
        return Counts(
            documents=len(lengths),
            tokens=tokens,
            trained_tokens=row.num_trained,
            room=room or row.num_tokens,
            flops=flops.of(row.segments, targets, row.keys) if flops else 0.0,
            computed=row.num_tokens,
            shared=tokens - (row.num_tokens - row.padding),
            images=row.num_images,
        )

    def _count_flops(self) -> ModelFlops | None:
        model = self.trainer.model
        try:
            return model_flops(model)
        except NotCountable as reason:
            logger.info(f"no MFU is logged for {type(model).__name__}: {reason}")
            return None

    def peak_flops(self) -> float | None:
        """Return the peak of this process' devices in FLOP/s, None if unknown."""
        return peak_flops_of(self.trainer)

    # --- logging ------------------------------------------------------------------------------

    def share_counts(self, *, log: bool = False) -> None:
        """Share the counts up to this step, which a log, an evaluation or a checkpoint reads.

        Args:
            log: whether the metrics since the last log go into the next one.
        """
        trainer, is_new = self.trainer, self._shared_at != self.trainer.state.global_step
        if self.throughput is not None and self.throughput.watch.is_running and (log or is_new):
            trainer._total_train_tokens = self.share(trainer._metrics["train"], log=log)

    def share_before(self, logs: dict[str, float]) -> None:
        """Share the counts if `logs` are those of an interval, or the last ones of a run."""
        if {"loss", "learning_rate"} <= logs.keys():
            self.share_counts(log=True)
        if "train_runtime" in logs and self.throughput is not None:
            means, run = self.trainer._metrics["train"], self.throughput.run
            self.trainer._total_train_tokens = self.share(means, log=False)
            # transformers would count bins as samples.
            logs["train_samples_per_second"] = round(run.documents / logs["train_runtime"], 3)
            self.log_run(means)

    def share(self, means: Means, *, log: bool) -> int:
        """Add up the counts of all ranks, waiting for the device once.

        Args:
            means: of training.
            log: whether the metrics since the last log go into the next one.

        Returns:
            The tokens that all runs of the trainer have trained. TRL would also count the padding
            of `pad_to_multiple_of`, and of ranks without documents.
        """
        assert self.throughput is not None
        device = self.trainer.args.device
        ranks = self._gather(
            [
                *astuple(self.throughput.take_local()),
                self.peak_flops() or 0.0,
                peak_memory_bytes(device) or 0.0,
            ]
        )
        counts = Counts.summed([row[:-2] for row in ranks])
        self.throughput.add_shared(counts.shared_by(self.trainer.get_tp_size()))
        self._shared_at = self.trainer.state.global_step
        self._machine = machine_of([row[-2] for row in ranks], [row[-1] for row in ranks])
        tokens = self._tokens_before + self.throughput.run.tokens
        if not self.throughput.run.room:  # a class of a user, whose rows have no CPU copy
            tokens = self._tokens_before + int(self._num_scored)
        if self._log_sums[5] or means.get("num_tokens"):
            means["num_tokens"] = [tokens]
        if log:
            step = self.trainer.state.global_step
            self._logs = self.throughput.interval_metrics(step, self._machine)
            self._logs |= self.sources.interval_metrics()
            self._write_token_means(means)
        return tokens

    def log_run(self, means: Means) -> None:
        """Add the totals to the next log, and to the means of training: the run is over."""
        assert self.throughput is not None
        self._logs = self.throughput.run_metrics(self.trainer.state.global_step, self._machine)
        self._logs |= self.sources.run_metrics()
        self._write_token_means(means)
        self._finished = self.throughput.run, self._logs["train_seconds"]
        self.throughput = None

    def start_clock(self) -> None:
        """Start the clock where no micro-batch is counted, on TRL's path; no-op if it runs."""
        if self.throughput is not None:
            self.throughput.watch.start()

    def so_far(self) -> tuple[Counts, float] | None:
        """Return counts of all ranks and seconds of the run, up to the current step.

        None if ranks have not shared their counts since; on TRL's path, they count nothing.
        """
        if self.throughput is None:
            return self._finished
        if self._shared_at not in (None, self.trainer.state.global_step):
            return None
        return self.throughput.run, self.throughput.watch.seconds()

    def take_logs(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what the log that is written now shows of the interval, and all of it."""
        measured, self._logs = self._logs, {}
        of_sources = [f"loss_{name}" for name in self.sources.names]
        is_total = any(name.startswith("train_") for name in measured)
        shown = (
            measured
            if is_total
            else {k: measured[k] for k in (*_SHOWN, *of_sources) if k in measured}
        )
        return shown, measured

    def _write_token_means(self, means: Means) -> None:
        """Make TRL log the means over the trained tokens of all ranks since the last log."""
        write_means(means, self._log_sums, balances=self.trainer.aux_loss_enabled)
        if counts_for_nothing(self._log_sums):
            logger.warning(
                f"all tokens that were trained up to step {self.trainer.state.global_step} since "
                "the last log have a weight of 0: they changed nothing; raise loss_weights and "
                "loss_weight"
            )
        self._log_sums = _NOTHING

    def _gather(self, counted: Sequence[float]) -> list[list[float]]:
        """Return `counted` of every rank; the sums on devices are read by the same wait."""
        rows = self._device_sums.gather([*self.sources.take_counts(), *counted])
        self._log_sums = added([self._log_sums, *(row[:NUM_SUMS] for row in rows)])
        self._num_scored += sum(row[4] for row in rows) / self.trainer.get_tp_size()
        width = self._device_sums.trained.width
        behind = width + self.sources.num_on_cpu
        by_source = added(row[NUM_SUMS:behind] for row in rows)
        losses, counts = by_source[: width - NUM_SUMS], by_source[width - NUM_SUMS :]
        self.sources.add_shared(counts, losses, self.trainer.get_tp_size())
        return [row[behind:] for row in rows]

    # --- waiting ------------------------------------------------------------------------------

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock inside the block, once the device has finished what is queued."""
        if self.throughput is None or not self.throughput.watch.is_running:
            yield
            return
        self._device_sums.wait()
        with self.throughput.watch.pause():
            yield
