"""The program: help, typing errors, versions, colors, and exit statuses."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "trl", "datasets")


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["plan", "--color", "pink"]])
def test_help_and_typing_errors_load_no_library(arguments):
    code = (
        "import sys\n"
        "from trl_packing import cli\n"
        "try:\n"
        f"    cli.main({arguments})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print('loaded', [name for name in {HEAVY} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("loaded []"), done.stdout + done.stderr


def test_the_check_sees_a_library_that_is_loaded():
    code = f"import sys, torch\nprint('loaded', [n for n in {HEAVY} if n in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.rstrip().endswith("loaded ['torch']")
