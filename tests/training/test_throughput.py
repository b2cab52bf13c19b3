"""The arithmetic of throughput: a clock that stands, rates of an interval and of a run."""

import itertools
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch

from trl_packing import PackedCollator
from trl_packing.attention.flops import peak_flops
from trl_packing.loss.sums import LossSums
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.progress_bar import in_short
from trl_packing.training.throughput import (
    GIB,
    Counts,
    Machine,
    Stopwatch,
    Throughput,
    machine_of,
    metrics,
)

UNKNOWN = Machine()


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_stopwatch_counts_only_while_it_runs():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 7  # not started
    assert watch.seconds() == 0
    with watch.pause():  # of a watch that stands
        clock.now += 1
    assert watch.seconds() == 0
    watch.start()
    clock.now += 3
    watch.start()  # once more changes nothing
    with watch.pause():
        clock.now += 50
        with watch.pause():  # a save inside an evaluation
            clock.now += 5
        clock.now += 50
    clock.now += 2
    assert watch.seconds() == 5


def test_a_pause_ends_with_an_error_too():
    clock = Clock()
    watch = Stopwatch(clock)
    watch.start()

    def evaluate():
        with watch.pause():
            clock.now += 9
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        evaluate()
    clock.now += 1
    assert watch.seconds() == 1


def test_intervals_add_up_to_the_run():
    clock = Clock()
    measured = Throughput(first_step=10, clock=clock)
    measured.watch.start()
    machine = Machine(peak_flops=100.0, peak_memory_bytes=3 * GIB)
    logged = []
    for step, seconds in ((11, 2.0), (13, 4.0)):
        measured.add(Counts(1, 60, 40, 80, 90.0))
        measured.add(Counts(2, 70, 50, 80, 110.0))
        measured.add_shared(measured.take_local())
        clock.now += seconds
        logged.append(measured.interval_metrics(step, machine))
    assert logged[0] == {
        "tokens_per_second": 65.0,
        "trained_tokens_per_second": 45.0,
        "documents_per_second": 1.5,
        "utilization": 130 / 160,
        "documents_per_step": 3.0,
        "peak_memory_gib": 3.0,
        "mfu": 1.0,
    }
    assert logged[1]["tokens_per_second"] == 32.5
    assert logged[1]["documents_per_step"] == 1.5
    assert logged[1]["mfu"] == 0.5
    whole = measured.run_metrics(13, machine)
    assert whole["train_tokens"] == 260
    assert whole["train_trained_tokens"] == 180
    assert whole["train_documents"] == 6
    assert whole["train_seconds"] == 6
    assert whole["train_tokens_per_second"] == 260 / 6
    assert whole["train_documents_per_step"] == 2
    assert whole["train_mfu"] == pytest.approx(400 / 6 / 100)


def test_what_is_not_known_is_left_out():
    counts = Counts(1, 10, 5, 20, 7.0)
    assert "mfu" not in metrics(counts, 1.0, 1, UNKNOWN)
    assert "mfu" not in metrics(Counts(1, 10, 5, 20), 1.0, 1, Machine(peak_flops=1.0))
    assert "peak_memory_gib" not in metrics(counts, 1.0, 1, UNKNOWN)
    assert set(metrics(counts, 0.0, 0, UNKNOWN)) == {"utilization"}
    assert metrics(Counts(), 1.0, 1, Machine(1.0, 1.0)) == {}


def test_tokens_of_documents_and_computed_ones_are_told_apart():
    counts = Counts(documents=4, tokens=100, trained_tokens=20, room=64, computed=56, shared=50)
    found = metrics(counts, 2.0, 1, UNKNOWN, shares=True)
    assert found["tokens_per_second"] == 50
    assert found["computed_tokens_per_second"] == 28  # with 6 of padding
    assert found["utilization"] == 50 / 64
    apart = metrics(Counts(4, 56, 20, 64, computed=64), 2.0, 1, UNKNOWN)
    assert "computed_tokens_per_second" not in apart


def test_a_run_that_has_shared_logs_computed_tokens_from_then_on():
    measured = Throughput(clock=Clock())
    measured.watch.start()
    logged = []
    for step, shared in enumerate((0, 4, 0), start=1):
        measured.watch._clock.now += 1.0
        measured.add_shared(Counts(2, 10, 5, 20, computed=10 - shared, shared=shared))
        logged.append(measured.interval_metrics(step, UNKNOWN).get("computed_tokens_per_second"))
    assert logged == [None, 6, 10]
    assert measured.run_metrics(3, UNKNOWN)["train_computed_tokens"] == 26


