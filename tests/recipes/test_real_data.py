"""A real pretrained model trains on real data, as the README says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.recipes import FOLDER, module

SHARED = FOLDER.parents[1] / "shared"


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the folder of SmolLM2-135M-Instruct, which is made once."""
    folder = Path.home() / ".cache" / "trl_packing_tests" / "smollm2"
    script = SHARED / "tools" / "get_smollm2.py"
    if not script.exists():
        pytest.skip(f"no real model in {SHARED}")
    if not (folder / "config.json").exists():
        done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True)
        if done.returncode:
            pytest.skip(f"the real model cannot be made: {done.stderr[-300:]!r}")
    return str(folder)


@pytest.mark.slow
@pytest.mark.shared
def test_a_real_model_trains_on_real_data(smollm2, tmp_path):
    rows = (SHARED / "data" / "gsm8k_train.jsonl").read_text().splitlines(keepends=True)[:100]
    (tmp_path / "gsm8k.jsonl").write_text("".join(rows))
    out = tmp_path / "out"
    module("sft_packed").main(
        [
            *("--model_name_or_path", smollm2, "--dataset_name", str(tmp_path / "gsm8k.jsonl")),
            *("--prompt_column", "question", "--completion_column", "answer"),
            *("--test_split_size", "0.04", "--max_length", "512", "--max_steps", "2"),
            *("--per_device_train_batch_size", "1", "--learning_rate", "1e-4"),
            *("--report_to", "none", "--output_dir", str(out)),
        ]
    )
    metrics = json.loads((out / "all_results.json").read_text())
    assert metrics["train_loss"] < 3  # a pretrained model that sees what it expects to see
    assert metrics["eval_loss"] < 3
    assert (out / "model.safetensors").exists()
