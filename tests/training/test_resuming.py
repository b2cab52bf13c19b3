"""A run resumed within an epoch trains the same steps, or is refused with what has changed."""

import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from datasets import Dataset
from helpers.combinations import fast
from helpers.tiny import SPECIAL_TOKENS, documents_of_lengths, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.training import sampling
from trl_packing.training.epoch_record import FILE

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
        with mock.patch.object(sampling, "ranks_of", return_value=self.ranks):
            return super().train(*args, **kwargs)

    def training_step(self, model, inputs, *args, **kwargs):
        starts = inputs["input_ids"][inputs["position_ids"] == 0]
        self.trained.append([int(token) - FIRST for token in starts if token >= FIRST])
        self.steps.append(self.state.global_step)
        return super().training_step(model, inputs, *args, **kwargs)


def trainer_for(folder, documents=None, ranks=(1, 0), **settings) -> Recorder:
    defaults = {
        "max_length": 32,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "save_steps": 3,
        "learning_rate": 0.02,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "isolation_check": "off",
    }
    trainer = Recorder(
        tiny_model("llama"),
        PackedSFTConfig(str(folder), **(defaults | settings)),
        train_dataset=Dataset.from_list(rows() if documents is None else documents),
        processing_class=tiny_tokenizer(),
    )
    trainer.trained, trainer.steps, trainer.ranks = [], [], ranks
    return trainer


def documents_of(trainer, until_step=None) -> Counter:
    """Return how often each document was trained, in the optimizer steps before `until_step`."""
    pairs = zip(trainer.steps, trainer.trained, strict=True)
    return Counter(
        d for step, batch in pairs if until_step is None or step < until_step for d in batch
    )


