"""recipes/compare_packing.py runs, and compares what it promises."""

import os
import subprocess
import sys

import pytest
from helpers.recipes import FOLDER, module

SMALL = ["--num_documents", "24", "--max_length", "256", "--per_device_train_batch_size", "2"]


@pytest.mark.slow
def test_the_comparison_runs_and_its_numbers_are_those_of_the_plans(tmp_path):
    command = [sys.executable, str(FOLDER / "compare_packing.py"), *SMALL]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=900, **run)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = module("compare_packing").RUNS
    lines = done.stdout.splitlines()
    rows = {n: x.removeprefix(n).split() for x in lines for n in runs if x.startswith(n + "  ")}
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
