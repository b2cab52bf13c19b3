"""`benchmarks/real_model.py`, on a tiny model: what it checks, and what it writes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from helpers.tiny import save_tiny_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "real_model.py"


@pytest.fixture
def real_model(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("real_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def turn(module: ModuleType, **changes: dict) -> dict:
    """Return results of the three runs on two documents of 5 tokens, with `changes` by run."""
    same = {"seconds": 2.0, "cpu_seconds": 3.0, "gib": 1.5, "losses": [4.0]}
    counts = {"documents": [2], "tokens": [10], "computed": [12]}
    return {run: same | counts | changes.get(run, {}) for run in module.RUNS}


def test_other_losses_or_documents_stop_the_benchmark(real_model):
    real_model.check(turn(real_model), documents=2)
    ours = real_model.OURS
    with pytest.raises(SystemExit, match=r"4\.0 padded, 4\.001 here"):
        real_model.check(turn(real_model, **{ours: {"losses": [4.001]}}), documents=2)
    with pytest.raises(SystemExit, match=r"trl_packing trained \(2, 9\)"):
        real_model.check(turn(real_model, **{ours: {"tokens": [9]}}), documents=2)


def test_only_the_lines_of_the_readme_are_replaced(real_model, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- benchmarks/real_model.py -->\nold\n<!-- end -->\nb\n")
    real_model.replace_lines(readme, "new\n")
    assert readme.read_text() == "a\n<!-- benchmarks/real_model.py -->\nnew\n<!-- end -->\nb\n"
    readme.write_text("no table")
    with pytest.raises(SystemExit, match="must hold"):
        real_model.replace_lines(readme, "new\n")


@pytest.mark.slow
def test_three_trainers_are_measured_on_the_same_documents(tmp_path):
    data, output = tmp_path / "data.jsonl", tmp_path / "out.md"
    model = save_tiny_model(tmp_path)
    rows = [{"question": "to be " * n, "answer": "or not " * (5 - n)} for n in range(1, 5)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmarks/real_model.py -->\n<!-- end -->\n")
    options = ["--model", model, "--data", data, "--output", output, "--readme", readme]
    options += ["--documents", 4, "--batch", 2, "--max_length", 64, "--turns", 1]
    command = [sys.executable, SCRIPT, *options]
    subprocess.run([*map(str, command)], check=True, cwd=ROOT)
    text = output.read_text()
    assert "| TRL, padded | " in text
    assert "| 2, 2 | " in text
    assert "| 2 | " in text.partition("## Losses")[2]
    assert readme.read_text().count("GiB") == 3
