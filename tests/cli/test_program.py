"""The program: help, typing errors, colors, and exit statuses."""

import subprocess
import sys

import pytest
from helpers.attacks import harmful
from helpers.command import run_command

from trl_packing.cli.output import uses_color

HEAVY = ("torch", "transformers", "trl", "datasets", "numpy", "jinja2")
LOADED = f"""
import sys
from trl_packing import cli
for words in {{}}:
    try:
        cli.main(words)
    except SystemExit:
        pass
    print('loaded', [name for name in {HEAVY} if name in sys.modules], 'by', words)
"""


def test_help_and_typing_errors_load_no_library(tmp_path):
    commands = [
        ["plan", "--help"],
        ["plan", "--config", "twice.yaml"],
        ["plan", "none.py"],
        ["inspect", "--model", "m"],
        ["inspect", "--model", "m", "--data", "d.jsonl", "--html", "no/folder/page.html"],
        ["prepare", "out", "--model", "m"],
    ]
    (tmp_path / "twice.yaml").write_text("max_length: 5\nmax_length: 6\n")
    words = [sys.executable, "-c", LOADED.format(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    said = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert said == [f"loaded [] by {words}" for words in commands], done.stderr


TYPING_ERRORS = [
    ("paln", "invalid choice: 'paln'"),
    ("doctor --jsno", "doctor has no option --jsno"),
    # Neither "m" nor "d" exists, so nothing is loaded before the refusal.
    ("plan --model m --data d --max_lenght 5", ": --max_lenght is unknown; did you mean --max_l"),
    ("inspect chat_data.py --modle m --data d", ": --modle is unknown; did you mean --model?"),
    ("prepare d out --model m --max-lenght=5", ": --max_lenght is unknown; did you mean"),
    ("verify --model m --torch_dtype auto", ": --torch_dtype is unknown; write --dtype"),
    ("plan --model m", "name the model and the data (--model NAME --data FILE)"),
    ("plan --config", "--config takes one YAML file"),
    ("\x1b[2Jplan", "\\x1b[2Jplan"),
]


@pytest.mark.parametrize(("words", "sentence"), TYPING_ERRORS)
def test_a_typing_error_is_one_line_with_status_2(words, sentence, capsys):
    try:
        status = run_command(words.split())
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert sentence in err
    assert not harmful(err)


def test_the_traceback_can_be_had(monkeypatch):
    monkeypatch.setenv("TRL_PACKING_TRACEBACK", "1")
    with pytest.raises(ValueError, match="does not exist"):
        run_command(["plan", "nowhere.py"])


def test_color_follows_the_option_then_the_environment(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    assert uses_color("auto")
    monkeypatch.setenv("NO_COLOR", "1")
    assert [uses_color(choice) for choice in ("auto", "always", "never")] == [False, True, False]
