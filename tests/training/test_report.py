"""The report on an epoch is known before it starts, fits where it is shown, and comes true."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.tiny import documents_of_lengths

from trl_packing import PackedBatchSampler, PackedSFTTrainer


def trainer_for(folder, rows, **settings):
    rows = documents(rows) if isinstance(rows, int) else rows
    defaults = {"max_length": 64, "per_device_train_batch_size": 1, "num_train_epochs": 1}
    return make_trainer(folder, rows, **defaults | settings)


def documents(number: int) -> Dataset:
    return Dataset.from_list(documents_of_lengths([5 + i % 11 for i in range(number)]))


def documents_by_step(trainer) -> list[int]:
    """Return the number of documents in each optimizer step."""
    sizes = [int((b["position_ids"] == 0).sum()) for b in trainer.get_train_dataloader()]
    size = trainer.args.gradient_accumulation_steps
    return [sum(sizes[at : at + size]) for at in range(0, len(sizes), size)]


def test_a_step_has_exactly_the_documents_asked_for(tmp_path):
    settings = {"gradient_accumulation_steps": 3, "loss_weighting": "document"}
    trainer = trainer_for(tmp_path, 50, documents_per_step=12, **settings)
    assert documents_by_step(trainer) == [12, 12, 12, 12, 2]
    trainer.train()
    assert trainer.state.global_step == 5
    assert "warning: 5 optimizer steps an epoch" in str(trainer.packing_report)
    assert "weight 1/n (n: trained tokens of its document)" in trainer.packing_report.loss
    # Without it, bins decide; the comparison can fail.
    assert documents_by_step(trainer_for(tmp_path, 50)) != [12, 12, 12, 12, 2]


def test_documents_per_step_keeps_the_steps_of_the_padded_run_as_the_report_says(tmp_path):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    padded = trainer_for(tmp_path, 30, packing=False, **settings)
    report = trainer_for(tmp_path, 30, **settings).packing_report
    assert report.padded_steps == 8
    assert "8 steps an epoch, 4 documents each (documents_per_step=4 keeps that)" in str(report)
    packed = trainer_for(tmp_path, 30, documents_per_step=4, **settings)
    assert documents_by_step(padded) == documents_by_step(packed) == [4] * 7 + [2]
    assert "if padded" not in str(packed.packing_report)


MIXED = {"source_column": "source", "mixture": {"a": {"epochs": 2}, "b": {"epochs": 1}}}
STARTS = {
    "bins": {},
    "one shape": {"static_shapes": True},
    "documents": {"packing": False},
    "a mixture": MIXED,
    "groups": {"prefix_sharing": "group"},
}


@pytest.mark.parametrize("name", STARTS)
def test_an_epoch_is_planned_once_before_it_is_trained(name, tmp_path, monkeypatch):
    """For the report, the shapes of rows and the data loader together."""
    done = Counter()
    for method in ("__post_init__", "_draw_epoch"):
        original = getattr(PackedBatchSampler, method)

        def counted(self, original=original, method=method):
            done[method] += 1
            return original(self)

        monkeypatch.setattr(PackedBatchSampler, method, counted)
    rows = documents(60).add_column("source", [*"ab"] * 30)
    trainer = trainer_for(tmp_path, rows, max_steps=1, **STARTS[name])
    trainer.train()
    assert done == {"__post_init__": 1, "_draw_epoch": 1}
    trainer.args.per_device_train_batch_size = trainer._train_batch_size = 2
    trainer.get_train_dataloader()
    assert done["__post_init__"] == 2, "another size of micro-batches is another plan"
    assert trainer.packing_report.micro_batch.startswith("2 ")


def test_settings_in_steps_are_told_in_epochs_here_and_padded(tmp_path):
    """A packed step holds more documents, so that 12 steps are more epochs."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 12, "warmup_steps": 3}
    packed = trainer_for(tmp_path, 30, **settings)
    report = packed.packing_report
    text = " ".join(str(report).split())
    packed.train()
    here = packed.state.epoch
    assert 1 < here == pytest.approx(12 / report.steps_per_epoch)
    assert f"max_steps=12 is {here:.2g} epochs here, {12 / 15:.2g} if padded; " in text
    assert report.steps_per_epoch == 3
    assert "warmup_steps=3 is 1 epoch here, 0.2 if padded" in text
    padded = trainer_for(tmp_path, 30, packing=False, **settings).packing_report
    assert "epochs here" not in str(padded), "the steps are the same"


