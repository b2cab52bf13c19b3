"""Runs without images need no Pillow, which none of the dependencies installs."""

import subprocess
import sys

import pytest

PROGRAM = "import sys; sys.modules['PIL'] = None; import trl_packing; trl_packing.PackedSFTTrainer"


@pytest.mark.slow
def test_the_trainer_is_imported_without_pillow():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
