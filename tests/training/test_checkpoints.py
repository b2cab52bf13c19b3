"""A run that was killed resumes from its last whole checkpoint, and ends as if nothing had been."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import make_trainer
from helpers.tiny import documents_of_lengths
from transformers.trainer_utils import get_last_checkpoint

from trl_packing import PackedSFTTrainer
from trl_packing.training.checkpoints import MARK, checkpoint_to_resume, last_whole_checkpoint

TESTS = Path(__file__).parents[1]


def trainer_for(folder, **settings):
    """Return a trainer of 6 bins an epoch, 12 steps."""
    defaults = {"max_length": 32, "per_device_train_batch_size": 1, "num_train_epochs": 2}
    defaults |= {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    return make_trainer(folder, documents_of_lengths([20] * 6), **defaults | settings)


@pytest.mark.parametrize("each_node", [False, True])
def test_a_checkpoint_is_marked_until_it_is_whole_and_uploaded(tmp_path, monkeypatch, each_node):
    """With `save_on_each_node`, the first rank of another node marks its own."""
    uploaded, seen = [], []
    monkeypatch.setattr(
        PackedSFTTrainer,
        "_push_from_checkpoint",
        lambda self, folder: uploaded.append((Path(folder).name, os.listdir(folder))),
    )
    trainer = trainer_for(tmp_path, hub_strategy="checkpoint", save_on_each_node=each_node)
    if each_node:
        monkeypatch.setattr(type(trainer.accelerator), "is_main_process", property(lambda _: False))
    trainer.args.push_to_hub, trainer.push_in_progress = True, None
    save = trainer._save_rng_state
    trainer._save_rng_state = lambda folder: (seen.append(os.listdir(folder)), save(folder))
    trainer.train()
    assert all(MARK in files for files in seen)
    assert len(seen) == 6
    assert [name for name, _ in uploaded] == [f"checkpoint-{n}" for n in range(2, 13, 2)]
    assert all("trainer_state.json" in files and MARK not in files for _, files in uploaded)


def test_a_record_with_other_numbers_is_refused(tmp_path):
    trainer_for(tmp_path).train()
    path = tmp_path / "checkpoint-4" / "epoch.json"
    text = path.read_text()
    for changed in (text.replace('"steps\\": 4', '"steps\\": 3'), text[:-9], text[:-9] + "]"):
        assert changed != text
        path.write_text(changed)
        with pytest.raises(ValueError, match=r"epoch\.json is damaged; resume from another"):
            trainer_for(tmp_path).train(resume_from_checkpoint=str(path.parent))


def test_a_half_written_checkpoint_is_skipped(tmp_path):
    whole = trainer_for(tmp_path / "a")
    whole.train()
    trainer_for(tmp_path / "b").train()
    last = tmp_path / "b" / "checkpoint-12"
    (last / MARK).touch()
    (last / "optimizer.pt").write_bytes(b"half")
    assert get_last_checkpoint(str(tmp_path / "b")) == str(last)  # what Trainer would take
    resumed = trainer_for(tmp_path / "b")
    resumed.train(resume_from_checkpoint=True)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name


def test_half_written_checkpoints_are_refused_where_no_other_is_whole(tmp_path):
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    (folder / MARK).touch()
    for asked in (True, folder):
        with pytest.raises(ValueError, match=r"checkpoint-2 is half-written .*; resume from"):
            trainer_for(tmp_path).train(resume_from_checkpoint=asked)


def test_what_is_no_checkpoint_is_refused_with_what_to_write(tmp_path):
    """A command line has texts: "True" is no folder."""
    trainer = trainer_for(tmp_path / "out")
    for asked in (True, "True", "true"):
        with pytest.raises(ValueError, match=r"True, but output_dir='.*out' has no checkpoint; "):
            trainer.train(resume_from_checkpoint=asked)
    with pytest.raises(ValueError, match=r"'nowhere' is no folder; name one .*, or True for"):
        trainer.train(resume_from_checkpoint="nowhere")
    assert checkpoint_to_resume("False", trainer) is False
    trainer.train()
    last = str(tmp_path / "out" / "checkpoint-12")
    assert checkpoint_to_resume("True", trainer) == last
    with pytest.raises(ValueError, match=r"is a folder of checkpoints; name one of them: '.*-12'"):
        checkpoint_to_resume(tmp_path / "out", trainer)


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
    assert last_whole_checkpoint(tmp_path).name == "checkpoint-4"
    assert trainer.args.save_total_limit == 1
    trainer_for(tmp_path, save_total_limit=1).train(resume_from_checkpoint=True)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-12"]


def test_an_optimizer_that_is_missing_is_refused_unless_that_is_asked_for(tmp_path):
    """A file, one file a rank, or a folder of shards."""
    trainer = trainer_for(tmp_path)
    (tmp_path / "scheduler.pt").touch()
    with pytest.raises(ValueError, match=r"has no optimizer .*; resume from another checkpoint"):
        checkpoint_to_resume(tmp_path, trainer)
    trainer.args.save_only_model = True
    assert checkpoint_to_resume(tmp_path, trainer) == str(tmp_path)
    trainer.args.save_only_model = False
    (tmp_path / "optimizer_0").mkdir()
    assert checkpoint_to_resume(tmp_path, trainer) == str(tmp_path)
    (tmp_path / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match="no scheduler"):
        checkpoint_to_resume(tmp_path, trainer)


class Projection:
    """As GaLoreProjector of galore-torch 1.0, which is saved with the state of a parameter."""


def test_an_optimizer_that_torch_refuses_to_load_is_named_until_it_is_allowed(tmp_path):
    trainer = trainer_for(tmp_path)
    (tmp_path / "scheduler.pt").touch()
    torch.save({"state": {0: {"projector": Projection()}}}, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"Projection in its optimizer, .*add_safe_globals"):
        checkpoint_to_resume(tmp_path, trainer)
    with torch.serialization.safe_globals([Projection]):
        assert checkpoint_to_resume(tmp_path, trainer) == str(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "size", "kills"), [(1, 1, 10), (2, 1, 6), (2, 2, 6)])
def test_killed_many_times_a_run_ends_with_the_same_weights(tmp_path, ranks, size, kills):
    module = ["-m", "helpers.distributed.kills"]
    command = [sys.executable, *module, str(tmp_path), str(ranks), str(kills), "4", str(size)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    options = {"text": True, "check": False}
    done = subprocess.run(
        command, cwd=TESTS, env=one_thread, capture_output=True, timeout=1200, **options
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["same_weights"], result
    assert (result["kills"], result["half_written"] >= 3) == (kills, True), result
