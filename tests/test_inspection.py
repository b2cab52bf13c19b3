"""What the command prints is what the trainer trains."""

import json

import pytest
from datasets import Dataset
from tiny import tiny_dataset, tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer, show_document
from trl_packing.cli import main
from trl_packing.inspection import inspect, load_rows


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_rows_are_shown_as_the_trainer_prepares_them(tmp_path, train_on):
    rows, chat = tiny_dataset("conversational_language_modeling"), tiny_tokenizer(chat=True)
    args = PackedSFTConfig(
        str(tmp_path), train_on=train_on, report_to="none", use_cpu=True, bf16=False
    )
    trainer = PackedSFTTrainer(tiny_model("llama"), args, train_dataset=rows, processing_class=chat)
    expected = [
        show_document(trainer.train_dataset[row], chat, name=f"row {row}") for row in (2, 0)
    ]
    assert list(inspect(rows, chat, ["--train_on", train_on], rows=[2, 0])) == expected
    others = list(inspect(rows, chat, ["--train_on", "all"], rows=[2, 0]))
    assert (others == expected) == (train_on == "all")


def test_pieces_of_a_row_are_shown_one_by_one():
    rows = Dataset.from_list([{"text": "one two three four"}])
    shown = list(
        inspect(rows, tiny_tokenizer(), ["--max_length", "8", "--overflow", "split"], rows=[0])
    )
    assert len(shown) > 1
    assert shown[1].startswith(f"row 0, piece 2 of {len(shown)} ")


def test_a_row_that_is_dropped_says_why():
    rows = Dataset.from_list([{"text": "no template in this"}])
    (shown,) = inspect(rows, tiny_tokenizer(), ["--response_template", "###"], rows=[0])
    assert "row 0 · not trained: " in shown
    assert "response_template '###'" in shown


def test_all_rows_tell_what_is_lost():
    rows = Dataset.from_list([{"text": "short"}, {"text": "long " * 50}])
    settings = ["--max_length", "16", "--overflow", "drop"]
    *_, lost = inspect(rows, tiny_tokenizer(), settings, rows=[0], prepares_all=True)
    assert "1 document longer than max_length=16: dropped" in lost


def test_the_command_prints_marked_documents(tmp_path, capsys):
    tiny_tokenizer(chat=True).save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data.jsonl")]
    assert main(["inspect", *arguments, "--rows", "0", "--train_on", "assistant"]) == 0
    assert "⟦So.<|im_end|>⟧" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        ("nothing.jsonl", [], "nothing.jsonl does not exist"),
        ("data.jsonl", ["--rows", "7"], "row 7 is not among the 1 rows"),
        ("data.jsonl", ["--train_on", "me"], "me"),
    ],
)
def test_what_the_command_cannot_do_is_one_sentence(tmp_path, capsys, data, options, sentence):
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"text": "So."}\n')
    arguments = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / data)]
    try:
        code = main(["inspect", *arguments, *options])
    except SystemExit as exit:  # what argparse itself refuses
        code = exit.code
    assert code == 2
    assert sentence in capsys.readouterr().err


def test_rows_are_those_of_a_file_of_a_folder_or_of_a_part(tmp_path):
    lines = [json.dumps({"text": str(i)}) + "\n" for i in range(10)]
    for name, part in (("train", lines[:8]), ("test", lines[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    assert load_rows(str(tmp_path / "test.jsonl"))["text"][:] == ["8", "9"]
    assert load_rows(str(tmp_path), "test")["text"][:] == ["8", "9"]
    assert load_rows(str(tmp_path), "train[6:]")["text"][:] == ["6", "7"]


def test_a_file_that_is_not_there_is_not_taken_for_a_hub_id():
    with pytest.raises(ValueError, match=r"missing\.jsonl does not exist"):
        load_rows("missing.jsonl")
