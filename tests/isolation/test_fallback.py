"""With every attention backend, a packed step is the same documents one at a time.

`tests/architectures/test_compatibility.py` has other models and logits, and leaks without a check.
"""

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import TWO_RUNS, alone, assert_exact, make_trainer, relative_error, run
from helpers.leaks import hopeless

from trl_packing import block_diagonal_mask

DOCUMENTS = tiny_documents()
UNCHECKED = {"isolation_check": "off"}


def assert_differs(found, expected):
    """The least that a leak moves the gradients here is a thousandth."""
    assert relative_error(found.gradients, expected[1]) > 1e-3
    with pytest.raises(AssertionError):
        assert_exact(found, expected)


@pytest.mark.parametrize("way", ["documents", "model", "mask", "padded", "equal_lengths"])
def test_a_way_trains_what_one_document_at_a_time_would(way, tmp_path):
    found = run(tiny_model("llama"), DOCUMENTS, tmp_path, attention=way)
    assert found.trainer.attention.backend == way, found.trainer.attention.reason
    assert_exact(found, alone(tiny_model("llama"), DOCUMENTS))


def test_a_mask_without_the_window_fails_the_same_comparison(tmp_path, monkeypatch):
    def without_window(seq_lengths, config, dtype, *_):
        return block_diagonal_mask(torch.from_numpy(seq_lengths)[None], dtype=dtype)

    monkeypatch.setattr("trl_packing.attention.block_mask.packed_mask", without_window)
    found = run(tiny_model("mistral"), DOCUMENTS, tmp_path, attention="mask", **UNCHECKED)
    assert_differs(found, alone(tiny_model("mistral"), DOCUMENTS))


def test_padded_rows_across_a_threshold_of_rope_fail_the_same_comparison(tmp_path, monkeypatch):
    model = tiny_model("phi3+longrope")
    documents = tiny_documents((34, 31, 12))  # 32 is between
    expected = alone(model, documents)
    assert_exact(run(model, documents, tmp_path, attention="padded", **UNCHECKED), expected)
    monkeypatch.setattr("trl_packing.attention.install.rope_thresholds", lambda model: [])
    assert_differs(run(model, documents, tmp_path, attention="padded", **UNCHECKED), expected)


def test_where_no_way_is_exact_the_first_one_is_left_and_the_run_stops(tmp_path):
    trainer = make_trainer(tmp_path, DOCUMENTS, hopeless(), max_length=80, max_steps=1)
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, document-wise SDPA"):
        trainer.train()
    assert trainer.attention.backend == "documents"
    assert trainer.model.config._attn_implementation == "sdpa", "as it came"


def test_where_nobody_asked_for_packing_rows_are_padded_as_in_trl(tmp_path, caplog):
    options = {"max_length": 80, "max_steps": 1, "packing": False}
    trainer = make_trainer(tmp_path, DOCUMENTS, hopeless(), **options)
    trainer.train()
    assert trainer.state.global_step == 1
    assert trainer.attention.backend == "padded"
    assert "rows are padded, as in TRL" in caplog.text


def test_evaluation_on_longer_documents_goes_on_by_a_slower_way(tmp_path):
    settings = {"max_length": 80, "max_steps": 1, "per_device_eval_batch_size": 2}
    model = tiny_model("phi3+longrope")
    documents = tiny_documents((5, 12, 20, 30))
    trainer = make_trainer(tmp_path, documents, model, **settings)
    trainer.train()
    assert trainer.attention.backend == "documents"
    longer = tiny_documents((10, 40, 25, 70))
    expected = alone(trainer.model, longer)[0]
    loss = trainer.evaluate(Dataset.from_list(longer))["eval_loss"]
    assert trainer.attention.backend == "padded"
    assert loss == pytest.approx(expected, rel=TWO_RUNS)
