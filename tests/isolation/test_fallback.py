"""With every attention backend, a packed step is the same documents one at a time.

The reference is `one_at_a_time`: each document alone through a fresh copy of the untouched model.
Backends that sum in another order stay below 100 roundings of float32, so 1e-5 of the largest
value. Leaks are 2 to 5 orders of magnitude larger. `tests/architectures/test_compatibility.py` has
the backends of other models, and their leaks without a check.
"""

import logging
from functools import cache

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import StepResult, one_at_a_time, packed_step, tiny_documents
from datasets import Dataset
from harness import make_trainer
from helpers.leaks import hopeless

import trl_packing.attention.backends
import trl_packing.isolation.guard
from trl_packing import block_diagonal_mask
from trl_packing.attention import block_mask

TOLERANCE = 1e-5
LEAK = 100 * TOLERANCE  # the least that a leak moves logits, loss and gradients here


@cache
def truth(name: str) -> StepResult:
    return one_at_a_time(tiny_model(name), tiny_documents())


def step(name, folder, **options):
    return packed_step(tiny_model(name), tiny_documents(), str(folder), **options)


def assert_exact(packed, expected):
    for what, error in zip(("logits", "loss", "gradients"), packed.distance(expected), strict=True):
        assert error <= TOLERANCE, what


@pytest.mark.parametrize("way", ["documents", "model", "mask", "padded", "equal_lengths"])
def test_a_way_trains_what_one_document_at_a_time_would(way, tmp_path):
    used, packed = step("llama", tmp_path, attention=way)
    assert used.backend == way, used.reason
    assert_exact(packed, truth("llama"))


def test_a_mask_without_the_window_fails_the_same_comparison(tmp_path, monkeypatch):
    def without_window(seq_lengths, config, dtype, *_):
        return block_diagonal_mask(torch.from_numpy(seq_lengths)[None], dtype=dtype)

    monkeypatch.setattr(block_mask, "packed_mask", without_window)
    _, packed = step("mistral", tmp_path, attention="mask", isolation_check="off")
    assert min(packed.distance(truth("mistral"))) > LEAK


def test_padded_rows_across_a_threshold_of_rope_fail_the_same_comparison(tmp_path, monkeypatch):
    model = tiny_model("phi3+longrope")
    documents = tiny_documents((34, 31, 12))  # 32 is between
    expected = one_at_a_time(model, documents)
    options = {"attention": "padded", "isolation_check": "off"}
    _, apart = packed_step(model, documents, str(tmp_path), **options)
    assert_exact(apart, expected)
    monkeypatch.setattr(trl_packing.attention.install, "rope_thresholds", lambda model: [])
    _, together = packed_step(model, documents, str(tmp_path), **options)
    assert min(together.distance(expected)) > LEAK


def test_where_no_way_is_exact_the_first_one_is_left_and_the_run_stops(tmp_path):
    run = make_trainer(tmp_path, tiny_documents(), hopeless(), max_length=80, max_steps=1)
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, document-wise SDPA"):
        run.train()
    assert run.attention.backend == "documents"
    assert run.model.config._attn_implementation == "sdpa", "as it came"


def test_where_nobody_asked_for_packing_rows_are_padded_as_in_trl(tmp_path, caplog):
    options = {"max_length": 80, "max_steps": 1, "packing": False}
    run = make_trainer(tmp_path, tiny_documents(), hopeless(), **options)
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        run.train()
    assert run.state.global_step == 1
    assert run.attention.backend == "padded"
    assert "rows are padded, as in TRL" in caplog.text


def test_evaluation_on_longer_documents_goes_on_by_a_slower_way(tmp_path):
    settings = {"max_length": 80, "max_steps": 1, "per_device_eval_batch_size": 2}
    model = tiny_model("phi3+longrope")
    documents = tiny_documents((5, 12, 20, 30))
    run = make_trainer(tmp_path, documents, model, **settings)
    run.train()
    assert run.attention.backend == "documents"
    longer = tiny_documents((10, 40, 25, 70))
    expected = one_at_a_time(run.model, longer).loss
    loss = run.evaluate(Dataset.from_list(longer))["eval_loss"]
    assert run.attention.backend == "padded"
    assert loss == pytest.approx(expected, rel=TOLERANCE)
