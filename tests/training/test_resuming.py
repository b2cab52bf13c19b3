"""A run resumed within an epoch trains the same steps, or is refused with what has changed."""

import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from harness import make_trainer
from helpers.combinations import fast
from helpers.distributed.train import Scenario, assert_continues, run, run_on_ranks
from helpers.tiny import SPECIAL_TOKENS, documents_of_lengths

from trl_packing import PackedSFTTrainer

RECORD = "epoch.json"  # of a checkpoint
NUMBER = 60
LENGTHS = [3 + (i * 7) % 29 for i in range(NUMBER)]
FIRST = len(SPECIAL_TOKENS)  # the first token of document 0


def rows(lengths=tuple(LENGTHS)) -> list[dict]:
    """Return documents that begin with a token of their own."""
    documents = documents_of_lengths(lengths)
    for number, document in enumerate(documents):
        document["input_ids"][0] = FIRST + number
    return documents


class Recorder(PackedSFTTrainer):
    """Notes the documents and the step of every micro-batch that one of several ranks trains."""

    def train(self, *args, **kwargs):
        with mock.patch("trl_packing.trainer.ranks_of", return_value=self.ranks):
            return super().train(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs):
        starts = inputs["input_ids"][inputs["position_ids"] == 0]
        self.trained.append([int(token) - FIRST for token in starts if token >= FIRST])
        self.steps.append(self.state.global_step)
        return super().training_step(model, inputs, *args, **kwargs)


def trainer_for(folder, documents=None, ranks=(1, 0), **settings) -> Recorder:
    defaults = {"max_length": 32, "num_train_epochs": 1, "isolation_check": "off"}
    defaults |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    defaults |= {"save_strategy": "steps", "save_steps": 3}
    documents = rows() if documents is None else documents
    trainer = make_trainer(folder, documents, cls=Recorder, **(defaults | settings))
    trainer.trained, trainer.steps, trainer.ranks = [], [], ranks
    return trainer


