"""The report on an epoch is known before it starts, and the trainer then does the same."""

import json

import pytest
from datasets import Dataset, IterableDataset
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.cli import main
from trl_packing.tools.preview.preview import preview_epoch
from trl_packing.tools.preview.previewed_run import PreviewedRun


def trainer_for(folder, rows, *, eval_dataset=None, **settings):
    defaults = {
        "max_length": 64,
        "per_device_train_batch_size": 1,
        "num_train_epochs": 1,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    return PackedSFTTrainer(
        tiny_model("llama"),
        PackedSFTConfig(str(folder), **(defaults | settings)),
        train_dataset=rows,
        eval_dataset=eval_dataset,
        processing_class=tiny_tokenizer(),
    )


def documents(number: int) -> Dataset:
    return Dataset.from_list(documents_of_lengths([5 + i % 11 for i in range(number)]))


def documents_by_step(trainer) -> list[int]:
    """Return the number of documents in each optimizer step of the sampler."""
    sampler = trainer._get_train_sampler(trainer._remove_unused_columns(trainer.train_dataset))
    sizes = [len(micro_batch) for micro_batch in sampler]
    size = trainer.args.gradient_accumulation_steps
    return [sum(sizes[at : at + size]) for at in range(0, len(sizes), size)]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_has_exactly_the_documents_asked_for(tmp_path, packing, accumulation):
    trainer = trainer_for(
        tmp_path,
        documents(50),
        packing=packing,
        documents_per_step=12,
        gradient_accumulation_steps=accumulation,
    )
    assert documents_by_step(trainer) == [12, 12, 12, 12, 2]
    trainer.train()
    assert trainer.state.global_step == 5
    # Without it, bins decide; the comparison can fail.
    other = trainer_for(tmp_path, documents(50), gradient_accumulation_steps=accumulation)
    assert documents_by_step(other) != [12, 12, 12, 12, 2]


def test_documents_per_step_keeps_the_steps_of_the_padded_run(tmp_path):
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    padded = trainer_for(tmp_path, documents(30), packing=False, **settings)
    packed = trainer_for(tmp_path, documents(30), documents_per_step=4, **settings)
    assert documents_by_step(padded) == documents_by_step(packed) == [4] * 7 + [2]
    assert "if padded" not in str(packed.packing_report)


def test_the_report_names_the_setting_that_keeps_a_padded_runs_steps(tmp_path):
    trainer = trainer_for(tmp_path, documents(30), per_device_train_batch_size=2)
    report = trainer.packing_report
    assert report.padded_steps == 15
    assert "15 steps an epoch, 2 documents each (documents_per_step=2 keeps that)" in str(report)
    assert f"{report.trained_tokens / report.steps_per_epoch:,.0f} trained tokens" in str(report)


def test_settings_in_steps_are_told_in_epochs_here_and_padded(tmp_path):
    """A packed step holds more documents, so that 12 steps are more epochs."""
    settings = {"per_device_train_batch_size": 2, "max_steps": 12, "warmup_steps": 3}
    settings |= {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps"}
    evaluated = {"eval_dataset": documents(3)}
    packed = trainer_for(tmp_path, documents(30), **evaluated, **settings)
    report = packed.packing_report
    text = " ".join(str(report).split())
    packed.train()
    here = packed.state.epoch
    assert here > 1
    assert here == pytest.approx(12 / report.steps_per_epoch)
    assert f"max_steps=12 is {here:.1f} epochs here, {12 / 15:.1f} if padded; " in text
    assert f"warmup_steps=3 is {3 / report.steps_per_epoch:.1f} epochs here, 0.2 if padded" in text
    assert "eval_steps=4 is" in text
    assert "save_steps" not in text, "500 is nobody's choice"
    padded = trainer_for(tmp_path, documents(30), **evaluated, packing=False, **settings)
    assert "epochs here" not in str(padded.packing_report), "the steps are the same"


def test_few_steps_are_warned_of_with_a_setting_that_makes_more(tmp_path):
    few = trainer_for(tmp_path, documents(50), documents_per_step=10).packing_report
    warning = "warning: 5 optimizer steps an epoch; documents_per_step=2 makes 25"
    assert warning in str(few)
    more = trainer_for(tmp_path, documents(50), documents_per_step=2).packing_report
    assert more.steps_per_epoch == 25
    assert "warning" not in str(more)


def test_nothing_is_advised_where_no_setting_makes_more_steps(tmp_path):
    report = trainer_for(tmp_path, documents(5), documents_per_step=1).packing_report
    assert ("", "warning: 5 optimizer steps an epoch") in report.lines()


def test_one_is_told_in_the_singular(tmp_path):
    text = str(trainer_for(tmp_path, documents(1), documents_per_step=1).packing_report)
    assert "1 optimizer step · 1 micro-batch · up to" in text
    assert "1 document · " in text
    packed = str(trainer_for(tmp_path, documents(3)).packing_report)
    assert " 1 bin of " in packed
    more = str(trainer_for(tmp_path, documents(2), documents_per_step=2).packing_report)
    assert "1 optimizer step · 1 micro-batch · up to" in more
    assert "2 documents · " in more


def test_a_micro_batch_beyond_a_bin_is_said(tmp_path):
    report = trainer_for(tmp_path, documents(50), documents_per_step=25).packing_report
    assert "the largest micro-batch seen has" in str(report)
    small = trainer_for(tmp_path, documents(50), documents_per_step=2).packing_report
    assert "the largest micro-batch" not in str(small)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ({"input_ids": [5, 6, 7], "labels": [5, 6, 7], "seq_lengths": [2, 1]}, "cannot regroup"),
        ("stream", "needs to know the documents"),
    ],
)
def test_what_cannot_be_grouped_by_documents_is_refused(tmp_path, rows, sentence):
    data = (
        IterableDataset.from_generator(lambda: iter(tiny_dataset("tokenized_labels")))
        if rows == "stream"
        else Dataset.from_list([rows] * 4)
    )
    with pytest.raises(ValueError, match=f"documents_per_step=2 {sentence}"):
        trainer_for(tmp_path, data, documents_per_step=2, max_steps=2)


