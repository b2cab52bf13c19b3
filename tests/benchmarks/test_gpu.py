"""`benchmarks/gpu.py` runs in small on a CPU, and finds kernels and models that are wrong."""

import importlib
from pathlib import Path

import pytest
from helpers import varlen_double


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.mark.slow
def test_a_dry_run_passes(gpu, capsys):
    assert gpu.main(["--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(f"## {part} (" in printed for part in gpu.PARTS)
    assert "all parts passed" in printed


def test_varlen_takes_the_same_rows(gpu, capsys, monkeypatch):
    """A double of PyTorch's kernel reads what it is handed."""
    calls = varlen_double.install(monkeypatch)
    machine = gpu.Machine("cpu", {"varlen": gpu.varlen.varlen_attention}, True)
    monkeypatch.setattr(gpu.Machine, "found", lambda dry_run: machine)
    assert gpu.main(["--dry-run", "--parts", "kernels", "blocks", "rows", "prefixes"]) == 0
    assert "| varlen | prefixes | 4 |" in capsys.readouterr().out
    assert len(calls) > 16


@pytest.mark.parametrize("fault", ["boundaries", "gradient"])
def test_a_wrong_kernel_fails(fault, gpu, capsys, monkeypatch):
    right = gpu.document_sdpa.document_attention

    def wrong(query, key, value, cu_seqlens, options, longest, keys=None):
        if fault == "boundaries" and keys is None:
            cu_seqlens = cu_seqlens[[0, -1]]
        output = right(query, key, value, cu_seqlens, options, longest, keys)
        return output + 1e-3 * (value.mean() - value.mean().detach()) * (fault == "gradient")

    monkeypatch.setattr(gpu.document_sdpa, "document_attention", wrong)
    assert gpu.main(["--dry-run", "--parts", "kernels", "rows"]) == 1
    printed = capsys.readouterr().out
    assert "**failed**: AssertionError: documents, " in printed
    assert "failed: kernels" in printed
    assert "## rows (" in printed, "the other parts run all the same"


def test_losses_that_are_not_those_of_documents_alone_fail(gpu, capsys, monkeypatch):
    alone = gpu.alone
    monkeypatch.setattr(gpu, "alone", lambda *arguments: alone(*arguments) + 0.01)
    assert gpu.main(["--dry-run", "--parts", "models"]) == 1
    assert "AssertionError: llama: loss" in capsys.readouterr().out
