"""An epoch that is resumed with other settings trains every document exactly once."""

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from helpers.combinations import fast
from helpers.tiny import SPECIAL_TOKENS, documents_of_lengths, tiny_model, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from trl import SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.training.columns import documents_of as token_documents
from trl_packing.training.epoch_record import FILE, EpochRecord
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.sampling import Sampling

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
        with mock.patch.object(Sampling, "ranks", self.ranks):
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
    "accumulation": ({}, {"gradient_accumulation_steps": 4}),
    "less accumulation": ({}, {"gradient_accumulation_steps": 1}),
    "batch size": ({}, {"per_device_train_batch_size": 2}),
    "longer rows": ({}, {"max_length": 64}),
    "shorter rows": ({"max_length": 64}, {"max_length": 32}),
    "greedy": ({}, {"packing_strategy": "greedy"}),
    "next fit": ({}, {"packing_strategy": "next_fit"}),
    "padding-free": ({}, {"packing": False, "per_device_train_batch_size": 4}),
    "packed": ({"packing": False, "per_device_train_batch_size": 4}, {}),
    "documents": ({}, {"documents_per_step": 7}),
    "sequential": ({}, {"train_sampling_strategy": "sequential"}),
    "by length": (
        {"packing": False},
        {"packing": False, "train_sampling_strategy": "group_by_length"},
    ),
}


@pytest.mark.parametrize("change", fast(CHANGES, [*CHANGES][::3]))
def test_a_resumed_epoch_trains_what_was_left(change, saved, tmp_path, caplog):
    then, now = CHANGES[change]
    before = saved(**then)
    resumed = resume(before, 3, tmp_path, **now)
    counts = documents_of(before, until_step=3), documents_of(resumed)
    assert missed_and_repeated(*counts) == ([], [])
    assert "training ends after step" in caplog.text
    assert resumed.state.global_step == resumed.state.max_steps
    assert resumed.state.epoch == 1


def test_ranks_may_become_fewer_or_more(saved, tmp_path):
    two = {"gradient_accumulation_steps": 1}
    of_two = [saved(ranks=(2, rank), **two) for rank in range(2)]
    behind = sum((documents_of(run, until_step=3) for run in of_two), Counter())
    one = resume(of_two[0], 3, tmp_path / "one", gradient_accumulation_steps=1)
    assert missed_and_repeated(behind, documents_of(one)) == ([], [])
    four = [
        resume(of_two[1], 3, tmp_path / f"four_{rank}", ranks=(4, rank), **two) for rank in range(4)
    ]
    assert missed_and_repeated(behind, *map(documents_of, four)) == ([], [])
    assert len({run.state.max_steps for run in four}) == 1


def test_the_same_steps_in_other_ranks_go_on_to_the_last_bit(saved, tmp_path, caplog):
    """1 rank × 2 micro-batches and 2 ranks × 1 train the same optimizer steps."""
    whole = saved()
    halves = [
        resume(whole, 3, tmp_path / str(rank), ranks=(2, rank), gradient_accumulation_steps=1)
        for rank in range(2)
    ]
    assert "the optimizer steps hold the same documents" in caplog.text
    for step in range(3, whole.state.global_step):
        there = [batch for s, batch in zip(whole.steps, whole.trained, strict=True) if s == step]
        here = [
            batch
            for half in halves
            for s, batch in zip(half.steps, half.trained, strict=True)
            if s == step
        ]
        assert sorted(here) == sorted(there)


def test_without_the_record_documents_are_lost_and_that_is_said(saved, tmp_path, caplog):
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