def test_one_unknown_device_leaves_the_peak_unknown():
    assert machine_of([2.0, 3.0], [5.0, 4.0]) == Machine(5.0, 5.0)
    assert machine_of([2.0, 0.0], [0.0, 0.0]) == Machine(None, None)


def test_ranks_that_hold_the_same_batch_count_it_once():
    assert Counts(4, 20, 10, 64, 1e20, 24, 6).shared_by(2) == Counts(2, 10, 5, 32, 5e19, 12, 3)


def test_counts_of_ranks_are_added_by_name():
    one, other = Counts(4, 20, 10, 64, 1e20, 24, 6), Counts(1, 2, 3, 4, 5.0, 6, 7)
    total = Counts.summed([astuple(one), astuple(other)])
    assert total == one + other == Counts(5, 22, 13, 68, 1e20 + 5, 30, 13)
    assert isinstance(total.tokens, int)


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H200", "float16", 989),
        ("NVIDIA B200", "bfloat16", 2250),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA A10", "bfloat16", 125),
        ("Tesla T4", "float16", 65),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("NVIDIA GeForce RTX 3090", "bfloat16", 71),
    ],
)
def test_peaks_of_known_devices(name, dtype, tera):
    assert peak_flops(name, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA H200 MIG 1g.18gb", "bfloat16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16"),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16"),
        ("NVIDIA H100 of a later year", "bfloat16"),
        ("AMD Instinct MI300X", "bfloat16"),
        ("Tesla T4", "bfloat16"),  # it has none
        ("NVIDIA B200", "float32"),
        ("NVIDIA H100 80GB HBM3", "uint8"),
    ],
)
def test_nothing_is_guessed_of_others(name, dtype):
    assert peak_flops(name, dtype) is None


@pytest.mark.parametrize(
    ("rate", "words"), [(7.0, "7"), (999.0, "999"), (45600.0, "45.6k"), (2.5e6, "2.5M")]
)
def test_the_bar_shows_rates_in_short(rate, words):
    assert in_short({"tokens_per_second": rate}) == f"{words} tokens/s"


def test_a_meter_counts_a_shared_prefix_once():
    """Two documents of 22 tokens: 20 in common, of which the last stands in both branches."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1, device=torch.device("cpu")),
        aux_loss_enabled=False,
        get_tp_size=lambda: 1,
        state=SimpleNamespace(global_step=0, max_steps=4),
    )
    collate = PackedCollator(tensors_only=True, shares_prefixes=True, pad_to_multiple_of=8)
    prompt = list(range(20))
    batch = collate([{"input_ids": [*prompt, 30, 31]}, {"input_ids": [*prompt, 40, 41]}])
    for room, capacity in ((None, 32), (64, 64)):
        meter = ThroughputMeter(trainer, LossSums())
        meter.start_run(tokens_before=0)
        meter.count([batch], room=room)
        counts = meter.throughput.take_local()
        # Each document trains all of its tokens but the first.
        assert counts == Counts(2, 44, 42, capacity, 0.0, 32, 44 - 25)


def test_the_bar_shows_nothing_of_an_evaluation():
    assert in_short({"eval_loss": 2.0, "epoch": 1.0}) == ""


def test_a_meter_counts_the_rows_of_a_run_without_a_trainer():
    """A row of 3 and 2 tokens, twice; the clock advances by a second whenever it is read."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(world_size=1, device=torch.device("cpu")),
        aux_loss_enabled=False,
        get_tp_size=lambda: 1,
        state=SimpleNamespace(global_step=0, max_steps=4),
    )
    batch = PackedCollator(tensors_only=True)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    meter, times = ThroughputMeter(trainer, LossSums()), itertools.count()
    meter.clock = lambda: float(next(times))
    meter.start_run(tokens_before=100)
    assert meter.is_running
    meter.count([batch, batch], room=8)
    trainer.state.global_step = 1
    means = {"num_tokens": [0]}
    assert meter.share(means, log=True) == 110
    assert means["num_tokens"] == [110]
    _, logs = meter.take_logs()
    assert (logs["tokens_per_second"], logs["utilization"]) == (10, 10 / 16)
    assert meter.take_logs() == ({}, {})
    meter.log_run(means)
    assert meter.take_logs()[0]["train_documents"] == 4
    assert not meter.is_running


def test_images_are_counted_where_there_are_some():
    throughput = Throughput()
    throughput.add_shared(Counts(4, 56, 20, 64, images=6))
    assert throughput.run_metrics(1, UNKNOWN)["train_images"] == 6
    assert metrics(throughput.run, 2.0, 1, UNKNOWN)["images_per_second"] == 3
    assert Counts(4, 56, 20, 64, images=6).shared_by(2).images == 3
    assert not any("images" in name for name in metrics(Counts(4, 56, 20, 64), 1.0, 1, UNKNOWN))
