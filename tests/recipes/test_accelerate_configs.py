"""accelerate reads recipes/accelerate/*.yaml, and the recipe trains with them.

fsdp2.yaml is not started here, because accelerate 1.15 silently turns it into DDP on a CPU.
tests/attention/test_sharding.py trains with FSDP2.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from helpers.ports import free_port
from helpers.prepared import write_rows
from helpers.tiny import save_tiny_model

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIGS = RECIPES / "accelerate"
NAMES = ["single", "ddp", "fsdp2", "zero2", "zero3", "multi_node"]


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_it(name):
    """Its loader raises for a key that it does not know."""
    assert sorted(path.stem for path in CONFIGS.glob("*")) == sorted(NAMES)
    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    kind = {"single": "NO", "ddp": "MULTI_GPU", "multi_node": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type == DistributedType(kind.get(name, "DEEPSPEED"))
    assert config.num_machines == (2 if name == "multi_node" else 1)
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
    if name.startswith("zero"):
        assert config.deepspeed_config["zero_stage"] == int(name[-1])


def run(name: str, folder: Path, launcher: str = "", arguments: str = "") -> str:
    """Run the recipe on a tiny model with a config, on CPUs; return its output."""
    data = folder / "data.jsonl"
    if not data.exists():
        rows = [{"prompt": f"What is {i}?", "completion": f" {i} and {i}."} for i in range(24)]
        write_rows(data, rows)
        save_tiny_model(folder, "qwen2", chat=False)
    words = (
        f"-m accelerate.commands.launch --config_file {CONFIGS / name}.yaml {launcher} "
        f"{RECIPES / 'sft_packed.py'} --model_name_or_path tiny-qwen2 --dataset_name data.jsonl "
        "--output_dir out --max_steps 3 --max_length 64 --per_device_train_batch_size 1 "
        "--logging_steps 1 --report_to none --learning_rate 0.01 --optim sgd --save_strategy no "
        f"{arguments}"
    )
    done = subprocess.run(
        [sys.executable, *words.split()],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(RECIPES.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def losses(output: str) -> list[float]:
    """Return the printed losses, of four digits."""
    return [float(found) for found in re.findall(r"'loss': '?([0-9.]+)", output)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    """The printed losses of one process with twice the accumulation."""
    folder = tmp_path_factory.mktemp("single")
    found = losses(run("single", folder, arguments="--gradient_accumulation_steps 2"))
    assert len(found) == 3
    assert len(set(found)) > 1
    assert (folder / "out" / "model.safetensors").exists()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_two_processes_train_as_one_with_twice_the_accumulation(name, alone, tmp_path):
    if name != "ddp" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: `make .venv/.all`")
    port = f"--main_process_port {free_port()}"
    output = run(name, tmp_path, f"--num_processes 2 --mixed_precision no {port}", "--use_cpu true")
    assert losses(output) == pytest.approx(alone, abs=1.1e-3)  # their last digit is rounded
    assert "2 ranks" in output
    assert (tmp_path / "out" / "model.safetensors").exists()
