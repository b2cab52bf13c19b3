"""The program: help, typing errors, versions, colors, and exit statuses."""

import io
import subprocess
import sys

import pytest
from helpers.attacks import harmful

from trl_packing.cli import main
from trl_packing.cli.output import uses_color
from trl_packing.cli.program import OPTIONS

HEAVY = ("torch", "transformers", "trl", "datasets")
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
    data = ["--model", "m", "--data", "d.jsonl"]
    commands = [
        ["--help"],
        ["plan", "--help"],
        ["plan", *data, "--max_lenght", "5"],
        ["plan", "--config", "twice.yaml"],
        ["plan", "none.py"],
        ["inspect", "--model", "m"],
        ["inspect", *data, "--html", "no/folder/page.html"],
        ["prepare", "out", "--model", "m"],
        ["compare", "a"],
    ]
    (tmp_path / "twice.yaml").write_text("max_length: 5\nmax_length: 6\n")
    words = [sys.executable, "-c", LOADED.format(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    said = [line for line in done.stdout.splitlines() if line.startswith("loaded")]
    assert said == [f"loaded [] by {words}" for words in commands], done.stderr


@pytest.mark.parametrize("command", OPTIONS)
def test_help_has_examples_exit_statuses_and_fits_a_terminal(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert f"\n  trl-packing {command} " in out.partition("\nexamples:\n")[2]
    assert "\n  2  " in out.partition("\nexit status:\n")[2]
    assert {"--json", "--color"} <= set(out.split())


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("paln", "did you mean plan?"),
        ("compare a b --jsno", "compare has no option --jsno"),
        ("plan --nonsense 2", "--nonsense is unknown; --help lists the options"),
        ("plan --model m --data d --max_lenght 5", "did you mean --max_length?"),
        ("plan --model m", "name the model and the data (--model NAME --data FILE)"),
        ("plan --config", "--config takes one YAML file"),
        ("plan --model m --data d --rank 2", "did you mean --ranks?"),
        ("\x1b[2Jplan", "\\x1b[2Jplan"),
        ("", "required: COMMAND"),
    ],
)
def test_a_typing_error_is_one_line_with_status_2(words, sentence, capsys):
    try:
        status = main(words.split())
    except SystemExit as end:
        status = end.code
    out, err = capsys.readouterr()
    assert (status, out, len(err.splitlines())) == (2, "", 1), err
    assert sentence in err
    assert not harmful(err)


@pytest.mark.parametrize(
    ("choice", "environment", "colored"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("auto", {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {"FORCE_COLOR": "1"}, False),
    ],
)
def test_color_follows_the_option_then_the_environment(choice, environment, colored, monkeypatch):
    inherited = {"NO_COLOR": "", "FORCE_COLOR": "0", "TERM": "xterm"}
    for name, value in (inherited | environment).items():
        monkeypatch.setenv(name, value)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert uses_color(choice, terminal) == colored
