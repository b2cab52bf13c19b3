"""`trl-packing verify` measures models, those of vision with images of noise."""

import json

import pytest
from helpers.tiny import tiny_model
from helpers.vision import tiny_processor, tiny_vision_model

from trl_packing.cli import main
from trl_packing.tools.training_command import config_from_settings
from trl_packing.tools.verify import VerifiedModel, check_with_images, image_probes
from trl_packing.vision.batch import ImageBatches

ARGS = config_from_settings([])


def results_of(model, probes, **options):
    return list(VerifiedModel(model, "tiny", "auto", 64).verify(images=probes, **options))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava_next"])
def test_a_backend_is_exact_on_text_and_on_images(name):
    processor = tiny_processor(name)
    model = tiny_vision_model(name, processor)
    probes = image_probes(model, "none", ARGS, processor)
    sizes = {image.size for document in probes.documents for (image,) in document["images"]}
    assert sizes == {(336, 224), (112, 168)}
    text, with_images = results_of(model, probes, gradients=True)
    assert text.is_exact
    assert with_images.is_exact, str(with_images)
    assert with_images.images == with_images.to_dict()["images"] == 2
    assert str(with_images).startswith("  with images  isolated")
    assert with_images.result.gradient_difference < 1e-4
    assert [p.grad for p in model.parameters() if p.grad is not None] == []


def test_pixels_that_reach_another_document_are_seen(monkeypatch):
    """The negative control: pixels of one document at the tokens of another one, whole or mixed."""
    processor = tiny_processor("llava_next")
    model = tiny_vision_model("llava_next", processor)
    images = image_probes(model, "none", ARGS, processor)
    make = ImageBatches.tensors

    def blended(self, documents, input_ids):
        made = make(self, documents, input_ids)
        if "pixel_values" in made and len(documents) > 1:
            made["pixel_values"] = made["pixel_values"].lerp(made["pixel_values"].flip(0), share)
        return made

    assert results_of(model, images)[-1].backend == "documents"  # which is installed now
    monkeypatch.setattr(ImageBatches, "tensors", blended)
    share = 0.05
    leaking = check_with_images(model, "documents", images, gradients=True)
    assert leaking.gradient_difference > 1e-2
    share = 1.0
    assert not any(result.is_exact for result in results_of(model, images) if result.images)


def test_models_of_text_have_no_images_and_a_tokenizer_alone_is_refused():
    assert image_probes(tiny_model("llama"), "none", ARGS) is None
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor)
    with pytest.raises(ValueError, match="is no processor"):
        image_probes(model, "none", ARGS, processor.tokenizer)


def test_the_command_verifies_the_demo_with_pictures(capsys):
    assert main(["verify", "recipes/vision.py", "--max_length", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result.get("images") for result in found["backends"]] == [None, 2]
