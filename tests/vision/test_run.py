"""Runs on data sets with images: evaluation, workers, TRL's path, orders."""

import numpy as np
import pytest
import torch
import transformers
from datasets import Dataset
from harness import TWO_RUNS
from helpers.combinations import fast
from helpers.vision import image_dataset, pack_no_images
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision.test_exact import LAYOUTS, alone, packed

from trl_packing import PackedSFTConfig


@pytest.mark.slow
def test_evaluation_loss_is_that_of_the_documents_alone(model, processor, trainer_of):
    evaluated = image_dataset(6)
    trainer = trainer_of(eval_dataset=evaluated)
    loss, _ = alone(model, processor, evaluated, completion_only_loss=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=TWO_RUNS)


def test_logits_of_padded_rows_are_refused_in_a_packed_run(trainer_of):
    trainer = trainer_of(eval_dataset=image_dataset(6))
    with pytest.raises(ValueError, match=r"prediction_loss_only=True.*SFTTrainer"):
        trainer.predict(image_dataset(6))
    trainer.compute_metrics = dict
    with pytest.raises(ValueError, match=r"compute_metrics and predict\(\)"):
        trainer.evaluate()


@pytest.mark.slow
def test_a_stream_of_texts_is_evaluated_beside_images(processor, trainer_of):
    ids = processor.tokenizer("a color and another color")["input_ids"]
    texts = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 3)
    streamed, loaded = (
        trainer_of(eval_dataset=rows).evaluate()["eval_loss"]
        for rows in (texts.to_iterable_dataset(), texts)
    )
    assert streamed == pytest.approx(loaded)


@pytest.mark.slow
def test_workers_change_nothing(model, processor, tmp_path):
    found = [
        packed(model, processor, image_dataset(), tmp_path, **LAYOUTS["three of a bin"], **workers)
        for workers in ({}, {"dataloader_num_workers": 2, "dataloader_persistent_workers": False})
    ]
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[1][1][name], value) for name, value in found[0][1].items())


# --- TRL's path -----------------------------------------------------------------------------------

TRLS = {
    "stream": {"dataset": lambda: image_dataset().to_iterable_dataset()},
    "stream with images": {"eval_dataset": lambda: image_dataset().to_iterable_dataset()},
    "wrapped": {"packing_strategy": lambda: "wrapped"},
    "tools": {"dataset": lambda: image_dataset().add_column("tools", [None] * 8)},
    "skip_prepare_dataset": {"dataset_kwargs": lambda: {"skip_prepare_dataset": True}},
    "compute_metrics needs the logits": {"compute_metrics": lambda: dict},
}


@pytest.mark.parametrize("reason", fast(TRLS, {"compute_metrics needs the logits"}))
def test_runs_that_only_trl_can_serve_take_its_path(reason, trainer_of):
    changes = {name: make() for name, make in TRLS[reason].items()}
    trainer = trainer_of(**{"packing": PackedSFTConfig.packing} | changes)
    assert reason in trainer._trl_path
    assert isinstance(trainer.data_collator, DataCollatorForVisionLanguageModeling)


def test_what_trls_path_would_ignore_is_refused(trainer_of, monkeypatch):
    with pytest.raises(ValueError, match=r"max_patches=8 does nothing on TRL's path.*stream"):
        trainer_of(image_dataset().to_iterable_dataset(), max_patches=8)
    with pytest.raises(ValueError, match="sequence_parallel_size=2 cannot divide rows with images"):
        trainer_of(sequence_parallel_size=2)
    pack_no_images(monkeypatch)
    dataset = image_dataset().add_column("loss_weight", [1.0] * 8)
    with pytest.raises(ValueError, match="loss_weight does nothing on TRL's path"):
        trainer_of(dataset, packing=False)


def test_images_take_trls_path_with_an_older_transformers(trainer_of, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.22.4")
    reason = trainer_of(packing=PackedSFTConfig.packing)._trl_path
    assert reason == "the data set has images, and transformers 5.22.4 is older than 5.23"


def test_a_processor_that_contradicts_its_arithmetic_is_refused(processor, trainer_of, monkeypatch):
    """It adds a token to every image that is not blank."""
    # `tiny_processor` makes a class each time: patch the method that it inherits.
    real = type(processor).__mro__[1]
    right = real.replace_image_token

    def brighter(self, image_inputs, image_idx, **kwargs):
        pixels = np.asarray(image_inputs["pixel_values"])
        more = int(pixels.std(axis=0).max() > 0.01)
        return right(self, image_inputs, image_idx, **kwargs) + "." * more

    monkeypatch.setattr(real, "replace_image_token", brighter)
    with pytest.raises(ValueError, match=r"row 0 of the train .* by its image sizes.*SFTTrainer"):
        trainer_of()
