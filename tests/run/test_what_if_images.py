"""A plan of documents with images has the bins that the trainer fills, and names their images."""

import pytest
from helpers.prepared import call_for
from helpers.runs import documents_of, plan_page, plan_run, run_of_call
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model, vision_trainer


@pytest.fixture(scope="module")
def processor():
    return tiny_processor("qwen2_5_vl")


@pytest.fixture(scope="module")
def model(processor):
    return tiny_vision_model("qwen2_5_vl", processor)


SETTINGS = {"max_length": 200, "per_device_train_batch_size": 1}


def plan_of(model, processor, **options):
    call = call_for(image_dataset(24), None, processor, model, **SETTINGS | options)
    return plan_run(run_of_call(call))


@pytest.mark.parametrize("options", [{"max_patches": 300}, {"documents_per_step": 6}])
def test_the_planned_micro_batches_are_those_of_the_trainer(options, model, processor, tmp_path):
    plan = plan_of(model, processor, **options)
    options = SETTINGS | {"packing": True} | options
    trainer = vision_trainer(model, processor, tmp_path, image_dataset(24), **options)
    sampler = trainer._get_train_sampler(documents_of(trainer.train_dataset, None))
    assert [sorted(members) for members in plan.epoch.members] == [sorted(b) for b in sampler]
    assert plan.report.images == trainer.packing_report.images
    assert plan.report.images.most_patches <= 300 or "max_patches" not in options
    assert bool(plan.what_if) == ("max_patches" not in options)


def test_the_page_counts_images_and_shows_them_as_words(model, processor):
    plan = plan_of(model, processor, overflow="split", max_length=64)
    text = str(plan_page(plan))
    images = plan.report.images
    assert f"images, of {images.tokens:,} tokens" in text
    assert "[image, " in text
    assert "&lt;|image_pad|&gt;" not in text
