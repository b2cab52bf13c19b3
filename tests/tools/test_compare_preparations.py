"""Two preparations are compared on every row; a difference of one label is found."""

import json

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.tiny import CHATML, save_tiny_model, tiny_tokenizer
from trl import SFTTrainer

from trl_packing.cli import main
from trl_packing.tools.compare_preparations import (
    DIFFERENCES,
    DROPPED,
    EQUAL,
    LABELS,
    TOKENS,
    WEIGHTS,
    Side,
    compare,
    documents_by_trl,
)
from trl_packing.tools.preview.previewed_run import PreviewedRun


def run_of(rows, *options, tokenizer=None):
    return PreviewedRun.from_settings(rows, tokenizer or tiny_tokenizer(chat=True), [*options])


def compared(rows, first=(), second=(), *, by_trl=False, other=None, tokenizer=None):
    a = run_of(rows, *first, tokenizer=tokenizer)
    b = run_of(rows if other is None else other, *second, tokenizer=tokenizer)
    return compare(Side("here", a), Side("there", b, by_trl=by_trl))


def found(comparison):
    return {kind: number for kind in DIFFERENCES if (number := comparison["counts"][kind])}


def chats(number: int = 12) -> Dataset:
    turns = lambda i: [  # noqa: E731
        {"role": "user", "content": "Why? " * (1 + i % 4)},
        {"role": "assistant", "content": "Because. " * (1 + i % 3)},
    ]
    return Dataset.from_list([{"messages": turns(i) * (1 + i % 2)} for i in range(number)])


def texts(*numbers: int) -> Dataset:
    return Dataset.from_dict({"text": ["one two three " * n for n in numbers]})


def tokenized(labels, **columns) -> Dataset:
    ids = [[7 + k for k in range(len(row))] for row in labels]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, **columns})


def changed(rows, row, column, at, value):
    lists = rows.to_list()
    lists[row][column][at] = value
    return Dataset.from_list(lists)


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (chats(), ["--assistant_only_loss", "true", "--shuffle_dataset", "true"]),
        (chats(), ["--eos_token", "<|other|>", "--max_length", "30"]),
        (Dataset.from_dict({"prompt": ["Why? ", "Who?"], "completion": ["So.", ""]}), []),
        (tokenized([[7, 8, 9], [-100, 8], [-100, -100]]), []),
    ],
)
def test_settings_that_trl_has_prepare_the_same(rows, options):
    options = ["--max_length", "64", *options]
    tokenizer = tiny_tokenizer(chat="generation")
    comparison = compared(rows, options, options, by_trl=True, tokenizer=tokenizer)
    assert comparison["is_equal"]
    for name in ("documents", "tokens", "trained_tokens"):
        assert comparison[name][0] == comparison[name][1] > 0


def test_the_documents_of_trl_are_those_of_its_trainer(tmp_path):
    options = {"max_length": 30, "tokenizer": tiny_tokenizer(chat=True)}
    trainer = make_trainer(tmp_path, chats(), cls=SFTTrainer, **options)
    shown = documents_by_trl(run_of(chats(), "--max_length", "30"))
    for name in ("input_ids", "labels"):
        assert shown[name][:] == trainer.train_dataset[name][:]
    own = Dataset.from_dict({"question": ["Why?"], "answer": ["So."]})
    with pytest.raises(ValueError, match="TRL cannot prepare these rows: KeyError: 'text'"):
        documents_by_trl(run_of(own, "--prompt_template", "{question}"))


def test_one_label_among_many_rows_is_found():
    """The negative control: everything is equal but for one label of one row."""
    rows = tokenized([list(range(7, 12))] * 50)
    assert compared(rows)["is_equal"]
    comparison = compared(rows, other=changed(rows, 33, "labels", 3, -100))
    assert (found(comparison), comparison["counts"][EQUAL]) == ({LABELS: 1}, 49)
    (difference,) = comparison["differences"]
    assert (difference["row"], difference["first_token"]) == (33, 3)


def test_each_kind_of_difference_is_found():
    rows = tokenized([[7, 8, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    token = changed(changed(rows, 1, "input_ids", 2, 20), 1, "labels", 2, 20)
    assert found(compared(rows, other=token)) == {TOKENS: 1}
    assert found(compared(rows, other=changed(rows, 2, "loss_weights", 1, 0.5))) == {WEIGHTS: 1}
    weighted = tokenized([[7, 8, 9]] * 3, loss_weight=[1.0, 2.0, 1.0])
    assert found(compared(rows, other=weighted)) == {WEIGHTS: 1}
    # A weight without a trained token, and the label of a first token, train nothing.
    untrained = tokenized([[7, -100, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    assert compared(untrained, other=changed(untrained, 2, "loss_weights", 1, 0.5))["is_equal"]
    assert compared(rows, other=changed(rows, 1, "labels", 0, -100))["is_equal"]
    limit = ["--max_length", "16"]
    comparison = compared(texts(12, 1, 12), [*limit, "--overflow", "drop"], limit)
    assert (found(comparison), comparison["documents"]) == ({DROPPED: 2}, [1, 3])


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path):
    """The options of a run on conversations."""
    data = tmp_path / "chats.jsonl"
    chats(6).to_json(data)
    model = save_tiny_model(tmp_path / "model", "llama", chat=True)
    return ["inspect", "--model", model, "--data", str(data), "--max_length", "256"]


def test_the_command_compares_with_trl_files_and_templates(command, capsys, tmp_path):
    config, template = tmp_path / "other.yaml", tmp_path / "other.jinja"
    assistant = ["--train_on", "assistant"]

    def kinds(*words, status):
        assert main([*command, *words, "--json"]) == status
        found = json.loads(capsys.readouterr().out)
        return {kind: n for kind, n in found["counts"].items() if n}, found["names"][1]

    assert kinds("--against", "trl", status=0) == ({EQUAL: 6}, "TRL")
    assert kinds(*assistant, "--against", "trl", status=1) == ({LABELS: 6}, "TRL")
    names = f"model_name_or_path: {command[2]}\ndataset_name: {command[4]}\n"
    config.write_text(f"{names}train_on: last_assistant\n")
    against = [*assistant, "--against", str(config)]
    assert kinds(*against, status=1) == ({EQUAL: 3, LABELS: 3}, "other.yaml")
    template.write_text(CHATML.replace("<|im_start|>' +", "<|im_start|>the ' +"))
    assert kinds("--against", str(template), status=1) == ({TOKENS: 6}, "other.jinja")
    assert main([*command, *assistant, "--against", "trl"]) == 1
    text = capsys.readouterr().out
    assert "The preparations differ in 6 of 6 rows." in text
    lines = text.split("\n")
    start = lines.index("row 0 · labels differ from token 1 on")
    assert lines[start + 1 : start + 3] == ["--- this run", "+++ TRL"]
    assert any(line.startswith("-") and "⟦Because. <|im_end|>⟧" in line for line in lines[start:])


def test_other_words_are_refused_in_one_line(command, capsys):
    assert main([*command, "--against", "none.yaml"]) == 2
    assert "neither trl nor a .jinja or .yaml file" in capsys.readouterr().err
