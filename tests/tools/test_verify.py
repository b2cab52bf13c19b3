"""`trl-packing verify` measures models, those of vision with images of data or of noise."""

import json

import pytest
from datasets import Dataset
from helpers.tiny import documents_of_lengths, tiny_model
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model

from trl_packing.cli import main
from trl_packing.tools import verify
from trl_packing.tools.training_command import TrainerCall, TrainingCommand, config_from_settings
from trl_packing.tools.verify import VerifiedModel, check_with_images, image_probes
from trl_packing.vision.batch import ImageBatches

NAME = "qwen2_5_vl"
NO_DATA = TrainingCommand.from_words(["--model", "none"])
DATA = TrainingCommand.from_words(["--model", "none", "--data", "none.jsonl"])


@pytest.fixture(scope="module")
def processor():
    return tiny_processor(NAME)


@pytest.fixture
def probes(processor, monkeypatch):
    """The model, and its probes from rows of data."""
    model = tiny_vision_model(NAME, processor)
    return model, probes_of(image_dataset(), model, processor, monkeypatch)


def probes_of(rows, model, processor, monkeypatch):
    args = config_from_settings(["--max_length", "320"])
    call = TrainerCall(model, args, rows, processor)
    monkeypatch.setattr(TrainingCommand, "call", call)
    command = TrainingCommand.from_words(DATA.words)
    return image_probes(model, model, args, command)


def results_of(model, probes, **options):
    return list(VerifiedModel(model, "tiny", "auto", 64).verify(images=probes, **options))


def test_a_backend_is_exact_on_text_and_on_images_of_the_data(probes):
    model, images = probes
    in_documents = [sum(map(len, document["images"])) for document in images.documents]
    assert sorted(in_documents) == [0, 1, 2]
    text, with_images = results_of(model, images, gradients=True)
    assert text.is_exact
    assert with_images.is_exact
    assert with_images.images == with_images.to_dict()["images"] == 3
    assert str(with_images).startswith("  with images  isolated")
    assert with_images.result.gradient_difference < 1e-4
    assert [p.grad for p in model.parameters() if p.grad is not None] == []


def test_pixels_that_reach_another_document_are_seen(probes, monkeypatch):
    """The negative control: pixels of one document at the tokens of another one, whole or mixed."""
    model, images = probes
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
    found = results_of(model, images)
    assert not any(result.is_exact for result in found if result.images)
    assert found[-1].is_exact is False


@pytest.mark.parametrize("name", [NAME, "llava_next"])
def test_a_model_without_data_is_checked_with_noise(name, monkeypatch):
    processor = tiny_processor(name)
    model = tiny_vision_model(name, processor)
    monkeypatch.setattr(verify, "processing_class_of", lambda *_: processor)
    probes = image_probes(model, "none", config_from_settings([]), NO_DATA)
    assert probes.source == "of noise"
    sizes = {image.size for document in probes.documents for (image,) in document["images"]}
    assert sizes == {(336, 224), (112, 168)}
    result = results_of(model, probes, gradients=True)[-1]
    assert result.images
    assert result.is_exact, str(result)
    assert result.result.gradient_difference < 1e-4


def test_probes_of_several_data_sets_are_those_with_images(processor, monkeypatch):
    model = tiny_vision_model(NAME, processor)
    sets = {
        "lines": Dataset.from_list(documents_of_lengths([4] * 100)),
        "pictures": image_dataset(),
    }
    probes = probes_of(sets, model, processor, monkeypatch)
    assert probes.source == "of the data"
    assert [sum(map(len, document["images"])) for document in probes.documents] == [2, 1, 0]


def test_models_of_text_have_no_images_and_a_tokenizer_alone_is_refused(processor, monkeypatch):
    args = config_from_settings([])
    assert image_probes(tiny_model("llama"), "none", args, NO_DATA) is None
    monkeypatch.setattr(verify, "processing_class_of", lambda *_: processor.tokenizer)
    with pytest.raises(ValueError, match="is no processor"):
        image_probes(tiny_vision_model(NAME, processor), "none", args, NO_DATA)


def test_the_command_verifies_the_demo_with_its_pictures(capsys):
    assert main(["verify", "recipes/vision.py", "--max_length", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result.get("images") for result in found["backends"]] == [None, 3]
