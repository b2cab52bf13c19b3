"""A dozen architectures of the compatibility table, with and without the isolation check.

`make matrix` runs all of them and writes docs/compatibility.md.
"""

import json

import pytest
from helpers.combinations import fast
from helpers.command import run_command, says
from helpers.shared_prefixes import share_unchecked, siblings_see_each_other, spoil_trees

from architectures.compatibility import Verdict, judge_architecture
from architectures.shared_step import judge_sharing
from architectures.tiny_models import tiny_model

# architecture: the backend that must be exact, the result of TRL's packing, whether it shares
# prefixes; the others say why not, and train the documents apart.
EXACT = ("documents", "exact", True)
SOME = {
    **dict.fromkeys(("llama", "mistral", "gemma3", "deepseek_v3"), EXACT),
    **dict.fromkeys(("gpt_oss", "opt"), ("documents", "differs", True)),
    **dict.fromkeys(("gpt_neo", "deepseek_v32", "dots3_note"), ("model", "exact", False)),
    "mpt": ("mask", "differs", False),
    **dict.fromkeys(("bart", "bloom"), ("padded", "differs", False)),
    **dict.fromkeys(("mamba", "jamba"), ("documents", "differs", False)),
    "rwkv": ("by_document", "differs", False),
    "phi3+longrope": ("padded", "differs", True),  # shared documents are below its threshold
    "llama+dynamic": ("equal_lengths", "differs", False),
    # Layers that differ in the size of their heads, the source of their keys, or their number.
    **dict.fromkeys(("gemma4_text", "gemma4_text+experts", "step3p7"), EXACT),
}


@pytest.mark.parametrize("name", fast(SOME, set(SOME) - {"mistral", "gemma3", "rwkv"}))
def test_an_architecture_is_exact_with_its_backend(name):
    backend, by_trl, _ = SOME[name]
    verdict = judge_architecture(name, shares=False)
    assert (verdict.outcome, verdict.backend) == ("exact", backend), verdict
    assert verdict.by_trl.startswith(by_trl)
    errors = (verdict.logits_error, verdict.loss_error, verdict.gradient_error)
    assert max(errors) <= verdict.tolerance <= 1e-3


@pytest.mark.parametrize("name", fast(SOME, {"mistral"}))
def test_an_architecture_shares_prefixes_exactly_or_says_why_not(name):
    sharing = judge_sharing(tiny_model(name))
    shares = SOME[name][2]
    assert sharing.outcome == ("exact" if shares else "apart"), sharing
    assert sharing.error <= sharing.tolerance <= 1e-3
    assert bool(sharing.reason) != shares


def test_shared_rows_without_their_check_differ_where_siblings_see_each_other(monkeypatch):
    """The negative control of the column: a fault in the rows is a silent difference."""
    spoil_trees(monkeypatch, siblings_see_each_other)
    model = tiny_model("llama")
    refused = judge_sharing(model)
    assert refused.outcome == "apart"
    assert "LEAK" in refused.reason
    share_unchecked(monkeypatch)
    unchecked = judge_sharing(model)
    assert unchecked.outcome == "differs"
    assert unchecked.error > 100 * unchecked.tolerance
    assert Verdict("llama", "exact", "documents", sharing=unchecked).is_silent_difference


@pytest.mark.parametrize("name", ["bart", "bloom", "rwkv", "mpt", "opt", "phi3+longrope"])
def test_without_the_check_the_same_models_differ(name):
    """The negative control."""
    options = {"attention": "model", "isolation_check": "off", "shares": False}
    verdict = judge_architecture(name, **options)
    assert verdict.outcome == "differs"
    assert verdict.gradient_error > 100 * verdict.tolerance


def test_shared_keys_are_shared_with_gradient_checkpointing_too():
    verdict = judge_architecture("gemma4_text", gradient_checkpointing=True, shares=False)
    assert (verdict.outcome, verdict.backend) == ("exact", "documents")


NOT_EXACT = [
    ("dots3_note_text", "documents", "index_topk=8 needs the mask"),
    # The ranking is wrong for some contents only, so a check on a few documents may miss it.
    ("minimax_m3_vl_text", "padded", "index_topk_blocks=2 ranks blocks of the whole row"),
    ("rwkv", "model", "LEAK"),
]


@pytest.mark.parametrize(("name", "attention", "words"), NOT_EXACT)
def test_a_named_backend_that_is_not_exact_is_refused(name, attention, words):
    verdict = judge_architecture(name, attention=attention)
    assert verdict.outcome == "refused"
    assert words in verdict.reason


@pytest.mark.parametrize("name", fast(("llama", "rwkv", "gpt_neo"), {"llama", "rwkv"}))
def test_verify_judges_a_model_and_its_shared_prefixes(name, tmp_path, capsys):
    backend, _, shares = SOME[name]
    tiny_model(name).save_pretrained(tmp_path)
    words = ["verify", "--model", str(tmp_path), "--device", "cpu", "--gradients"]
    assert f"exact with attention={backend!r}" in says(capsys, *words)
    assert run_command([*words, "--attention", "model"]) == (name == "rwkv")
    printed = says(capsys, *words, "--prefixes", "--json", status=int(not shares))
    found = json.loads(printed)["prefixes"]
    assert found["verdict"] == ("isolated" if shares else "refused")
    assert not shares or found["gradient_difference"] < 1e-5