def documents_of(trainer, until_step=None) -> Counter:
    """Return how often each document was trained, in the optimizer steps before `until_step`."""
    pairs = zip(trainer.steps, trainer.trained, strict=True)
    return Counter(
        d for step, batch in pairs if until_step is None or step < until_step for d in batch
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function: the run of some settings, which saved after every step."""

    @cache
    def run(**settings) -> Recorder:
        trainer = trainer_for(tmp_path_factory.mktemp("run"), **settings)
        trainer.train()
        return trainer

    return run


def resume(before: Recorder, step: int, folder: Path, **settings) -> Recorder:
    trainer = trainer_for(folder, **settings)
    trainer.train(resume_from_checkpoint=f"{before.args.output_dir}/checkpoint-{step}")
    return trainer


def in_steps(*runs: Recorder) -> dict[int, list[int]]:
    """Return the documents of each optimizer step of all ranks, in their order."""
    found: dict[int, list[int]] = {}
    for trainer in runs:
        for step, batch in zip(trainer.steps, trainer.trained, strict=True):
            found[step] = sorted(found.get(step, []) + batch)
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_division_of_a_step_goes_on_with_its_documents(ranks, packing, saved, tmp_path):
    """After an out-of-memory 1 × 4 instead of 4 × 1, on one rank or on two."""
    then = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "packing": packing}
    now = then | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4 // ranks}
    before = saved(save_steps=1, **then)
    resumed = [resume(before, 2, tmp_path / str(r), ranks=(ranks, r), **now) for r in range(ranks)]
    whole = in_steps(before)
    assert in_steps(*resumed) == {step: whole[step] for step in whole if step >= 2} != whole


def test_without_the_record_nothing_can_be_verified_and_that_is_said(saved, tmp_path, caplog):
    """Control, and what checkpoints of earlier versions get."""
    before = saved()
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(f"{before.args.output_dir}/checkpoint-3", folder)
    (folder / RECORD).unlink()
    trainer = trainer_for(tmp_path / "run", gradient_accumulation_steps=4)
    trainer.train(resume_from_checkpoint=str(folder))
    seen = documents_of(before, until_step=3) + documents_of(trainer)
    assert seen.keys() < set(range(NUMBER)), "some documents are missed"
    assert f"has no {RECORD}: another trainer wrote it" in caplog.text


def test_between_epochs_anything_may_change(saved, tmp_path):
    per_epoch = saved().state.max_steps
    before = saved(num_train_epochs=2, save_steps=per_epoch)
    now = {"seed": 7, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    resumed = resume(before, per_epoch, tmp_path, **now)
    assert documents_of(resumed) == Counter(range(NUMBER))


# --- what cannot go on ----------------------------------------------------------------------------


BY_LENGTH = {"packing": False, "train_sampling_strategy": "group_by_length"}
REFUSED = {  # settings then, settings now, words of the refusal
    "accumulation": ({}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
    "by length": ({"packing": False}, BY_LENGTH, "group_by_length instead of random"),
    "seed": ({}, {"seed": 7}, "seed=7 instead of 42"),
    "as long": (
        {},
        {"documents": documents_of_lengths(LENGTHS, seed=1)},
        "60 documents then, 60 others now",
    ),
    "split": (
        {},
        {"max_length": 16, "overflow": "split"},
        r"60 documents then, \d+ others now; max_length=16 instead of 32; overflow=split",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_steps_data_or_seed_within_an_epoch_are_refused(case, saved, tmp_path):
    then, now, words = REFUSED[case]
    with pytest.raises(ValueError, match=f"{words}.*ignore_data_skip"):
        resume(saved(**then), 3, tmp_path, **now)


def test_an_epoch_restarts_where_that_is_asked_for(saved, tmp_path):
    now = {"gradient_accumulation_steps": 4, "ignore_data_skip": True}
    assert max(documents_of(resume(saved(), 3, tmp_path, **now)).values()) == 1


def test_a_stream_cannot_go_on_with_an_epoch_that_was_planned(saved, tmp_path):
    trainer = trainer_for(tmp_path, max_steps=12)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(ValueError, match="epoch of no stream; resume with the former"):
        trainer.train(resume_from_checkpoint=f"{saved().args.output_dir}/checkpoint-3")


def test_a_data_set_cannot_go_on_with_a_stream(tmp_path):
    streamed = trainer_for(tmp_path / "then", max_steps=12)
    streamed.train_dataset = streamed.train_dataset.to_iterable_dataset()
    streamed.train()
    checkpoint = f"{streamed.args.output_dir}/checkpoint-3"
    with pytest.raises(ValueError, match=r"epoch of a stream; .*ignore_data_skip=True"):
        trainer_for(tmp_path / "now").train(resume_from_checkpoint=checkpoint)
    anew = trainer_for(tmp_path / "anew", ignore_data_skip=True)
    anew.train(resume_from_checkpoint=checkpoint)
    assert max(documents_of(anew).values()) == 1


def test_a_run_that_is_killed_twice_within_an_epoch_trains_its_steps(saved, tmp_path):
    """The second record counts the steps of the epoch from its beginning, not from the resume."""
    whole = in_steps(saved(save_steps=1))
    once = resume(saved(save_steps=1), 2, tmp_path / "once", save_steps=1)
    twice = resume(once, 4, tmp_path / "twice", save_steps=1)
    assert in_steps(twice) == {step: whole[step] for step in whole if step >= 4} != {}


# --- to the bit -----------------------------------------------------------------------------------

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
    (copied / RECORD).unlink()
    resumed = replace(made, resume=str(checkpoint))
    forgetful = replace(made, resume=str(copied), forgets_epoch_on_resume=True)
    found = run_on_ranks({"resumed": resumed, "forgetful": forgetful}, tmp_path / "again")
    for rank, expected in enumerate(whole):
        assert_continues(found["resumed"][rank], expected)
        with pytest.raises(AssertionError):  # the control: without the mend of `set_epoch`
            assert_continues(found["forgetful"][rank], expected)
