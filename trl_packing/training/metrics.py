"""The trainer that says how fast it trains, and keeps the host from waiting for the device.

    get_batch_samples          counts micro-batches, from what their collator knows     (host)
    _maybe_log_save_evaluate   sums the counts of all ranks, once a log                 (throughput)
    log                        adds them to what is logged, in `log_history` and trackers
    evaluate, save             stop the clock
    _finalize_training         the totals, also in what `train()` returns

docs/metrics.md defines each of the names.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_packing.documents.host_row import HostRow, PackedBatch, host_row, wait_for
from trl_packing.loss.step_loss import WeightedMeanTrainer
from trl_packing.loss.token_metrics import (
    NUM_SUMS,
    TokenSums,
    added,
    counts_for_nothing,
    write_means,
)
from trl_packing.models.device_peaks import peak_flops
from trl_packing.models.flops import ModelFlops, NotCountable, model_flops
from trl_packing.training.throughput import Counts, Machine, Throughput, in_short, machine_of

logger = get_logger(__name__)


class MeasuredTrainer(WeightedMeanTrainer):
    """`WeightedMeanTrainer` that logs its throughput."""

    _throughput: Throughput | None = None  # while it trains
    _room: int | None = None  # tokens that a micro-batch of bins has room for
    _model_flops: ModelFlops | None = None
    _own_logs: dict[str, float] | None = None  # for the next call of `log`
    _waited_after: int | None = None  # the optimizer step after which the device was waited for
    _tokens_of_earlier_runs = 0
    # Entropy and accuracy: of this rank, read from the device; of all ranks since the last log.
    _own_token_sums: Sequence[float] = (0.0,) * NUM_SUMS
    _token_sums_of_log: Sequence[float] = (0.0,) * NUM_SUMS
    _clock = staticmethod(time.perf_counter)

    # --- counting -----------------------------------------------------------------------------

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Count anew with every run, also one that begins again with smaller batches."""
        found = super()._init_training_state(*args, **kwargs)
        if not self._trl_path:
            self._own_logs = None
            self._waited_after = None
            self._throughput = Throughput(self.state.global_step, self._clock)
            self._trained_sums = TokenSums()
            self._own_token_sums = self._token_sums_of_log = (0.0,) * NUM_SUMS
            self._tokens_of_earlier_runs = self._total_train_tokens
            self._model_flops = self._count_flops() if self._peak_flops() else None
        return found

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Count the micro-batches of a step: `training_step` may be a user's, which counts none."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        if self._throughput is not None:
            # From here on: before, readers start up, and a resumed run skips what it has seen.
            self._throughput.watch.start()
            for row in map(host_row, batches):
                if row is not None:
                    self._throughput.add(self._counts(row))
        return batches, num_items

    def _counts(self, row: HostRow) -> Counts:
        lengths, num_trained = row.lengths, int(row.is_trained.sum())
        return Counts(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            trained_tokens=num_trained,
            room=self._room or row.num_tokens,
            flops=self._model_flops.of(lengths, num_trained) if self._model_flops else 0.0,
        )

    def _count_flops(self) -> ModelFlops | None:
        try:
            return model_flops(self.model)
        except NotCountable as reason:
            logger.info(f"no MFU is logged for {type(self.model).__name__}: {reason}")
            return None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Keep what the host knows of the row with the tensors that the model is given."""
        prepared, row = super()._prepare_inputs(inputs), host_row(inputs)
        return prepared if row is None else PackedBatch(prepared, row)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Tell padding by its place: by its id, transformers leaves out EOS where it is the pad."""
        row = host_row(inputs)
        if row is not None and self.args.include_num_input_tokens_seen == "non_padding":
            inputs = {**inputs, "attention_mask": torch.tensor(row.num_tokens - row.padding)}
        super()._track_num_input_tokens(inputs)

    # --- logging ------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        step, control = self.state.global_step, self.control
        logs = control.should_log and step > self._globalstep_last_logged  # as the parent asks
        if self._throughput is not None and (logs or control.should_evaluate):
            machine = self._share_counts()
            if logs:
                self._own_logs = self._throughput.interval_metrics(step, machine)
                self._write_token_means()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """Log the totals too, and let transformers' samples be documents, not bins."""
        if self._throughput is not None:
            machine, step = self._share_counts(), self.state.global_step
            self._own_logs = self._throughput.run_metrics(step, machine)
            self._write_token_means()
            # Since transformers 5.19 it takes the share of the schedule that this call has run.
            start = getattr(self, "_initial_global_step", None)
            share = 1.0 if start is None else (step - start) / max(self.state.max_steps, 1)
            if share:
                num_train_samples = self._throughput.run.documents / share
            self._throughput = self._trained_sums = None
        return super()._finalize_training(trial, num_train_samples, start_time)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Not by TRL's `_metrics`: the totals would be lost where the last step was evaluated, for
        # TRL adds those of training only to a model in training mode.
        logs.update(self._own_logs or {})
        self._own_logs = None
        super().log(logs, start_time)

    def _write_token_means(self) -> None:
        """Let TRL log the means over the trained tokens of all ranks since the last log."""
        write_means(self._metrics["train"], self._token_sums_of_log)
        if counts_for_nothing(self._token_sums_of_log):
            logger.warning(
                f"all tokens that were trained up to step {self.state.global_step} since the last "
                "log have a weight of 0: they changed nothing; raise loss_weights and loss_weight"
            )
        self._token_sums_of_log = (0.0,) * NUM_SUMS

    def _share_counts(self) -> Machine:
        """Add the counts of all ranks, waiting for the device once."""
        assert self._throughput is not None
        own = [
            *astuple(self._throughput.take_local()),
            self._peak_flops() or 0.0,
            peak_memory_bytes(self.args.device) or 0.0,
        ]
        ranks = self._of_all_ranks(own)
        counts = Counts.summed([row[:-2] for row in ranks])
        self._throughput.add_shared(counts.shared_by(self.get_tp_size()))
        # TRL counts the padding of `pad_to_multiple_of` and of ranks without documents too.
        tokens = self._tokens_of_earlier_runs + self._throughput.run.tokens
        self._total_train_tokens = tokens
        if self._metrics["train"].get("num_tokens"):
            self._metrics["train"]["num_tokens"] = [tokens]
        return machine_of([row[-2] for row in ranks], [row[-1] for row in ranks])

    def _of_all_ranks(self, own: list[float]) -> list[list[float]]:
        """Return `own` of every rank; adds up entropy and accuracy of all, by the same wait."""
        if self.args.world_size == 1:
            self._wait_for_device()
            rows = [[*self._own_token_sums, *own]]
        else:
            sent = torch.tensor([[*self._own_token_sums, *own]], dtype=torch.float64)
            sent = sent.to(self.args.device, non_blocking=True)
            pending = None if self._trained_sums is None else self._trained_sums.take()
            if pending is not None:
                sent[0, :NUM_SUMS] += pending
            rows = self.accelerator.gather(sent).tolist()
            self._waited_after = self.state.global_step
        self._own_token_sums = (0.0,) * NUM_SUMS
        self._token_sums_of_log = added([self._token_sums_of_log, *(r[:NUM_SUMS] for r in rows)])
        return [row[NUM_SUMS:] for row in rows]

    def _wait_for_device(self) -> None:
        """Let the device finish what is queued, at most once after an optimizer step."""
        if self._waited_after == self.state.global_step:
            return
        self._waited_after = self.state.global_step
        pending = None if self._trained_sums is None else self._trained_sums.take()
        if pending is not None:
            pending = pending.to("cpu", non_blocking=True)  # there when the device has finished
        wait_for(self.args.device)
        if pending is not None:
            self._own_token_sums = added([self._own_token_sums, pending.tolist()])

    def _peak_flops(self) -> float | None:
        """Return the peak of this process' devices in FLOP/s, None if it is not known."""
        device = self.args.device
        if device.type != "cuda":
            return None
        peak = peak_flops(torch.cuda.get_device_name(device), self._matrix_dtype())
        return None if peak is None else peak * max(self.args.n_gpu, 1)

    def _matrix_dtype(self) -> str:
        """Return the type in which matrix products are computed."""
        if self.args.bf16 or self.args.fp16:
            return "bfloat16" if self.args.bf16 else "float16"
        dtype = str(self.model.dtype).removeprefix("torch.")
        is_tf32 = dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
        return "tf32" if is_tf32 else dtype

    # --- what is not training -----------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._not_timed():
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._not_timed():
            return super().predict(*args, **kwargs)

    @contextmanager
    def _not_timed(self) -> Iterator[None]:
        """Stop the clock, when the device has done what was queued."""
        if self._throughput is None or not self._throughput.watch.is_running:
            yield
            return
        self._wait_for_device()
        with self._throughput.watch.paused():
            yield


def peak_memory_bytes(device: torch.device) -> float | None:
    """Return the most memory that PyTorch held on `device`, of a CPU the process; None if unknown.

    Of a device since the process began or `reset_peak_memory_stats` was called.
    """
    if device.type != "cpu":
        most = getattr(torch.get_device_module(device), "max_memory_allocated", None)
        return None if most is None else float(most(device))
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


class ThroughputOnBar(TrainerCallback):
    """Show the throughput beside the progress bar, in a terminal and in a notebook, once a log."""

    def __init__(self, trainer: MeasuredTrainer):
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        text = in_short(logs or {})
        if not text or not state.is_world_process_zero:
            return
        for callback in self.trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)
            if hasattr(bar, "set_postfix_str"):  # rich's has none, and shows all logs
                bar.set_postfix_str(text)
            tracker: Any = getattr(callback, "training_tracker", None)
            if hasattr(tracker, "prefix"):
                tracker.prefix = text
