"""Rows that were padded before are trained as if they had not been, and the padding is counted."""

import logging

import pytest
from datasets import Dataset, IterableDataset
from harness import TWO_RUNS, make_trainer
from helpers.tiny import tiny_tokenizer

EOS = tiny_tokenizer().eos_token_id
LENGTHS = [5, 9, 3, 9, 7, 4, 6, 8]


def document(length):
    return [10 + length] * (length - 1) + [EOS]


def plain(columns=()):
    rows = []
    for length in LENGTHS:
        ids = document(length)
        row = {"input_ids": ids}
        if "labels" in columns:
            row["labels"] = [-100, *ids[1:]]
        if "completion_mask" in columns:
            row["completion_mask"] = [0, 0] + [1] * (length - 2)
        if "loss_weights" in columns:
            row["loss_weights"] = [0.5] * length
        rows.append(row)
    return rows


FILLERS = {"labels": -100, "loss_weights": 0.0}


def padded(columns=(), left=0, width=12):
    """The same rows, filled up to `width`, `left` of the padding in front."""
    rows = []
    for row in plain(columns):
        size = len(row["input_ids"])
        row["attention_mask"] = [1] * size
        front = min(left, width - size)
        for name, values in row.items():
            fill = [FILLERS.get(name, 0)]
            row[name] = fill * front + values + fill * (width - size - front)
        rows.append(row)
    return rows


def trainer_for(folder, rows, **settings):
    settings = {"max_length": 32, "max_steps": 2, "learning_rate": 1e-2, **settings}
    return make_trainer(folder, rows, **settings)


def columns_of(trainer):
    names = ("input_ids", "labels", "loss_weights")
    return [{name: row[name] for name in names if name in row} for row in trainer.train_dataset]


def weights_of(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


@pytest.mark.parametrize("columns", [(), ("labels",), ("completion_mask", "loss_weights")])
@pytest.mark.parametrize("left", [0, 3, 99], ids=["behind", "around", "in front"])
def test_padded_rows_train_as_if_they_were_not(tmp_path, caplog, columns, left):
    with caplog.at_level(logging.WARNING):
        ours = trainer_for(tmp_path / "padded", padded(columns, left))
    bare = trainer_for(tmp_path / "bare", plain(columns))
    assert columns_of(ours) == columns_of(bare)
    ours.train()
    bare.train()
    for one, other in zip(weights_of(ours), weights_of(bare), strict=True):
        assert one.equal(other)
    said = "8 of 8 rows of the train dataset were padded beforehand: 45 padding tokens"
    assert said in caplog.text
    assert said in str(ours.packing_report)
    assert "append_eos" not in caplog.text


def test_padding_that_nobody_marks_changes_what_is_trained(tmp_path):
    """The control: without `attention_mask` the same rows are other documents."""
    rows = [{"input_ids": row["input_ids"]} for row in padded()]
    assert columns_of(trainer_for(tmp_path, rows)) != columns_of(
        trainer_for(tmp_path / "bare", plain())
    )


def test_rows_without_padding_are_left_alone(tmp_path, caplog):
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in plain()]
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, rows)
    assert "padded" not in caplog.text
    assert columns_of(trainer) == columns_of(trainer_for(tmp_path / "bare", plain()))


def test_rows_of_padding_alone_are_dropped_and_counted(tmp_path):
    empty = {"input_ids": [0] * 12, "attention_mask": [0] * 12}
    trainer = trainer_for(tmp_path, [empty, *padded(), empty])
    assert columns_of(trainer) == columns_of(trainer_for(tmp_path / "bare", plain()))
    assert "2 documents without a trained token: dropped (2 of them empty)" in str(
        trainer.packing_report
    )


def test_evaluation_sets_lose_their_padding_too(tmp_path):
    trainer = trainer_for(tmp_path, plain())
    found, expected = (trainer.evaluate(Dataset.from_list(rows)) for rows in (padded(), plain()))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TWO_RUNS)


@pytest.mark.parametrize("left", [0, 3])
def test_a_padded_stream_trains_its_documents(tmp_path, caplog, left):
    stream = IterableDataset.from_generator(lambda: iter(padded(("labels",), left)))
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, stream)
        trainer.train()
    assert columns_of(trainer) == columns_of(trainer_for(tmp_path / "bare", plain(("labels",))))
    assert "8 of 8 rows of the train stream were padded beforehand: 45 padding" in caplog.text


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([1, 0, 1, 1], "is 0 between tokens where it is 1, which is no padding"),
        ([1, 1, 2, 2], "of other values than 0 and 1; for rows of several documents"),
        ([1, 1, 1], "has 4 input_ids but 3 entries in 'attention_mask'"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_mask_that_is_no_padding_names_its_row(tmp_path, mask, sentence, streamed):
    good = {"input_ids": [7, 8, 9, EOS], "attention_mask": [1, 1, 1, 1]}
    rows = [good, {**good, "attention_mask": mask}, {**good, "attention_mask": mask}]
    given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
    with pytest.raises(ValueError, match=f"document 1 of the .*{sentence}.*2 such rows"):
        trainer_for(tmp_path, given).train()
