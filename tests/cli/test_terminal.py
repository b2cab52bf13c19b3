"""A terminal executes nothing of the names of columns, files, options and scripts."""

import contextlib
import json

import pytest
from helpers.attacks import ATTACKS, harmful
from helpers.tiny import tiny_tokenizer

from trl_packing.cli import main

# A file name has neither "/" nor NUL; JSON has no lone surrogate.
IN_DATA = sorted(ATTACKS.keys() - {"lone surrogate"})
NAMES = ["".join(ATTACKS[attack] for attack in IN_DATA), ATTACKS["lone surrogate"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_tokenizer(chat=True).save_pretrained(folder / "model")
    rows = [{"text": f"### {attack} {ATTACKS[attack]} end"} for attack in IN_DATA]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("text", NAMES, ids=ascii)
def test_names_of_files_columns_and_options_are_shown_as_text(text, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    model, data = ["--model", "model"], ["--data", "data.jsonl"]
    for words in (
        ["plan", *model, "--data", f"{text}.jsonl"],
        ["plan", f"{text}.py"],
        ["plan", *model, *data, f"--{text}", "1"],
        ["plan", *model, *data, "--prompt_column", text],
        ["inspect", *model, *data, "--chat_template_path", f"./{text}.jinja"],
        ["compare", text, f"{text}2"],
        [text],
    ):
        with contextlib.suppress(SystemExit):
            main(words)
        said = "".join(capsys.readouterr())
        assert len(said.splitlines()) == 1, (words, said)
        assert not harmful(said), (words, said)
