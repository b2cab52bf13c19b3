"""Freed pages are found again by the next step, and given back after the last."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
from harness import make_trainer
from helpers.tiny import documents_of_lengths

from trl_packing.training import malloc

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="mallopt is a function of Linux's C libraries"
)

STEPS = """
import ctypes, resource, sys, torch
from trl_packing.training.malloc import keep_freed_pages

# Huge pages come and go with what else the machine does: without them a fault is a page of 4 KiB.
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE
with keep_freed_pages(sys.argv[1] == "kept"):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(40):
        tensors = [torch.ones(2**23) for _ in range(4)]  # 32 MiB each
        del tensors
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_pages_are_zeroed_once_and_not_every_step():
    commands = ([sys.executable, "-c", STEPS, how] for how in ("kept", "not"))
    kept, not_kept = (int(subprocess.check_output(command)) for command in commands)
    # The first steps find pages, those after them find the same ones.
    assert kept < 0.3 * not_kept + 1000


def test_training_asks_and_takes_it_back(tmp_path, monkeypatch):
    libc = Mock()
    monkeypatch.setattr(malloc, "CDLL", lambda name: libc)
    trainer = make_trainer(tmp_path, documents_of_lengths([8] * 4), max_length=32, max_steps=1)
    assert not libc.mock_calls
    trainer.train()
    *calls, trim = libc.mock_calls
    assert [call.args[0] for call in calls] == [-4, -1, -2] * 2
    assert [call.args[1] for call in calls[3:]] == [65536, 131072, 131072]
    assert trim[0] == "malloc_trim"
