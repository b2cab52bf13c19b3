"""Evaluation sets of every kind: their losses, names, prefixes, and the best model."""

import math

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict
from harness import TWO_RUNS
from helpers.drop_in import PackedSFTTrainer, both_modes, logged, packed_only, trainer_for
from helpers.tiny import (
    documents_of_lengths,
    tiny_dataset,
    tiny_dataset_dict,
    tiny_iterable,
    tiny_model,
)
from trl import SFTTrainer


def _eval_dataset(kind: str):
    one = tiny_iterable(rows=5) if "iterable" in kind else tiny_dataset(rows=5)
    two = tiny_iterable(rows=6) if "iterable" in kind else tiny_dataset(rows=6)
    if kind in ("dataset", "iterable_dataset"):
        return one
    wrap = {"dataset_dict": DatasetDict, "iterable_dataset_dict": IterableDatasetDict}.get(
        kind, dict
    )
    return wrap({"a": one, "b": two})


EVAL_KINDS = [
    "dataset",
    "iterable_dataset",
    "dataset_dict",
    "iterable_dataset_dict",
    "dict_of_dataset",
    "dict_of_iterable_dataset",
]


@both_modes
@pytest.mark.parametrize("kind", EVAL_KINDS)
def test_every_kind_of_eval_dataset(tmp_path, kind, packing):
    """At construction and passed raw to `evaluate`: the same keys and the same losses."""
    trainer = trainer_for(
        tmp_path, packing=packing, arguments={"eval_dataset": _eval_dataset(kind)}
    )
    several = "dict" in kind
    assert isinstance(trainer.eval_dataset, dict) is several
    sets = trainer.eval_dataset.values() if several else [trainer.eval_dataset]
    assert all("input_ids" in next(iter(one)) for one in sets)

    keys = ["eval_a_loss", "eval_b_loss"] if several else ["eval_loss"]
    prepared, raw = trainer.evaluate(), trainer.evaluate(_eval_dataset(kind))
    for key in keys:
        assert math.isfinite(prepared[key])
        if packing and several and PackedSFTTrainer is SFTTrainer:
            continue  # TRL packs a prepared set again
        assert raw[key] == pytest.approx(prepared[key], rel=TWO_RUNS)


@packed_only
@both_modes
@pytest.mark.parametrize("eval_packing", [True, False, None])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_eval_loss_is_the_exact_mean_over_trained_tokens(
    tmp_path, packing, eval_packing, batch_size
):
    rows = documents_of_lengths([5, 17, 3, 30, 9], prompt=2)
    model = tiny_model("llama")
    total = sum(
        model(
            input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])
        ).loss.item()
        * (len(row["input_ids"]) - 2)
        for row in rows
    )
    trainer = trainer_for(
        tmp_path,
        model=model,
        packing=packing,
        eval_packing=eval_packing,
        per_device_eval_batch_size=batch_size,
        max_length=32,
        arguments={"eval_dataset": Dataset.from_list(rows)},
    )
    exact = total / sum(len(row["input_ids"]) - 2 for row in rows)
    # fp32 sums of 54 log-probabilities in another order
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, abs=1e-5)


@both_modes
def test_evaluation_during_training_is_logged_by_name(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        eval_steps=1,
        arguments={"eval_dataset": dict(tiny_dataset_dict())},
    )
    trainer.train()
    keys = [key for entry in trainer.state.log_history for key in entry if key.endswith("_loss")]
    assert keys == ["eval_train_loss", "eval_test_loss"] * 2 + ["train_loss"]


@both_modes
@pytest.mark.parametrize("metric", ["eval_loss", "eval_mean_token_accuracy"])
def test_the_best_model_is_loaded_at_the_end(tmp_path, packing, metric):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        arguments={"eval_dataset": tiny_dataset(rows=5)},
    )
    trainer.train()
    values = logged(trainer, metric)
    best = min(values) if metric == "eval_loss" else max(values)
    assert trainer.state.best_metric == pytest.approx(best, rel=TWO_RUNS)
    assert trainer.evaluate()[metric] == pytest.approx(best, rel=TWO_RUNS)


@packed_only
def test_an_evaluation_set_may_be_called_train(tmp_path):
    """The report counts the training set, and a source is not taken for all of them."""
    rows = Dataset.from_list(documents_of_lengths([4 + i for i in range(18)]))
    few, others = rows.select(range(5)), rows.select(range(5, 18))
    for training_set in (rows, {"few": few, "others": others}):
        trainer = trainer_for(
            tmp_path, training_set, packing=True, arguments={"eval_dataset": {"train": few}}
        )
        assert len(trainer.eval_dataset["train"]) == 5
        trainer.evaluate({"train": few})
        report = trainer.packing_report
        assert (report.documents, report.preparation.before.documents) == (18, 18)