@pytest.mark.parametrize("number", [6, 4])  # dropped: more than half, and half
def test_few_steps_are_the_fault_of_documents_that_were_dropped(tmp_path, number):
    rows = Dataset.from_list(documents_of_lengths([20] * 4 + [90] * number))
    text = " ".join(str(trainer_for(tmp_path, rows, overflow="drop").packing_report).split())
    dropped = f"an epoch; {number} of {number + 4} documents were dropped, for the reasons below"
    advice = "a smaller documents_per_step or gradient_accumulation_steps makes more"
    assert (dropped in text, advice in text) == (number > 4, number <= 4)


def test_what_cannot_be_grouped_by_documents_is_refused(tmp_path):
    packed = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [2, 1]}
    refused = {"cannot regroup": [packed] * 4}
    refused["needs to know the documents"] = documents(9).to_iterable_dataset()
    for sentence, rows in refused.items():
        with pytest.raises(ValueError, match=f"documents_per_step=2 {sentence}"):
            trainer_for(tmp_path, rows, documents_per_step=2, max_steps=2)


def test_a_stream_is_reported_when_it_is_read(tmp_path, capsys, caplog):
    stream = Dataset.from_list(documents_of_lengths([20, 90, 8, 70] * 5)).to_iterable_dataset()
    trainer = trainer_for(tmp_path, stream, max_steps=3)
    trainer.train()
    trainer.evaluate(stream)
    assert "evaluation stream: 10 documents longer than" in caplog.text
    printed = capsys.readouterr().out
    assert "documents    a stream: counted as it is read" in printed
    read = trainer.packing_report.preparation
    assert f"a stream: read so far {read.before.documents} documents" in printed
    assert read.stages[0].affected == read.before.documents / 2
    assert "20 documents (100.0%) do not end in a trained stop token" in read.notes[0]
    assert "checked      isolated: differs by" in printed


class OutOfMemoryAbove2(PackedSFTTrainer):
    def training_step(self, *args, **kwargs):
        if self._train_batch_size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().training_step(*args, **kwargs)


def test_the_report_is_on_the_batch_size_that_was_found(tmp_path, capsys):
    settings = {"per_device_train_batch_size": 8, "auto_find_batch_size": True}
    trainer = trainer_for(tmp_path, 80, cls=OutOfMemoryAbove2, **settings)
    first = trainer.packing_report.steps_per_epoch
    trainer.train()
    report, size = trainer.packing_report, trainer._train_batch_size
    assert size <= 2
    assert report.micro_batch == f"{size} bin{'s' * (size > 1)}"
    assert report.steps_per_epoch == trainer.state.global_step > first
    assert str(report) in capsys.readouterr().out


# --- layout ---------------------------------------------------------------------------------------

HOSTILE = "</td><script>alert(1)</script> \x1b[2J\u202e <img src=x onerror=alert(2)>"


def test_the_report_fits_its_terminal_and_hostile_text_does_nothing(monkeypatch, tmp_path):
    report = trainer_for(tmp_path, 9).packing_report
    noted = replace(report.preparation, notes=("a note " * 30, HOSTILE))
    report = replace(report, preparation=noted)
    for columns, most in ((72, 72), (9, 50), (240, 100)):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = str(report).splitlines()
        assert len(lines[0]) == len(lines[-1]) == max(map(len, lines)) <= most
    html = report._repr_html_()
    assert set(re.findall(r"<(\w+)", html)) == {"table", "caption", "tr", "th", "td"}
    for text in (html, str(report)):
        assert not {"\x1b", "\u202e"} & {*text}
        assert r"\x1b[2J\u202e" in text