def test_no_documents_a_step_are_refused():
    with pytest.raises(ValueError, match="documents_per_step=0 must be at least 1"):
        PackedSFTConfig("o", documents_per_step=0, use_cpu=True, bf16=False)


# --- before the run -------------------------------------------------------------------------------


def test_the_plan_is_the_report_of_the_trainer(tmp_path):
    rows = tiny_dataset("language_modeling", 40)
    options = {"max_length": 64, "per_device_train_batch_size": 2}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), flags)
    planned = json.loads(preview_epoch(run).to_json())
    trained = json.loads(trainer_for(tmp_path, rows, **options).packing_report.to_json())
    of_the_model = {"attention": None, "checked": None}
    del planned["prefixes"]["saved_by_groups"], trained["prefixes"]["saved_by_groups"]  # a hint
    assert planned | of_the_model == trained | of_the_model
    assert planned["checked"]["verdict"] == trained["checked"]["verdict"] == "not checked"


def test_the_plan_of_more_ranks_has_fewer_steps():
    rows, flags = tiny_dataset("language_modeling", 40), ["--max_length", "64"]
    run = PreviewedRun.from_settings(rows, tiny_tokenizer(), flags)
    one, four = (preview_epoch(run, ranks=ranks) for ranks in (1, 4))
    assert four.bins == one.bins
    assert four.steps_per_epoch == -(-one.steps_per_epoch // 4)


def test_the_command_prints_the_plan(tmp_path, capsys):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"text": "So."}\n' * 9)
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    assert main(["plan", *arguments, "--ranks", "2", "--max_length", "32"]) == 0
    printed = capsys.readouterr().out
    assert "documents    9 ·" in printed
    assert "2 ranks" in printed
    assert "attention" not in printed


def test_a_stream_is_reported_when_it_is_read(tmp_path, capsys, caplog):
    """Long documents are said after the first step, and counted in all at the end."""
    rows = documents_of_lengths([20, 90, 8, 70] * 5)
    trainer = trainer_for(tmp_path, IterableDataset.from_generator(lambda: iter(rows)), max_steps=3)
    with caplog.at_level("WARNING"):
        trainer.train()
    assert "of the first 20 documents of the stream: 10 documents longer than" in caplog.text
    printed = capsys.readouterr().out
    assert "documents    a stream: counted as it is read" in printed
    read = trainer.packing_report.preparation
    assert f"a stream: read so far {read.before.documents} documents" in printed
    assert read.before.documents % 20 == 0
    assert read.stages[0].affected == read.before.documents / 2
    assert "20 documents (100.0%) do not end in a trained stop token" in read.notes[0]
    assert "checked      isolated: differs by" in printed


def test_an_evaluated_stream_says_what_it_loses(tmp_path, caplog):
    rows = documents_of_lengths([20, 90, 8, 70] * 5)
    trainer = trainer_for(tmp_path, documents(50))
    for evaluated in (rows[:1], rows):
        caplog.clear()
        with caplog.at_level("WARNING"):
            trainer.evaluate(IterableDataset.from_generator(lambda r=evaluated: iter(r)))
        assert ("evaluation stream: 10 documents longer than" in caplog.text) == (
            len(evaluated) > 1
        )


def test_the_report_says_what_a_token_counts(tmp_path):
    report = trainer_for(tmp_path, documents(9), loss_weighting="document").packing_report
    assert "each with weight 1/n (n: trained tokens of its document)" in report.loss
    weighted = documents(9).add_column("loss_weight", [2.0] * 9)
    report = trainer_for(tmp_path, weighted).packing_report
    assert report.loss == "mean over the trained tokens of a step, each with weight loss_weight"
    stream = weighted.to_iterable_dataset()
    assert str(trainer_for(tmp_path, stream, max_steps=1).packing_report.loss) == report.loss


class OutOfMemoryAbove2(PackedSFTTrainer):
    def training_step(self, *args, **kwargs):
        if self._train_batch_size > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("packing", [True, False])
def test_the_report_is_on_the_batch_size_that_was_found(tmp_path, packing, capsys):
    trainer = OutOfMemoryAbove2(
        tiny_model("llama"),
        PackedSFTConfig(
            str(tmp_path),
            packing=packing,
            max_length=64,
            per_device_train_batch_size=8,
            auto_find_batch_size=True,
            num_train_epochs=1,
            report_to="none",
            use_cpu=True,
            bf16=False,
            save_strategy="no",
        ),
        train_dataset=documents(80),
        processing_class=tiny_tokenizer(),
    )
    first = trainer.packing_report.steps_per_epoch
    trainer.train()
    report, size = trainer.packing_report, trainer._train_batch_size
    assert size <= 2
    assert report.micro_batch == f"{size} {'bin' if packing else 'document'}{'s' * (size > 1)}"
    assert report.steps_per_epoch == trainer.state.global_step > first
    assert str(report) in capsys.readouterr().out
