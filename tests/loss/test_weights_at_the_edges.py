"""Weights of any size train by their ratios; weights that train nothing say so.

float32 holds numbers up to 3.4e38 and, with fewer digits, down to 1.4e-45.
"""

import pytest
from harness import alone, assert_exact, make_trainer, run
from helpers.by_hand import LAYOUTS, LOSSES
from helpers.combinations import combined
from helpers.streams import stream_of
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing import PackedCollator

DOCUMENTS = documents_of_lengths((9, 40, 13, 30, 5, 61), prompt=2)
PATTERN = (0.25, 1.0, 0.0, 2.0, 0.5)


def weighted(which, factor=1.0):
    if which == "documents":
        return [d | {"loss_weight": factor * PATTERN[i % 5]} for i, d in enumerate(DOCUMENTS)]
    return [
        d | {"loss_weights": [factor * PATTERN[(i + t) % 5] for t in range(len(d["input_ids"]))]}
        for i, d in enumerate(DOCUMENTS)
    ]


SIZES = combined(["nll", "dft"], ["tokens", "documents"], [1.5e38, 1e-30, 1e-37])


@pytest.mark.parametrize(("loss", "which", "factor"), SIZES)
def test_a_step_goes_by_ratios_of_weights_of_any_size(loss, which, factor, tmp_path):
    model = tiny_model("llama")
    options = LAYOUTS["three of a bin"] | LOSSES[loss]
    found = run(model, weighted(which, factor), tmp_path, **options)
    assert_exact(found, alone(model, weighted(which), loss))


def test_products_beyond_float32_are_refused():
    document = {"input_ids": [5, 6, 7], "loss_weights": [3e38] * 3, "loss_weight": 3e38}
    with pytest.raises(ValueError, match=r"loss_weights times loss_weight .*float32"):
        PackedCollator()([document])


ZERO = {
    "loss_weight": [d | {"loss_weight": 0.0} for d in DOCUMENTS],
    # Only the prompts have a weight.
    "loss_weights": [
        d | {"loss_weights": [1.0, 1.0] + [0.0] * (len(d["input_ids"]) - 2)} for d in DOCUMENTS
    ],
}


@pytest.mark.parametrize("name", ZERO)
def test_a_step_that_weighs_nothing_is_one_without_trained_tokens(name, tmp_path, caplog):
    loss, gradients = run(tiny_model("llama"), ZERO[name], tmp_path)
    assert loss == 0.0
    assert gradients
    assert not any(gradient.any() for gradient in gradients.values())
    assert "have a weight of 0" in caplog.text


@pytest.mark.parametrize("wrong", [float("nan"), -1.0, 1e39])
@pytest.mark.parametrize("kind", [stream_of, list])
def test_a_document_whose_token_weights_are_none_is_named(wrong, kind, tmp_path):
    rows = [d | {"loss_weights": [1.0] * len(d["input_ids"])} for d in DOCUMENTS]
    rows[2]["loss_weights"] = [wrong] * 13
    named = r"document \d.*loss_weights has .* at token 0|column 'loss_weights' has a "
    with pytest.raises(ValueError, match=named):
        make_trainer(tmp_path, kind(rows), max_steps=1).train()
