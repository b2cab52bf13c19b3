"""A dozen architectures of the compatibility table, with and without the isolation check.

`make matrix` (`trl-packing verify --matrix`) runs all of them and writes docs/compatibility.md.
"""

import pytest

from trl_packing.cli import main
from trl_packing.tools.exactness.compatibility import (
    ONE_ROW_BACKENDS,
    Verdict,
    judge_architecture,
    summary,
)

# (architecture, the backend that must be exact, the result of TRL's packing)
DOZEN = [
    ("llama", "documents", "exact"),
    ("mistral", "documents", "exact"),
    ("gemma3", "documents", "exact"),
    ("deepseek_v3", "documents", "exact"),
    ("gpt_oss", "documents", "differs"),
    ("opt", "documents", "differs"),
    ("gptj", "model", "exact"),
    ("falcon", "mask", "differs"),
    ("bloom", "padded", "differs"),
    ("mamba", "padded", "differs"),
    ("jamba", "padded", "differs"),
    ("phi3+longrope", "padded", "differs"),
    ("llama+dynamic", "equal_lengths", "differs"),
    ("deepseek_v32", "equal_lengths", "differs"),
    # Layers that differ in the size of their heads, the source of their keys, or their number.
    ("gemma4_text", "documents", "exact"),
    ("gemma4_text+experts", "documents", "exact"),
    ("dots3_note", "equal_lengths", "differs"),
    ("step3p7", "documents", "exact"),
]


@pytest.mark.parametrize(("name", "backend", "by_trl"), DOZEN, ids=[name for name, _, _ in DOZEN])
def test_an_architecture_is_exact_with_its_backend(name, backend, by_trl):
    verdict = judge_architecture(name)
    assert verdict.outcome == "exact", verdict
    assert verdict.backend == backend
    assert verdict.by_trl.startswith(by_trl)
    errors = (verdict.logits_error, verdict.loss_error, verdict.gradient_error)
    assert max(errors) <= verdict.tolerance <= 1e-3


@pytest.mark.parametrize("name", ["mamba", "bloom", "recurrent_gemma"])
def test_without_the_check_the_same_models_differ(name):
    """The negative control."""
    verdict = judge_architecture(name, isolation_check="off")
    assert verdict.outcome in ("differs", "refused")
    if verdict.outcome == "differs":
        assert verdict.gradient_error > 100 * verdict.tolerance


def test_shared_keys_are_shared_with_gradient_checkpointing_too():
    verdict = judge_architecture("gemma4_text", gradient_checkpointing=True)
    assert (verdict.outcome, verdict.backend) == ("exact", "documents")


@pytest.mark.parametrize("attention", ["model", "documents", "padded"])
def test_a_named_backend_is_refused_if_keys_are_ranked(attention):
    """The ranking is wrong for some contents only, so a check on a few documents may miss it."""
    verdict = judge_architecture("dots3_note_text", attention=attention)
    assert verdict.outcome == "refused"
    assert f"attention='{attention}' cannot be exact" in verdict.reason
    assert "index_topk=8 ranks the keys of the whole row" in verdict.reason


def test_a_named_backend_that_leaks_is_refused():
    verdict = judge_architecture("mamba", attention="model")
    assert verdict.outcome == "refused"
    assert "LEAK" in verdict.reason


def test_the_summary_counts_what_matters():
    verdicts = [
        Verdict("a", "exact", "documents", by_trl="exact"),
        Verdict("b", "exact", "padded", by_trl="differs (1)"),
        Verdict("c", "exact", "padded", by_trl="exact"),
        Verdict("d", "differs", "documents", by_trl="differs (1)"),
        Verdict("e", "not built", reason="needs | timm"),
    ]
    text = summary(verdicts)
    assert "1 packed-exact, 2 exact by padded rows, 0 refused, 1 not built" in text
    assert "silent differences: 1" in text
    assert "padded here: c" in text
    assert {v.backend for v in verdicts if v.backend in ONE_ROW_BACKENDS} == {"documents"}


@pytest.mark.slow
def test_the_command_judges_architectures_and_writes_the_table(tmp_path, capsys):
    output = tmp_path / "compatibility.md"
    code = main(["verify", "--matrix", "--only", "llama", "bloom", "--output", str(output)])
    assert code == 0
    assert "| `bloom` | padded rows, `padded` |" in output.read_text()
    assert "silent differences: 0" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "backend"), [("llama", "documents"), ("mamba", "padded")])
def test_the_command_judges_a_model(name, backend, tmp_path, capsys):
    from trl_packing.tools.exactness.tiny_models import tiny_model

    tiny_model(name).save_pretrained(tmp_path)
    assert main(["verify", "--model", str(tmp_path), "--device", "cpu", "--gradients"]) == 0
    printed = capsys.readouterr().out
    assert f"exact with attention={backend!r}" in printed
    assert "gradients" in printed
    if backend == "padded":
        assert "first in backbone.layers.0" in printed
        code = main(["verify", "--model", str(tmp_path), "--device", "cpu", "--attention", "model"])
        assert code == 1
