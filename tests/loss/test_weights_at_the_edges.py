"""Weights of any size train by their ratios; weights that train nothing say so.

float32 holds numbers up to 3.4e38 and, with fewer digits, down to 1.4e-45.
"""

import pytest
from datasets import Dataset, IterableDataset
from helpers.by_hand import (
    LAYOUTS,
    LOSSES,
    assert_same_step,
    by_hand,
    one_step,
    trainer_for,
)
from helpers.combinations import combined
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing import PackedCollator

LENGTHS = (9, 40, 13, 30, 5, 61)
DOCUMENTS = documents_of_lengths(LENGTHS, prompt=2)
PATTERN = (0.25, 1.0, 0.0, 2.0, 0.5)


def with_token_weights(factor=1.0, documents=DOCUMENTS):
    weights = [
        [factor * PATTERN[(i + t) % 5] for t in range(len(d["input_ids"]))]
        for i, d in enumerate(documents)
    ]
    return [d | {"loss_weights": w} for d, w in zip(documents, weights, strict=True)]


def with_document_weights(factor=1.0, documents=DOCUMENTS):
    return [d | {"loss_weight": factor * PATTERN[i % 5]} for i, d in enumerate(documents)]


WEIGHTED = {"tokens": with_token_weights, "documents": with_document_weights}
FACTORS = [1.5e38, 1e30, 1e-30, 1e-37]


@pytest.mark.parametrize(("loss", "which", "factor"), combined(LOSSES, WEIGHTED, FACTORS))
def test_a_step_goes_by_ratios_of_weights_of_any_size(loss, which, factor, tmp_path):
    options = LAYOUTS["three of a bin"] | LOSSES[loss]
    expected = by_hand(tiny_model("llama"), WEIGHTED[which](), loss)
    found = one_step(tiny_model("llama"), WEIGHTED[which](factor), tmp_path, **options)
    assert_same_step(found, expected)


def test_products_beyond_float32_are_refused():
    document = {"input_ids": [5, 6, 7], "loss_weights": [3e38] * 3, "loss_weight": 3e38}
    with pytest.raises(ValueError, match=r"loss_weights 3e\+38 times loss_weight 3e\+38 .*ratios"):
        PackedCollator()([document])


# --- weights of zero ------------------------------------------------------------------------------

ZERO = {
    "loss_weights": [d | {"loss_weights": [0.0] * len(d["input_ids"])} for d in DOCUMENTS],
    "loss_weight": [d | {"loss_weight": 0.0} for d in DOCUMENTS],
    # Only the prompts have a weight.
    "loss_weights, on prompts": [
        d | {"loss_weights": [1.0, 1.0] + [0.0] * (len(d["input_ids"]) - 2)} for d in DOCUMENTS
    ],
}


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_data_set_that_weighs_nothing_is_refused_before_training(name, is_trained, tmp_path):
    column = name.split(",")[0]
    train, evaluated = (ZERO[name], None) if is_trained else (DOCUMENTS, ZERO[name])
    evaluated = evaluated and Dataset.from_list(evaluated)
    with pytest.raises(ValueError, match=rf"{column} leave every .*remove_columns\(\['{column}'\]"):
        trainer_for(tiny_model("llama"), train, tmp_path, evaluated=evaluated).train()


def test_a_set_that_weighs_nothing_is_not_evaluated(tmp_path):
    trainer = trainer_for(tiny_model("llama"), DOCUMENTS, tmp_path)
    with pytest.raises(ValueError, match="loss_weight leave every trained token"):
        trainer.evaluate(Dataset.from_list(ZERO["loss_weight"]))


def stream(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize(("name", "loss"), combined(ZERO, LOSSES))
def test_a_step_that_weighs_nothing_is_one_without_trained_tokens(name, loss, tmp_path, caplog):
    found = one_step(tiny_model("llama"), stream(ZERO[name]), tmp_path, **LOSSES[loss])
    assert found[0] == 0.0
    assert all(not gradient.any() for gradient in found[1].values())
    assert "have a weight of 0" in caplog.text


# --- what is no weight ----------------------------------------------------------------------------

WRONG = {
    "None": {"loss_weight": None},
    "negative": {"loss_weight": -1.0},
    "beyond float32": {"loss_weight": 1e39},
    "a token's None": {"loss_weights": [None, *[1.0] * 12]},
    "a token's NaN": {"loss_weights": [float("nan")] * 13},
    "tokens beyond float32": {"loss_weights": [1e39] * 13},
}
WHOLE = {
    "loss_weight": lambda d: {"loss_weight": 1.0},
    "loss_weights": lambda d: {"loss_weights": [1.0] * len(d["input_ids"])},
}


def with_wrong(name):
    column = next(iter(WRONG[name]))
    rows = [d | WHOLE[column](d) for d in DOCUMENTS]
    rows[2] |= WRONG[name]
    return rows


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_names_the_document_whose_weight_is_none(name, packing, tmp_path):
    rows = stream(with_wrong(name))
    named = r"(document|row) 2 of the stream.* '?loss_weight|column 'loss_weights' has a "
    with pytest.raises(ValueError, match=named):
        trainer_for(tiny_model("llama"), rows, tmp_path, packing=packing).train()
