"""recipes/compare_packing.py and padding_free.py run, and compare what they promise."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from trl_packing.recipes import FOLDER, compare_packing, padding_free

import pytest

SMALL = ["--num_documents", "24", "--max_length", "256", "--per_device_train_batch_size", "2"]


def rows_of(script: str, folder: Path, names: Iterable[str]) -> tuple[dict[str, list[str]], str]:
    """Run a script; return the columns of its table by the name of the line, and all it prints."""
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *SMALL],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    found = {n: next(line for line in lines if line.startswith(n + "  ")) for n in names}
    return {name: line.removeprefix(name).split() for name, line in found.items()}, done.stdout


@pytest.mark.slow
def test_the_comparison_runs_and_its_numbers_are_those_of_the_plans(tmp_path):
    rows, _ = rows_of("compare_packing.py", tmp_path, compare_packing.RUNS)
    steps = {name: int(row[0]) for name, row in rows.items()}
    fill = {name: float(row[5].rstrip("%")) for name, row in rows.items()}
    padded = ("padding to max", "padding to longest", "... in padded steps")
    assert [steps[name] for name in padded] == [12, 12, 12]
    assert steps["this project"] < 6
    assert fill["padding to max"] < fill["padding to longest"] < fill["this project"]
    assert fill["greedy"] <= fill["this project"]
    # These see the same documents in every step; fewer steps have a higher rate.
    losses = [float(rows[name][6]) for name in padded]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-4)
    rates = [float(rows[name][2]) for name in ("this project", *padded)]
    assert rates[0] > rates[1] == rates[2] == rates[3]


@pytest.mark.slow
def test_padding_free_makes_the_same_steps_and_the_same_validation_loss(tmp_path):
    rows, printed = rows_of("padding_free.py", tmp_path, padding_free.RUNS)
    padded, free = rows["padded"], rows["padding-free"]
    assert padded[0] == free[0] == "12"
    assert float(padded[6]) == pytest.approx(float(free[6]), abs=2e-4)
    assert float(printed.split("steps differ by ")[1].split()[0]) < 1e-4