def missed_and_repeated(*counts: Counter, times: int = 1) -> tuple[list[int], list[int]]:
    total = sum(counts, Counter())
    return (
        [d for d in range(NUMBER) if total[d] < times],
        [d for d in range(NUMBER) if total[d] > times],
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function: the run of some settings, which saved after every step."""
    runs = {}

    def run(**settings) -> Recorder:
        key = tuple(sorted(settings.items()))
        if key not in runs:
            runs[key] = trainer_for(tmp_path_factory.mktemp("run"), **settings)
            runs[key].train()
        return runs[key]

    return run


def resume(before: Recorder, step: int, folder: Path, **settings) -> Recorder:
    trainer = trainer_for(folder, **settings)
    trainer.train(resume_from_checkpoint=f"{before.args.output_dir}/checkpoint-{step}")
    return trainer


CHANGES = {
    "accumulation": (
        {},
        {"gradient_accumulation_steps": 4},
        "gradient_accumulation_steps=4 instead of 2",
    ),
    "batch size": (
        {},
        {"per_device_train_batch_size": 2},
        "per_device_train_batch_size=2 instead of 1",
    ),
    "longer rows": ({}, {"max_length": 64}, "max_length=64 instead of 32"),
    "greedy": ({}, {"packing_strategy": "greedy"}, "packing_strategy=greedy instead of bfd"),
    "padding-free": (
        {},
        {"packing": False, "per_device_train_batch_size": 4},
        "packing=False instead of True",
    ),
    "documents": ({}, {"documents_per_step": 7}, "documents_per_step=7 instead of None"),
    "by length": (
        {"packing": False},
        {"packing": False, "train_sampling_strategy": "group_by_length"},
        "train_sampling_strategy=group_by_length instead of random",
    ),
}


@pytest.mark.parametrize("change", fast(CHANGES, [*CHANGES][::2]))
def test_other_steps_within_an_epoch_are_refused_with_what_has_changed(change, saved, tmp_path):
    then, now, words = CHANGES[change]
    with pytest.raises(ValueError, match=f"{words}.* × ranks may divide its .*ignore_data_skip"):
        resume(saved(**then), 3, tmp_path, **now)
    anew = resume(saved(**then), 3, tmp_path, ignore_data_skip=True, **now)
    assert not missed_and_repeated(documents_of(anew))[1]


@pytest.mark.parametrize("packing", [True, False])
def test_another_division_of_a_step_goes_on_with_its_documents(packing, saved, tmp_path, caplog):
    """After an out-of-memory: 1 × 4 × 2 instead of 4 × 1 × 2."""
    then = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "packing": packing}
    now = then | {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    then |= {"save_steps": 1}
    before = saved(**then)
    resumed = resume(before, 2, tmp_path, **now)
    assert "per_device_train_batch_size=1 instead of 4" in caplog.text
    for step in range(2, before.state.max_steps):
        of_step = [
            sorted(
                d
                for s, batch in zip(run.steps, run.trained, strict=True)
                if s == step
                for d in batch
            )
            for run in (before, resumed)
        ]
        assert of_step[0] == of_step[1]


def test_the_same_steps_in_other_ranks_go_on_to_the_last_bit(saved, tmp_path, caplog):
    """1 rank × 2 micro-batches and 2 ranks × 1 train the same optimizer steps."""
    whole = saved()
    halves = [
        resume(whole, 3, tmp_path / str(rank), ranks=(2, rank), gradient_accumulation_steps=1)
        for rank in range(2)
    ]
    assert "ranks=2 instead of 1" in caplog.text
    for step in range(3, whole.state.global_step):
        there = [batch for s, batch in zip(whole.steps, whole.trained, strict=True) if s == step]
        here = [
            batch
            for half in halves
            for s, batch in zip(half.steps, half.trained, strict=True)
            if s == step
        ]
        assert sorted(here) == sorted(there)


def test_without_the_record_nothing_can_be_verified_and_that_is_said(saved, tmp_path, caplog):
    """Control, and what checkpoints of earlier versions get."""
    before = saved()
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(f"{before.args.output_dir}/checkpoint-3", folder)
    (folder / FILE).unlink()
    trainer = trainer_for(tmp_path / "run", gradient_accumulation_steps=4)
    trainer.train(resume_from_checkpoint=str(folder))
    missed, _ = missed_and_repeated(documents_of(before, until_step=3), documents_of(trainer))
    assert missed
    assert f"has no {FILE}: an earlier version or another trainer wrote it" in caplog.text


def test_unchanged_settings_say_nothing(saved, tmp_path, caplog):
    resumed = resume(saved(), 3, tmp_path)
    assert missed_and_repeated(documents_of(saved(), until_step=3), documents_of(resumed)) == (
        [],
        [],
    )
    assert "resumed with" not in caplog.text
    assert FILE not in caplog.text


def test_between_epochs_anything_may_change(saved, tmp_path, caplog):
    per_epoch = saved().state.max_steps
    before = saved(num_train_epochs=2, save_steps=per_epoch)
    now = {"seed": 7, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    resumed = resume(before, per_epoch, tmp_path, **now)
    assert documents_of(resumed) == Counter(range(NUMBER))
    assert "in epoch 1 after 0 of its steps" in caplog.text


# --- what cannot go on ----------------------------------------------------------------------------


def others(lengths) -> list[dict]:
    return documents_of_lengths(lengths, seed=1)


REFUSED = {
    "seed": ({"seed": 7}, r"seed=42, and now it is seed=7: .*data_seed=42"),
    "shorter": ({"documents": rows()[:50]}, r"60 documents then, 50 now.*the former data"),
    "reordered": (
        {"documents": [*rows()[1:], rows()[0]]},
        r"document 0 had 3 tokens, now 10.*the former data",
    ),
    "as long": ({"documents": others(LENGTHS)}, r"document 0 ended in other tokens"),
    "split": (
        {"max_length": 16, "overflow": "split"},
        r"60 documents then, \d+ now.*max_length=32, overflow=truncate as then",
    ),
    "dropped": ({"max_length": 16, "overflow": "drop"}, r"60 documents then, \d+ now"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_data_and_another_seed_are_refused(case, saved, tmp_path):
    now, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        resume(saved(), 3, tmp_path, **now)


def test_a_stream_cannot_go_on_with_an_epoch_that_was_planned(saved, tmp_path):
    trainer = trainer_for(tmp_path, max_steps=12)
    trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
    with pytest.raises(ValueError, match="on a stream, or on TRL's path"):
        trainer.train(resume_from_checkpoint=f"{saved().args.output_dir}/checkpoint-3")


def test_a_data_set_cannot_go_on_with_a_stream(tmp_path):
    streamed = trainer_for(tmp_path / "then", max_steps=12)
    streamed.train_dataset = streamed.train_dataset.to_iterable_dataset()
    streamed.train()
    checkpoint = f"{streamed.args.output_dir}/checkpoint-3"
    with pytest.raises(ValueError, match=r"was saved on a stream.*ignore_data_skip=True"):
        trainer_for(tmp_path / "now").train(resume_from_checkpoint=checkpoint)
    anew = trainer_for(tmp_path / "anew", ignore_data_skip=True)
    anew.train(resume_from_checkpoint=checkpoint)
    assert missed_and_repeated(documents_of(anew))[1] == []


def test_a_finished_run_has_nothing_left(saved, tmp_path, caplog):
    last = saved().state.max_steps
    resumed = resume(saved(), last, tmp_path, per_device_train_batch_size=2)
    assert resumed.trained == []


def test_what_is_refused_may_begin_anew(saved, tmp_path):
    resumed = resume(saved(), 3, tmp_path, seed=7, num_train_epochs=2, ignore_data_skip=True)
    assert resumed.steps[0] == 3
    assert not missed_and_repeated(documents_of(resumed))[0]
