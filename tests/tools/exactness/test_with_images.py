"""`trl-packing verify` checks vision-language models with images, of data or of noise."""

import json

import pytest
from helpers.tiny import tiny_model
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model

from trl_packing.cli import main
from trl_packing.tools.command.settings import config_from_settings
from trl_packing.tools.command.trainer_call import TrainerCall
from trl_packing.tools.command.training_command import TrainingCommand
from trl_packing.tools.exactness.verify import VerifiedModel
from trl_packing.tools.exactness.with_images import ImageProbes
from trl_packing.vision.batch import ImageBatches

NAME = "qwen2_5_vl"


@pytest.fixture(scope="module")
def processor():
    return tiny_processor(NAME)


@pytest.fixture
def probes(processor, monkeypatch):
    """The model, and its probes from rows of data."""
    model = tiny_vision_model(NAME, processor)
    args = config_from_settings(["--max_length", "320"])
    call = TrainerCall(model, args, image_dataset(), processor)
    monkeypatch.setattr(TrainingCommand, "trainer_call", lambda self: call)
    words = ["--model", "none", "--data", "none.jsonl"]
    return model, ImageProbes.of(model, model, args, words)


def results_of(model, probes):
    verified = VerifiedModel(model, "tiny", "auto", 64)
    return list(verified.verify(images=probes))


def test_a_backend_is_exact_on_text_and_on_images_of_the_data(probes):
    model, images = probes
    in_documents = [sum(map(len, document["images"])) for document in images.documents]
    assert sorted(in_documents) == [0, 1, 2]
    text, with_images = results_of(model, images)
    assert text.is_exact
    assert with_images.is_exact
    assert with_images.images == 3
    assert str(with_images).startswith("  with images  isolated")
    assert with_images.to_dict()["images"] == 3
    assert "images" not in text.to_dict()


def test_images_in_another_order_are_seen(probes, monkeypatch):
    """The negative control: pixels of one document at the tokens of another one."""
    model, images = probes
    make = ImageBatches.tensors

    def reversed_pixels(self, documents, input_ids):
        made = make(self, documents, input_ids)
        if len(documents) > 1:
            made["pixel_values"] = made["pixel_values"].flip(0)
        return made

    monkeypatch.setattr(ImageBatches, "tensors", reversed_pixels)
    found = results_of(model, images)
    assert not any(result.is_exact for result in found if result.images)
    assert found[-1].is_exact is False


def test_a_model_without_data_is_checked_with_noise(processor, monkeypatch):
    model = tiny_vision_model(NAME, processor)
    args = config_from_settings([])
    name = "trl_packing.tools.exactness.with_images.processing_class_of"
    monkeypatch.setattr(name, lambda *_: processor)
    probes = ImageProbes.of(model, "none", args, ["--model", "none"])
    assert probes.source == "of noise"
    sizes = {image.size for document in probes.documents for (image,) in document["images"]}
    assert sizes == {(336, 224), (112, 168)}
    assert results_of(model, probes)[-1].is_exact


def test_models_of_text_have_no_images(processor):
    model = tiny_model("llama")
    assert ImageProbes.of(model, model, config_from_settings([]), ["--model", "none"]) is None


def test_a_tokenizer_alone_is_refused(processor, monkeypatch):
    model = tiny_vision_model(NAME, processor)
    name = "trl_packing.tools.exactness.with_images.processing_class_of"
    monkeypatch.setattr(name, lambda *_: processor.tokenizer)
    with pytest.raises(ValueError, match="is no processor, which images need"):
        ImageProbes.of(model, "none", config_from_settings([]), ["--model", "none"])


def test_the_command_verifies_the_demo_with_its_pictures(capsys):
    assert main(["verify", "recipes/vision.py", "--max_length", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result.get("images") for result in found["backends"]] == [None, 3]
