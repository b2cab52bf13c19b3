"""Two preparations are compared on every row; a difference of one label is found."""

import json

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.command import says
from helpers.prepared import chats
from helpers.runs import EQUAL, Side, compare, documents_by_trl, run_of, with_row_numbers
from helpers.tiny import save_tiny_model, tiny_tokenizer
from trl import SFTTrainer


def compared(rows, other, first=(), second=()):
    """Return the kinds of difference and their rows."""
    found = compare(Side("here", run_of(rows, *first)), Side("there", run_of(other, *second)))
    return {kind: number for kind, number in found["counts"].items() if number and kind != EQUAL}


def tokenized(labels, **columns) -> Dataset:
    ids = [[7 + k for k in range(len(row))] for row in labels]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, **columns})


def changed(rows, row, column, at, value):
    lists = rows.to_list()
    lists[row][column][at] = value
    return Dataset.from_list(lists)


SAME_AS_TRL = [
    (chats(12), ["--assistant_only_loss", "true", "--shuffle_dataset", "true"]),
    (chats(12), ["--eos_token", "<|other|>", "--max_length", "30"]),
    (Dataset.from_dict({"prompt": ["Why? ", "Who?"], "completion": ["So.", ""]}), []),
    (tokenized([[7, 8, 9], [-100, 8], [-100, -100]]), []),
]


@pytest.mark.parametrize(("rows", "options"), SAME_AS_TRL)
def test_settings_that_trl_has_prepare_the_same(rows, options):
    tokenizer = tiny_tokenizer(chat="generation")
    run = run_of(rows, "--max_length", "64", *options, tokenizer=tokenizer)
    found = compare(Side("here", run), Side("TRL", run, by_trl=True))
    assert (found["counts"][EQUAL], found["differences"]) == (len(rows), [])


def test_the_documents_of_trl_are_those_of_its_trainer(tmp_path):
    options = {"max_length": 30, "tokenizer": tiny_tokenizer(chat=True)}
    trainer = make_trainer(tmp_path, chats(12), cls=SFTTrainer, **options)
    shown = documents_by_trl(with_row_numbers(run_of(chats(12), "--max_length", "30")))
    for name in ("input_ids", "labels"):
        assert shown[name][:] == trainer.train_dataset[name][:]


def test_one_label_among_many_rows_is_found():
    """The negative control: everything is equal but for one label of one row."""
    rows = tokenized([list(range(7, 12))] * 50)
    sides = [Side("a", run_of(each)) for each in (rows, changed(rows, 33, "labels", 3, -100))]
    found = compare(*sides)
    assert found["counts"] == {EQUAL: 49, "labels differ": 1} | dict.fromkeys(
        ("dropped by one", "tokens differ", "weights differ"), 0
    )
    assert [each["row"] for each in found["differences"]] == [33]


def test_each_kind_of_difference_is_found():
    rows = tokenized([[7, 8, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    token = changed(changed(rows, 1, "input_ids", 2, 20), 1, "labels", 2, 20)
    assert compared(rows, token) == {"tokens differ": 1}
    assert compared(rows, changed(rows, 2, "loss_weights", 1, 0.5)) == {"weights differ": 1}
    weighted = tokenized([[7, 8, 9]] * 3, loss_weight=[1.0, 2.0, 1.0])
    assert compared(rows, weighted) == {"weights differ": 1}
    # A weight without a trained token, and the label of a first token, train nothing.
    untrained = tokenized([[7, -100, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    assert compared(untrained, changed(untrained, 2, "loss_weights", 1, 0.5)) == {}
    assert compared(rows, changed(rows, 1, "labels", 0, -100)) == {}
    texts = Dataset.from_dict({"text": ["a " * n for n in (30, 1, 30)]})
    limit = ["--max_length", "16"]
    assert compared(texts, texts, [*limit, "--overflow", "drop"], limit) == {"dropped by one": 2}


def test_the_command_compares_with_trl_and_files(tmp_path, capsys):
    data, config = tmp_path / "chats.jsonl", tmp_path / "other.yaml"
    chats(6).to_json(data)
    model = save_tiny_model(tmp_path / "model", "llama", chat=True)
    words = ["inspect", "--model", model, "--data", str(data), "--max_length", "256"]
    config.write_text(
        f"model_name_or_path: {model}\ndataset_name: {data}\ntrain_on: last_assistant\n"
    )

    def kinds(*words, status):
        found = json.loads(says(capsys, *words, "--json", status=status))
        return {kind: n for kind, n in found["counts"].items() if n}

    words = [*words, "--train_on", "assistant"]
    assert kinds(*words, "--against", str(config), status=1) == {EQUAL: 2, "labels differ": 4}
    assert kinds(*words[:-2], "--against", "trl", status=0) == {EQUAL: 6}
    lines = says(capsys, *words, "--against", "trl", status=1).split("\n")
    assert lines[0].split() == ["labels", "differ", "6", "rows"]
    assert lines[2:5] == ["row 0 · labels differ", "--- this run", "+++ TRL"]
    assert any(line.startswith("-⟦So 0. <|im_end|>") for line in lines)
    refused = says(capsys, *words, "--against", "none.yaml", status=2)
    assert "neither trl nor a .yaml file" in refused
