"""A curriculum on documents with images: in order, each once, within the patches of a bin."""

import copy
import shutil

import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from harness import assert_exact
from helpers.one_step import ONE_STEP
from helpers.vision import image_dataset
from vision.test_exact import LAYOUTS, alone, packed

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.training.columns import documents_of

CAPACITY = 320
ROWS = 48  # four times the same 12


def trainer_of(model, processor, folder, **options):
    rows = concatenate_datasets([image_dataset(ROWS // 4)] * 4)
    rows = rows.add_column("hardness", np.random.default_rng(0).random(ROWS))
    settings = {"max_length": CAPACITY, "packing": True, "per_device_train_batch_size": 1}
    return PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(folder), **ONE_STEP | settings | options),
        train_dataset=rows,
        processing_class=processor,
    )


def test_a_step_equals_its_documents_one_at_a_time(model, processor, tmp_path):
    options = LAYOUTS["three of a bin"] | {"curriculum": "length"}
    found = packed(model, processor, image_dataset(), tmp_path, **options)
    assert found[2]._trl_path is None
    assert_exact(found, alone(model, processor, image_dataset(), completion_only_loss=True))


@pytest.mark.parametrize(
    ("curriculum", "layout"), [("length", "bins"), ("hardness", "bins"), ("length", "documents")]
)
def test_documents_with_images_come_in_order(curriculum, layout, model, processor, tmp_path):
    options = {"documents_per_step": 4} if layout == "documents" else {"max_patches": 400}
    trainer = trainer_of(model, processor, tmp_path, curriculum=curriculum, **options)
    documents = documents_of(trainer.train_dataset, None)
    sampler = trainer._sampling.for_training(documents)
    batches = sampler.micro_batches()
    assert sorted(np.concatenate(batches)) == [*range(ROWS)]
    lengths = documents.lengths()  # with the tokens of images
    numbers = lengths if curriculum == "length" else np.array(trainer.train_dataset["hardness"])
    halves = np.array_split(np.concatenate(batches), 2)
    first, second = (numbers[half].mean() for half in halves)
    assert second - first > 0.8 * numbers.std()
    patches = sampler.loads.patches
    assert patches.sum()
    if layout == "bins":
        assert max(lengths[batch].sum() for batch in batches) <= CAPACITY
        assert max(patches[batch].sum() for batch in batches) <= 400


@pytest.mark.slow
def test_a_curriculum_with_images_resumes_to_the_bit(model, processor, tmp_path):
    options = {
        "curriculum": "length",
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
    }
    whole = trainer_of(model, processor, tmp_path / "whole", **options)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "rest" / "checkpoint-2")
    rest = trainer_of(model, processor, tmp_path / "rest", **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "rest" / "checkpoint-2"))
    expected = dict(whole.model.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in rest.model.named_parameters())
