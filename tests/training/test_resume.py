"""A resumed run continues with exactly the batches that the uninterrupted run would have used."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.combinations import fast
from helpers.distributed.train import Scenario, assert_continues, run, run_on_ranks

from trl_packing.training.resuming import FILE

LENGTHS = [3 + (i * 7) % 29 for i in range(60)]
EPOCHS = 3

WORKERS = {"dataloader_num_workers": 1}
MODES = {
    "packed": {"batch_size": 2, "accumulation": 2, "model": "gpt2_dropout"},
    "unpacked": {"packing": False, "batch_size": 3, "accumulation": 2},
    "stream": {"stream": True, "shards": 4, "options": WORKERS, "batch_size": 2, "max_steps": 18},
    "workers": {"batch_size": 2, "accumulation": 2, "options": WORKERS},
}


def checkpoint_within_epoch(folder: Path, steps: int, epoch: int) -> str:
    """Return the first checkpoint strictly inside `epoch` of a run of `EPOCHS` epochs."""
    per_epoch = steps / EPOCHS
    saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    inside = [step for step in saved if epoch * per_epoch < step < (epoch + 1) * per_epoch]
    return str(folder / f"checkpoint-{inside[0]}")


@pytest.mark.parametrize("mode", fast(MODES, ("unpacked", "stream")))
def test_one_rank_resumes_within_an_epoch(mode, tmp_path):
    arguments = {"epochs": EPOCHS, "save_steps": 2, **MODES[mode]}
    whole = run(Scenario(str(tmp_path), LENGTHS, **arguments))
    checkpoint = checkpoint_within_epoch(tmp_path, whole["steps"], 1)
    assert_continues(run(Scenario(str(tmp_path), LENGTHS, resume=checkpoint, **arguments)), whole)


@pytest.mark.slow
def test_two_ranks_resume_within_a_later_epoch(tmp_path):
    arguments = {"lengths": LENGTHS, "epochs": EPOCHS, "batch_size": 2, "save_steps": 2}
    made = Scenario(str(tmp_path / "run"), **arguments)
    whole = run_on_ranks({"whole": made}, tmp_path / "first")["whole"]
    checkpoint = Path(checkpoint_within_epoch(tmp_path / "run", whole[0]["steps"], 1))
    copied = shutil.copytree(checkpoint, tmp_path / "forgetful" / checkpoint.name)
    (copied / FILE).unlink()
    resumed = replace(made, resume=str(checkpoint))
    forgetful = replace(made, resume=str(copied), forgets_epoch_on_resume=True)
    found = run_on_ranks({"resumed": resumed, "forgetful": forgetful}, tmp_path / "again")
    for rank, expected in enumerate(whole):
        assert_continues(found["resumed"][rank], expected)
        with pytest.raises(AssertionError):  # the control: without the mend of `set_epoch`
            assert_continues(found["forgetful"][rank], expected)
