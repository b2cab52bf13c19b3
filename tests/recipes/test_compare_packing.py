"""recipes/compare_packing.py and padding_free.py run, and compare what they promise."""

import os
import subprocess
import sys
from pathlib import Path

from trl_packing.recipes import FOLDER, compare_packing, padding_free

import pytest

SMALL = ["--num_documents", "24", "--max_length", "256", "--per_device_train_batch_size", "2"]


def run(script: str, *arguments: str, cwd: Path, processes: int = 1) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), str(FOLDER / script)]
    return subprocess.run(
        [*command, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )


def rows_of(printed: str, names) -> dict[str, list[str]]:
    """Return the columns of the printed table by the name of the line."""
    lines = printed.splitlines()
    found = {n: next(line for line in lines if line.startswith(n + "  ")) for n in names}
    return {name: line.removeprefix(name).split() for name, line in found.items()}


@pytest.mark.slow
def test_the_comparison_runs_and_its_numbers_are_those_of_the_plans(tmp_path):
    done = run("compare_packing.py", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = rows_of(done.stdout, compare_packing.RUNS)
    steps = {name: int(row[0]) for name, row in rows.items()}
    fill = {name: float(row[5].rstrip("%")) for name, row in rows.items()}
    assert steps["padding to max"] == steps["padding to longest"] == 12
    assert steps["... in padded steps"] == 12
    assert steps["this project"] < 6
    assert fill["padding to max"] < fill["padding to longest"] < fill["this project"]
    assert fill["greedy"] <= fill["this project"]
    # Padding changes nothing but time: both padded runs see the same documents in every step.
    losses = [float(rows[name][6]) for name in ("padding to max", "padding to longest")]
    assert losses[0] == pytest.approx(losses[1], abs=2e-4)
    # Packed, but the documents of the padded steps in every step.
    assert float(rows["... in padded steps"][6]) == pytest.approx(losses[0], abs=2e-4)
    # Fewer steps, a higher rate; the row with the padded steps keeps it.
    assert float(rows["this project"][2]) > float(rows["padding to max"][2])
    assert rows["... in padded steps"][2] == rows["padding to max"][2]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_padding_free_makes_the_same_steps_and_the_same_validation_loss(tmp_path, processes):
    done = run("padding_free.py", *SMALL, cwd=tmp_path, processes=processes)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = rows_of(done.stdout, padding_free.RUNS)
    padded, free = rows["padded"], rows["padding-free"]
    assert padded[0] == free[0] == str(12 // processes)
    assert float(padded[6]) == pytest.approx(float(free[6]), abs=2e-4)
    furthest = done.stdout.split("steps differ by ")[1].split()[0]
    assert float(furthest) < 1e-4
    assert done.stdout.count("steps differ by") == 1
