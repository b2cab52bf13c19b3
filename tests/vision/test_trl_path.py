"""Runs with images that turn out not to be packable are refused with the way out."""

import copy

import numpy as np
import pytest
from helpers.one_step import ONE_STEP, Keep
from helpers.vision import image_dataset, tiny_processor

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision import support
from trl_packing.vision.batch import ImageBatches

NAME = "qwen2_5_vl"


def trainer_of(
    model,
    folder,
    trainer=PackedSFTTrainer,
    config=PackedSFTConfig,
    train_dataset=None,
    **options,
):
    return trainer(
        model=copy.deepcopy(model),
        args=config(output_dir=str(folder), **ONE_STEP | {"max_length": None} | options),
        train_dataset=train_dataset or image_dataset(),
        eval_dataset=image_dataset(3),
        processing_class=tiny_processor(NAME),
        callbacks=[Keep()],
    )


@pytest.fixture
def contradiction(monkeypatch):
    """The processor adds a token to every image that is not blank."""
    # `tiny_processor` makes a class each time: patch the method that it inherits.
    real = type(tiny_processor(NAME)).__mro__[1]
    right = real.replace_image_token

    def brighter(self, image_inputs, image_idx, **kwargs):
        pixels = np.asarray(image_inputs["pixel_values"])
        more = int(pixels.std(axis=0).max() > 0.01)
        return right(self, image_inputs, image_idx, **kwargs) + "." * more

    monkeypatch.setattr(real, "replace_image_token", brighter)


@pytest.fixture
def leak(monkeypatch):
    """Rows of several documents have their images in the wrong order."""
    right = ImageBatches.tensors

    def swapped(self, documents, input_ids):
        made = right(self, documents, input_ids)
        if "pixel_values" in made and len(documents) > 1:
            made["pixel_values"] = made["pixel_values"].flip(0)
        return made

    monkeypatch.setattr(ImageBatches, "tensors", swapped)


WAY_OUT = "SFTTrainer trains rows with images padded"


def test_a_processor_that_contradicts_its_arithmetic_is_refused(model, tmp_path, contradiction):
    with pytest.raises(ValueError, match=rf"row 0 of the train .* by its image sizes.*{WAY_OUT}"):
        trainer_of(model, tmp_path)


def test_weights_that_trls_path_would_ignore_are_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(support, "FAMILIES", ())
    dataset = image_dataset().add_column("loss_weight", [1.0] * 8)
    with pytest.raises(ValueError, match=r"has .loss_weight., but .* drop the column"):
        trainer_of(model, tmp_path, train_dataset=dataset)


def test_no_exact_backend_is_refused(model, tmp_path, leak):
    for options in ({}, {"attention": "documents"}):
        with pytest.raises(RuntimeError, match=rf"LEAK.*{WAY_OUT}"):
            trainer_of(model, tmp_path, **options).train()


def test_an_exact_run_stays_packed(model, tmp_path):
    ours = trainer_of(model, tmp_path)
    ours.train()
    assert ours.packing_report is not None