def test_a_resumed_epoch_may_be_resumed_again_and_later_epochs_are_whole(saved, tmp_path, caplog):
    """Settings change twice in an epoch; the second rest is then resumed unchanged."""
    settings = {"num_train_epochs": 2}
    first = saved(**settings)
    second = resume(first, 3, tmp_path / "second", per_device_train_batch_size=2, **settings)
    third_settings = settings | {
        "packing": False,
        "per_device_train_batch_size": 3,
    }
    third = resume(second, 6, tmp_path / "third", **third_settings)
    behind = [documents_of(first, until_step=3), documents_of(second, until_step=6)]
    assert 0 < sum(behind[1].values()) < NUMBER - sum(behind[0].values())
    of_epoch = [d for batch in third.trained for d in batch][: NUMBER - sum(map(len, behind))]
    assert missed_and_repeated(*behind, Counter(of_epoch)) == ([], [])
    assert missed_and_repeated(*behind, documents_of(third), times=2) == ([], [])
    assert third.state.global_step == third.state.max_steps
    assert third.state.epoch == 2
    epochs = [entry["epoch"] for entry in third.state.log_history if "loss" in entry]
    assert epochs == sorted(epochs), "the epoch never goes back"
    caplog.clear()
    for step in (9, 18):  # within the rest, and within the epoch behind it
        caplog.clear()
        fourth = resume(third, step, tmp_path / f"again_{step}", **third_settings)
        assert fourth.trained == third.trained[-len(fourth.trained) :]
        assert fourth.state.max_steps == third.state.max_steps
        assert fourth.steps[0] == step
        assert "resumed with" not in caplog.text
        for name, value in third.model.state_dict().items():
            assert torch.equal(fourth.model.state_dict()[name], value), name


def test_rows_that_were_packed_before_are_trained_once(tmp_path):
    documents = rows()
    packed = [
        {
            "input_ids": [token for row in pair for token in row["input_ids"]],
            "labels": [label for row in pair for label in row["labels"]],
            "seq_lengths": [len(row["input_ids"]) for row in pair],
        }
        for pair in zip(documents[::2], documents[1::2], strict=True)
    ]
    settings = {"documents": packed, "max_length": 64}
    before = trainer_for(tmp_path / "before", **settings)
    before.train()
    now = settings | {"per_device_train_batch_size": 2}
    resumed = resume(before, 3, tmp_path / "now", **now)
    counts = documents_of(before, until_step=3), documents_of(resumed)
    assert missed_and_repeated(*counts) == ([], [])


def test_max_steps_stays_the_end(saved, tmp_path):
    """Epochs are begun until there are as many steps, whatever they hold."""
    before = saved(num_train_epochs=2)
    resumed = resume(before, 3, tmp_path, max_steps=20, gradient_accumulation_steps=4)
    assert resumed.state.global_step == 20
    missed, _ = missed_and_repeated(documents_of(before, until_step=3), documents_of(resumed))
    assert not missed


def test_part_of_an_epoch_ends_where_it_did(saved, tmp_path):
    """Half an epoch is half of its documents, within a step."""
    before = saved(num_train_epochs=0.5)
    resumed = resume(before, 3, tmp_path, num_train_epochs=0.5, gradient_accumulation_steps=1)
    counts = documents_of(before, until_step=3) + documents_of(resumed)
    assert abs(sum(counts.values()) - NUMBER / 2) < 8
    assert max(counts.values()) == 1


def test_between_epochs_anything_may_change(saved, tmp_path, caplog):
    per_epoch = saved().state.max_steps
    before = saved(num_train_epochs=2, save_steps=per_epoch)
    now = {"seed": 7, "per_device_train_batch_size": 2, "num_train_epochs": 2}
    resumed = resume(before, per_epoch, tmp_path, **now)
    assert documents_of(resumed) == Counter(range(NUMBER))
    assert "a whole epoch begins" in caplog.text


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
    assert "nothing is left to train" in caplog.text


def test_truncated_documents_are_the_same_at_another_length(saved, tmp_path):
    before = saved(max_length=16)
    resumed = resume(before, 3, tmp_path, max_length=24)
    counts = documents_of(before, until_step=3), documents_of(resumed)
    assert missed_and_repeated(*counts) == ([], [])


def test_what_is_refused_may_begin_anew(saved, tmp_path):
    resumed = resume(saved(), 3, tmp_path, seed=7, num_train_epochs=2, ignore_data_skip=True)
    assert resumed.steps[0] == 3
    assert not missed_and_repeated(documents_of(resumed))[0]


# --- any change, any number of them, on any ranks -------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The settings of a part of an epoch, and after which share of what it has left it stops."""

    packing: bool
    strategy: str
    batch_size: int
    accumulation: int
    ranks: int
    max_length: int
    documents_per_step: int | None
    drop_last: bool
    share: float


