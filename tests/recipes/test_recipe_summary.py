"""The demo ends with counts that a loop confirms, and a picture of the loss."""

import sys
from dataclasses import replace
from types import SimpleNamespace

from trl_packing.recipes.recipe_summary import (
    ShortLines,
    chart,
    padded_tokens,
    save_picture,
    short_line,
    summary,
    what_packing_did,
)

import numpy as np
import pytest
from datasets import Dataset

from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.histogram import Histogram

LENGTHS = np.random.default_rng(1).integers(5, 300, 103)
REPORT = PackingReport(
    ranks=2,
    accumulation=2,
    micro_batch="1 bin",
    attention=None,
    capacity=512,
    documents=103,
    bins=31,
    documents_per_step=39.6,
)


def test_padding_is_counted_as_batches_are_padded():
    drawn = np.random.default_rng(7).permutation(LENGTHS).tolist()
    batches = [drawn[at : at + 10] for at in range(0, 103, 10)]
    expected = sum(max(batch) * len(batch) for batch in batches)
    assert padded_tokens(LENGTHS, 10, seed=7) == expected > LENGTHS.sum()
    assert padded_tokens(LENGTHS, 1, seed=7) == LENGTHS.sum()
    assert padded_tokens(LENGTHS, 1000, seed=7) == 103 * LENGTHS.max()


def test_the_padded_run_has_as_many_documents_in_a_micro_batch():
    words = what_packing_did(REPORT, LENGTHS, epochs=1.5, seed=7)
    padded = padded_tokens(LENGTHS, 10, seed=7)  # 39.6 documents / 2 ranks / 2 accumulated
    assert f"batches of 10: the model computes {padded:,} tokens" in words
    assert f"31 bins of 512 tokens: the model computes {LENGTHS.sum():,} tokens" in words
    assert f"avoided    {(padded - LENGTHS.sum()) * 1.5:,.0f} tokens of padding in 1.5" in words
    assert all(len(line) <= 100 for line in words.splitlines())
    unpacked = what_packing_did(replace(REPORT, bins=None), LENGTHS, epochs=1, seed=7)
    assert "packed     rows of any length: the model computes" in unpacked


@pytest.mark.parametrize("drawn_of", [None, 40])
def test_padding_is_not_counted_of_a_mixture(drawn_of):
    rows = [{"input_ids": [3] * length, "labels": [3] * length} for length in LENGTHS]
    report = replace(REPORT, lengths=Histogram.of(LENGTHS), documents_in_data=drawn_of)
    said: list[str] = []
    trainer = SimpleNamespace(
        packing_report=report,
        train_dataset=Dataset.from_list(rows),
        state=SimpleNamespace(epoch=0.004812, log_history=[]),
        args=SimpleNamespace(seed=7),
    )
    summary(trainer, said.append)
    assert bool(said) == (drawn_of is None)
    assert not said or said[0].endswith("tokens of padding in 0.00481 epochs")


def test_the_chart_falls_as_the_loss_does():
    rows = chart([100, 200, 300, 400], [8.0, 4.0, 2.0, 1.0], width=40, height=4).splitlines()
    assert rows[0].startswith("8.00 ┤█")
    assert rows[3].startswith("1.00 ┤█")
    filled = [len(row.split("┤")[-1].split("│")[-1]) for row in rows[:4]]
    assert filled == sorted(filled)
    assert filled[0] < filled[3] == 40
    assert rows[4].strip().startswith("step 100")
    assert rows[4].endswith("step 400")
    assert {len(row) for row in rows[3:]} == {46}
    rising = chart([1, 2], [1.0, 8.0], width=40, height=4).splitlines()
    assert rising[0].endswith("█")
    assert "█" not in rising[0][:40]
    assert "0.50 ┤" in chart([1, 2], [0.5, 0.5]), "a constant loss has a picture too"


def test_log_lines_are_short():
    logs = {"loss": 1.2041, "grad_norm": 3.0, "epoch": 1.626, "tokens_per_second": 14310.2}
    logs |= {"learning_rate": 1e-4, "num_tokens": 10_000, "mean_token_accuracy": 0.5}
    assert short_line(1400, logs) == "step 1,400 · epoch 1.63 · loss 1.204 · 14,310 tokens/s"
    end = {"train_runtime": 312.4, "train_loss": 0.9, "train_documents": 40_000, "epoch": 8.0}
    assert len(short_line(1968, end | {"train_tokens": 2_008_168})) <= 100


def test_a_line_is_written_above_the_bar_of_one_rank(monkeypatch):
    callback, written = ShortLines(), []
    callback.training_bar = SimpleNamespace(write=written.append)
    for is_zero in (True, False):
        state = SimpleNamespace(global_step=5, is_world_process_zero=is_zero)
        callback.on_log(None, state, None, {"loss": 2.0})
    assert written == ["step     5 · loss 2.000"]


@pytest.mark.parametrize("installed", [True, False])
def test_the_picture_is_written_where_matplotlib_is_installed(tmp_path, monkeypatch, installed):
    if not installed:
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "loss.png"
    assert save_picture([1, 2], [2.0, 1.0], path) is installed
    assert path.exists() is installed
    if installed:
        assert path.read_bytes().startswith(b"\x89PNG")
