"""Runs with images that turn out not to be packable train exactly what TRL trains."""

import copy

import numpy as np
import pytest
import torch
from harness import TWO_RUNS
from helpers.one_step import ONE_STEP, Keep
from helpers.vision import image_dataset, tiny_processor
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision import families
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


def step_of(trainer):
    trainer.train()
    kept = next(c for c in trainer.callback_handler.callbacks if isinstance(c, Keep))
    return kept.gradients, trainer.evaluate()["eval_loss"]


def assert_trains_as_trl(ours, model, folder):
    assert isinstance(ours.data_collator, DataCollatorForVisionLanguageModeling)
    found, expected = step_of(ours), step_of(trainer_of(model, folder, SFTTrainer, SFTConfig))
    assert found[1] == pytest.approx(expected[1], rel=TWO_RUNS)
    assert found[0].keys() == expected[0].keys()
    for name, gradient in expected[0].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-4, atol=TWO_RUNS)


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


def test_a_processor_that_contradicts_its_arithmetic(model, tmp_path, contradiction):
    ours = trainer_of(model, tmp_path)
    assert ours._run_path.reason.startswith("row 0 of the train dataset has ")
    assert "by its image sizes" in ours._run_path.reason
    assert_trains_as_trl(ours, model, tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"packing": True, "max_length": 320}, {"padding_free": True}, {"documents_per_step": 4}],
)
def test_settings_that_trls_path_lacks_are_refused_by_name(options, model, tmp_path, contradiction):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.* by its image sizes.*leave"):
        trainer_of(model, tmp_path, **options)


@pytest.mark.parametrize("packs", [True, False])
def test_weights_that_trls_path_would_ignore_are_refused(
    packs, model, tmp_path, contradiction, monkeypatch
):
    if not packs:
        monkeypatch.setattr(families, "FAMILIES", ())
    dataset = image_dataset().add_column("loss_weight", [1.0] * 8)
    with pytest.raises(ValueError, match=r"has .loss_weight., but .* drop the column"):
        trainer_of(model, tmp_path, train_dataset=dataset)


def test_no_exact_backend(model, tmp_path, leak):
    ours = trainer_of(model, tmp_path)
    assert ours._run_path.reason is None
    assert ours.evaluate()["eval_loss"] > 0
    assert ours._run_path.reason.startswith("no attention backend is exact with images (")
    assert_trains_as_trl(ours, model, tmp_path)


def test_no_exact_backend_for_a_run_that_asks_for_packing(model, tmp_path, leak):
    ours = trainer_of(model, tmp_path, packing=True, max_length=320)
    with pytest.raises(ValueError, match="packing=True, but no attention backend is exact"):
        ours.train()
    named = trainer_of(model, tmp_path, attention="documents")
    with pytest.raises(RuntimeError, match="LEAK"):
        named.train()


def test_an_exact_run_stays_packed(model, tmp_path):
    ours = trainer_of(model, tmp_path)
    step_of(ours)
    assert ours._run_path.reason is None