layouts = st.builds(
    Layout,
    packing=st.booleans(),
    strategy=st.sampled_from(["bfd", "greedy", "next_fit"]),
    batch_size=st.integers(1, 3),
    accumulation=st.integers(1, 4),
    ranks=st.integers(1, 4),
    max_length=st.integers(32, 96),
    documents_per_step=st.none() | st.integers(16, 20),
    drop_last=st.booleans(),
    share=st.floats(0, 1),
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return trainer_for(tmp_path_factory.mktemp("property"))


class OnRank(Sampling):
    """The samplers of any rank of any number."""

    ranks = (1, 0)


def train_part(trainer, layout: Layout, checkpoint: Path | None, epoch: int, *, last: bool):
    """Return the documents that a part of `epoch` trains on all ranks, and the record behind it."""
    args = trainer.args
    trainer._train_batch_size = layout.batch_size
    args.gradient_accumulation_steps, args.max_length = layout.accumulation, layout.max_length
    args.packing_strategy, args.documents_per_step = layout.strategy, layout.documents_per_step
    args.dataloader_drop_last = layout.drop_last
    sampling, documents = OnRank(trainer), token_documents(trainer.train_dataset, None)
    sampling.packing = layout.packing
    trained, numbers = [], set()
    for rank in range(layout.ranks):
        sampling.ranks = (layout.ranks, rank)
        epochs, sampler = ResumedEpochs(trainer, sampling), sampling.for_training(documents)
        dataloader = DataLoader(documents, batch_sampler=sampler, collate_fn=list)
        with epochs.resuming(checkpoint):
            epochs.follow(sampler, documents)
            found = SFTTrainer.set_initial_training_values(trainer, args, dataloader)
            max_steps = epochs.schedule(found)[-1]
            at, skipped = epochs.resume(epoch, 0, None)
        if at != epoch:  # nothing was left
            return [], None, sampler
        whole = {"steps_in_epoch": len(sampler), "num_update_steps_per_epoch": 0}
        trainer.state.global_step = first = (
            0 if checkpoint is None else record_in(checkpoint).global_step
        )
        micro_batches = epochs.begin_epoch(epoch, whole, epochs_trained=epoch, skipped=skipped)[
            "steps_in_epoch"
        ]
        steps = -(-(micro_batches - skipped) // layout.accumulation)
        steps = steps if last else int(steps * layout.share)
        sampler.set_epoch(epoch)
        batches = list(sampler)[skipped : skipped + steps * layout.accumulation]
        assert last is False or len(batches) == micro_batches - skipped
        trained += [document for batch in batches for document in batch]
        trainer.state.global_step = first + steps
        numbers.add((steps, micro_batches, skipped, max_steps))
    assert len(numbers) == 1, "all ranks agree"
    return trained, epochs.record(), sampler


def record_in(checkpoint: Path) -> EpochRecord:
    return EpochRecord.load(checkpoint / FILE)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(layouts, min_size=1, max_size=4), epoch=st.integers(0, 2))
def test_any_changes_train_every_document_once(trainer, tmp_path_factory, parts, epoch):
    folder = tmp_path_factory.mktemp("record")
    counts, checkpoint = Counter(), None
    for number, layout in enumerate(parts):
        last = number == len(parts) - 1
        trained, record, sampler = train_part(trainer, layout, checkpoint, epoch, last=last)
        counts.update(trained)
        if record is None or record.epoch > epoch:
            break
        assert sorted(counts) == np.flatnonzero(record.trained).tolist()
        checkpoint = folder
        record.save(checkpoint / FILE)
    assert set(counts.values()) == {1}
    missed = NUMBER - len(counts)
    assert missed < sampler.documents_multiple_of  # documents that dataloader_drop_last drops


def test_a_record_that_lacks_documents_fails_the_same_count(trainer, tmp_path):
    """Control."""
    layout = Layout(True, "bfd", 1, 2, 1, 32, None, False, 0.5)
    trained, record, _ = train_part(trainer, layout, None, 0, last=False)
    forgetful = record.trained.copy()
    forgetful[trained[0]] = False
    replace(record, trained=forgetful).save(tmp_path / FILE)
    rest = train_part(trainer, replace(layout, accumulation=3), tmp_path, 0, last=True)[0]
    assert Counter(trained) + Counter(rest) == Counter(range(NUMBER)) + Counter([trained[0]])
