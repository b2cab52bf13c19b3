"""`trl-packing inspect` writes pages, and compares preparations by its exit status."""

import json
import re

import pytest
from datasets import Dataset
from helpers.tiny import CHATML, save_tiny_model

from trl_packing.cli import main
from trl_packing.tools.preparations import side


@pytest.fixture
def command(tmp_path):
    """The options of a run on conversations."""
    turns = [("user", "Why?"), ("assistant", "Because."), ("user", "Who?"), ("assistant", "Me.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    data = tmp_path / "chats.jsonl"
    Dataset.from_list([{"messages": messages[: 2 + 2 * (i % 2)]} for i in range(6)]).to_json(data)
    model = save_tiny_model(tmp_path / "model", "llama", chat=True)
    return ["inspect", "--model", model, "--data", str(data), "--max_length", "64"]


def test_micro_batches_are_drawn_with_the_prefixes_that_they_share(command, capsys):
    command[-1] = "512"
    prompt = "one two three four five six seven eight nine ten " * 2
    rows = [{"prompt": prompt, "completion": answer} for answer in ("Yes.", "No.", "Yes, and no.")]
    Dataset.from_list(rows).to_json(command[4])
    assert main([*command, "--prefix_sharing", "off", "--micro_batches", "1"]) == 0
    apart = capsys.readouterr().out
    assert apart.startswith("micro-batch 1, bin 1 · ")
    assert "═" not in apart
    shared = [*command, "--prefix_sharing", "bin", "--micro_batches", "1"]
    assert main(shared) == 0
    heading, *lines = capsys.readouterr().out.rstrip().split("\n")
    assert re.fullmatch(
        r"micro-batch 1 · 3 documents · \d+ tokens instead of \d+ \([\d.]+× fewer\)", heading
    )
    assert lines[0].startswith("═")
    assert all(line.startswith(" ") and " above" in line for line in lines[1:])
    assert all(len(line) <= 80 for line in lines)
    assert main([*shared, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["packed_rows"]
    assert {d["row"] for d in row["documents"]} == {0, 1, 2}
    computed = sum(d["tokens"] - d["shared"] for d in row["documents"])
    assert row["tokens"] == computed < sum(d["tokens"] for d in row["documents"])
    assert main([*shared, "2"]) == 2
    assert "micro-batch 2 is not among the 1 of the epoch" in capsys.readouterr().err


def test_equal_preparations_exit_with_0(command, capsys):
    assert main([*command, "--against", "trl"]) == 0
    out = capsys.readouterr().out
    assert "Both preparations make the same documents: tokens, labels and weights." in out


def test_different_preparations_exit_with_1(command, capsys):
    options = ["--train_on", "assistant", "--against", "trl"]
    assert main([*command, *options]) == 1
    captured = capsys.readouterr()
    assert "The preparations differ in 6 of 6 rows." in captured.out
    assert "row 0 · labels differ from token 1 on" in captured.out


def test_the_comparison_prints_json(command, capsys):
    assert main([*command, "--train_on", "last_assistant", "--against", "trl", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"]["labels differ"] == found["rows"] == 6
    assert not found["is_equal"]
    first, second = found["differences"][0]["sides"]
    assert first["ids"] == second["ids"]
    assert first["labels"] != second["labels"]


def test_words_that_libraries_print_do_not_break_the_json(command, capsys, monkeypatch):
    """DeepSpeed logs to stdout when accelerate imports it, which TRL's trainer causes."""

    class Printing(side.SFTTrainer):
        def __init__(self, *args, **kwargs):
            print("[WARNING] Setting accelerator to CPU.")
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(side, "SFTTrainer", Printing)
    assert main([*command, "--against", "trl", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["is_equal"]
    assert "Setting accelerator" in captured.err


def test_a_file_of_settings_changes_the_run(command, capsys, tmp_path):
    config = tmp_path / "other.yaml"
    config.write_text("train_on: last_assistant\nmax_length: 64\n")
    assert main([*command, "--train_on", "assistant", "--against", str(config), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["counts"]["labels differ"] == 3
    config.write_text("train_on: assistant\n")
    assert main([*command, "--train_on", "assistant", "--against", str(config)]) == 0


def test_a_file_that_names_model_and_data_is_a_run_of_its_own(command, capsys, tmp_path):
    config = tmp_path / "other.yaml"
    config.write_text(f"model_name_or_path: {command[2]}\ndataset_name: {command[4]}\n")
    assert main([*command, "--train_on", "assistant", "--against", str(config), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["names"] == ["this run", "other.yaml"]
    assert found["counts"]["labels differ"] == 6


def test_another_template_is_found_in_the_tokens(command, capsys, tmp_path):
    template = tmp_path / "other.jinja"
    template.write_text(CHATML)
    assert main([*command, "--against", str(template)]) == 0
    template.write_text(CHATML.replace("<|im_start|>' +", "<|im_start|>the ' +"))
    assert main([*command, "--against", str(template), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))
    assert found["counts"]["tokens differ"] == 6


def test_other_words_are_refused_in_one_line(command, capsys, tmp_path):
    assert main([*command, "--against", "axolotl"]) == 2
    assert "name trl, a .jinja template or a .yaml file" in capsys.readouterr().err
    assert main([*command, "--against", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml does not exist" in capsys.readouterr().err
    assert main([*command, "--against", "trl", "--all"]) == 2
    assert "--all has no effect beside --against" in capsys.readouterr().err
    assert main([*command, "--against", "trl", "--html", str(tmp_path / "a.html")]) == 2
    assert "--html has no effect beside --against" in capsys.readouterr().err
