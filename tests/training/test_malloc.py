"""Freed pages are found again by the next step, and given back after the last."""

import os
import subprocess
import sys

import pytest
from harness import make_trainer
from helpers.tiny import documents_of_lengths

from trl_packing.training import malloc as allocator

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="mallopt is a function of Linux's C libraries"
)

STEPS = """
import ctypes, resource, sys, torch
from trl_packing.training.malloc import keep_freed_pages

# Huge pages come and go with what else the machine does: without them a fault is a page of 4 KiB.
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with keep_freed_pages(sys.argv[1] == "kept"):
    before = faults()
    for _ in range(40):
        tensors = [torch.ones(2**23) for _ in range(4)]  # 32 MiB each
        del tensors
    print(faults() - before)
"""


def page_faults(how: str, **environment: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", STEPS, how],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(run.stdout)


@pytest.mark.slow
def test_pages_are_zeroed_once_and_not_every_step():
    # The first steps find pages, those after them find the same ones.
    assert page_faults("kept") < 0.3 * page_faults("not") + 1000


class Libc:
    """Writes down what it is asked."""

    def __init__(self):
        self.calls: list[tuple] = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))

    def malloc_trim(self, pad):
        self.calls.append(("trim", pad))


def test_training_asks_and_takes_it_back(tmp_path, monkeypatch):
    libc = Libc()
    monkeypatch.setattr(allocator, "_glibc", lambda: libc)
    trainer = make_trainer(tmp_path, documents_of_lengths([8] * 4), max_length=32, max_steps=1)
    assert not libc.calls
    trainer.train()
    assert [parameter for parameter, _ in libc.calls] == [-4, -1, -2, -4, -1, -2, "trim"]
    assert libc.calls[3:6] == [(-4, 65536), (-1, 131072), (-2, 131072)]
