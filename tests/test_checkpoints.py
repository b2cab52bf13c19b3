"""A run that was killed resumes from its last whole checkpoint, and ends as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers.trainer_utils import get_last_checkpoint

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.checkpoints import MARK, last_whole_checkpoint

TESTS = Path(__file__).parent


def trainer_for(folder, **settings):
    defaults = {
        "max_length": 32,
        "per_device_train_batch_size": 1,  # 6 bins an epoch, 12 steps
        "num_train_epochs": 2,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
    }
    return PackedSFTTrainer(
        tiny_model("llama"),
        PackedSFTConfig(str(folder), **(defaults | settings)),
        train_dataset=Dataset.from_list(documents_of_lengths([20] * 6)),
        processing_class=tiny_tokenizer(),
    )


def steps_saved(folder: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def test_a_checkpoint_is_marked_while_it_is_written_and_not_after(tmp_path):
    trainer = trainer_for(tmp_path)
    seen = []
    save = trainer._save_rng_state
    trainer._save_rng_state = lambda folder: (seen.append(os.listdir(folder)), save(folder))
    trainer.train()
    assert seen
    assert all(MARK in files for files in seen)
    assert not list(tmp_path.glob(f"*/{MARK}"))


def test_a_half_written_checkpoint_is_skipped_with_a_warning(tmp_path, caplog):
    whole = trainer_for(tmp_path / "a")
    whole.train()
    trainer_for(tmp_path / "b").train()
    last = tmp_path / "b" / "checkpoint-12"
    (last / MARK).touch()
    (last / "optimizer.pt").write_bytes(b"half")
    assert get_last_checkpoint(str(tmp_path / "b")) == str(last)  # what Trainer would take
    resumed = trainer_for(tmp_path / "b")
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-12 is half-written: resuming from" in caplog.text
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_a_half_written_checkpoint_that_is_named_is_refused(tmp_path):
    trainer_for(tmp_path).train()
    (tmp_path / "checkpoint-4" / MARK).touch()
    with pytest.raises(ValueError, match=r"checkpoint-4' is half-written .* True for the last"):
        trainer_for(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_no_whole_checkpoint_is_said(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / MARK).touch()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is whole: checkpoint-2"):
        trainer_for(tmp_path).train(resume_from_checkpoint=True)


def test_old_checkpoints_go_only_when_the_new_one_is_whole(tmp_path):
    trainer = trainer_for(tmp_path, save_total_limit=1)
    save = trainer._save_rng_state

    def stop_at_six(folder):
        save(folder)
        if folder.endswith("checkpoint-6"):
            raise KeyboardInterrupt

    trainer._save_rng_state = stop_at_six
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert last_whole_checkpoint(tmp_path)[0].name == "checkpoint-4"
    assert trainer.args.save_total_limit == 1
    trainer_for(tmp_path, save_total_limit=1).train(resume_from_checkpoint=True)
    assert steps_saved(tmp_path) == [12]


def test_checkpoints_are_ordered_by_their_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best", "other-11"):
        (tmp_path / name).mkdir()
    assert last_whole_checkpoint(tmp_path)[0].name == "checkpoint-10"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_ten_times_a_run_ends_with_the_same_weights(tmp_path, ranks):
    command = [sys.executable, "-m", "distributed.kills", str(tmp_path), str(ranks), "10", "4"]
    done = subprocess.run(
        command,
        cwd=TESTS,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["same_weights"], result
    assert result["kills"] == 10, result
    assert result["half_written"] >= 3, result
    assert max(result["epochs"]) >= 1, result
