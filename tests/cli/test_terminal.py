"""A terminal executes nothing of the user's data, names of columns, files and scripts.

The commands run in a real terminal (a pty) of 80 columns, as a user runs them.
"""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import termios

import pytest
from helpers.attacks import ATTACKS, harmful
from helpers.tiny import tiny_tokenizer

from trl_packing.cli import main

# The color of trained tokens, and progress bars: a carriage return, and a cursor that moves up.
OURS = re.compile(r"\x1b\[1;32m|\x1b\[0m|\r|\x1b\[A")
# A file name has neither "/" nor NUL; JSON has no lone surrogate.
IN_DATA = sorted(ATTACKS.keys() - {"lone surrogate"})
NAMES = ["".join(ATTACKS[attack] for attack in IN_DATA), ATTACKS["lone surrogate"]]
RUN = ["--model", "model", "--data", "data.jsonl", "--response_template", "###"]
INSPECT = ["-m", "trl_packing.cli", "inspect", *RUN, "--rows", *map(str, range(len(IN_DATA)))]


def in_terminal(words, folder, **environment):
    """Return all that Python shows in a terminal of 80 columns."""
    leader, follower = pty.openpty()
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    inherited |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    termios.tcsetwinsize(follower, (40, 80))
    ends = {"stdin": follower, "stdout": follower, "stderr": follower}
    command = [sys.executable, *words]
    process = subprocess.Popen(command, cwd=folder, env=inherited | environment, **ends)
    os.close(follower)
    shown = b""
    with contextlib.suppress(OSError):  # the process has closed its end
        while part := os.read(leader, 65536):
            shown += part
    os.close(leader)
    assert process.wait() == 0, shown
    return shown.decode(errors="replace").replace("\r\n", "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    tiny_tokenizer(chat=True).save_pretrained(folder / "model")
    rows = [{"text": f"### {attack} {ATTACKS[attack]} end"} for attack in IN_DATA]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.slow
def test_a_terminal_shows_color_and_progress_but_executes_no_data(folder):
    shown = in_terminal(INSPECT, folder)
    assert shown.count("\x1b[1;32m") == len(IN_DATA)
    assert not harmful(OURS.sub("", shown))
    assert "\\x1b[2J" in shown
    plain = in_terminal(INSPECT, folder, NO_COLOR="1")
    assert "\x1b[1;32m" not in plain
    assert plain.count("⟦") == len(IN_DATA)
    # The negative control: the same data, printed without an escape.
    code = "import json; [print(json.loads(row)['text']) for row in open('data.jsonl')]"
    bare = in_terminal(["-c", code], folder)
    assert {"\x1b", "\x07", "\x9b", "\u202e"} <= harmful(OURS.sub("", bare))


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
