"""A terminal executes nothing of the names of columns, files, options and scripts."""

import contextlib

import pytest
from helpers.attacks import ATTACKS, harmful
from helpers.command import run_command
from helpers.tiny import tiny_tokenizer

# A name with a lone surrogate cannot be encoded, and fails elsewhere.
ALONE = ATTACKS["lone surrogate"]
NAMES = ["".join(ATTACKS.values()).replace(ALONE, ""), ALONE]


@pytest.mark.parametrize("text", NAMES, ids=ascii)
def test_names_of_files_columns_and_options_are_shown_as_text(text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_tokenizer(chat=True).save_pretrained("model")
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n')
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
            run_command(words)
        said = "".join(capsys.readouterr())
        assert len(said.splitlines()) == 1, (words, said)
        assert not harmful(said), (words, said)
