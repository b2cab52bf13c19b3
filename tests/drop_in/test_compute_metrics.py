"""A user's metrics, and `predict`, get the logits and labels that TRL gives them."""

import math

import pytest
import torch
from datasets import Dataset
from helpers.drop_in import PackedSFTTrainer, both_modes, documents, logged, trainer_for
from helpers.tiny import VOCAB_SIZE, documents_of_lengths, tiny_dataset, tiny_model
from trl import SFTTrainer


def _forward_alone(model, rows) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]


@both_modes
def test_compute_metrics_sees_one_padded_row_a_document(tmp_path, packing):
    rows = documents_of_lengths([5, 17, 3, 9], prompt=2)
    model = tiny_model("llama")
    alone = _forward_alone(model, rows)
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"mine": 0.5}

    if packing and PackedSFTTrainer is SFTTrainer:
        pytest.skip("TRL passes packed rows to compute_metrics")
    trainer = trainer_for(
        tmp_path,
        model=model,
        packing=packing,
        arguments={"eval_dataset": Dataset.from_list(rows), "compute_metrics": compute_metrics},
    )
    assert trainer.evaluate()["eval_mine"] == 0.5
    (prediction,) = seen
    assert prediction.predictions.shape == (4, 17, VOCAB_SIZE)
    assert prediction.label_ids.shape == (4, 17)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        # two fp32 attention kernels
        torch.testing.assert_close(
            torch.tensor(prediction.predictions[i, :length]), alone[i], atol=1e-4, rtol=1e-4
        )
        labels = prediction.label_ids[i].tolist()
        assert labels == row["labels"] + [-100] * (17 - length)


def test_batch_eval_metrics(tmp_path):
    seen = []

    def compute_metrics(prediction, compute_result):
        seen.append((prediction.predictions.shape[0], compute_result))
        return {"rows": sum(n for n, _ in seen)} if compute_result else {}

    trainer = trainer_for(
        tmp_path,
        batch_eval_metrics=True,
        per_device_eval_batch_size=2,
        arguments={"eval_dataset": tiny_dataset(rows=5), "compute_metrics": compute_metrics},
    )
    assert trainer.evaluate()["eval_rows"] == 5
    assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]


@both_modes
def test_predict_returns_logits(tmp_path, packing):
    trainer = trainer_for(tmp_path, packing=packing)
    with pytest.warns(FutureWarning, match="`return_outputs=True`"):
        output = trainer.predict(trainer.train_dataset)
    assert output.predictions.shape[-1] == VOCAB_SIZE
    assert math.isfinite(output.metrics["test_loss"])
    if not packing:
        longest = max(len(ids) for ids, _ in documents(trainer.train_dataset))
        assert output.predictions.shape[:2] == (16, longest)


@both_modes
@pytest.mark.parametrize(
    "changes",
    [{"eval_accumulation_steps": 1}, {"eval_do_concat_batches": False}, {"eval_on_start": True}],
    ids=str,
)
def test_evaluation_option_works(tmp_path, changes, packing):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        eval_steps=1,
        arguments={
            "eval_dataset": tiny_dataset(rows=9),
            "compute_metrics": lambda p: {"batches": len(p.predictions)},
        },
        **changes,
    )
    trainer.train()
    assert len(logged(trainer, "eval_batches")) == 2 + ("eval_on_start" in changes)
