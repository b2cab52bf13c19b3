"""`trl-packing verify` checks vision-language models with images, of data or of noise."""

import json

import pytest
from datasets import Dataset
from helpers.tiny import documents_of_lengths, tiny_model
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model

from trl_packing.cli import main
from trl_packing.tools.exactness.verify import VerifiedModel
from trl_packing.tools.exactness.with_images import ImageProbes
from trl_packing.tools.training_command import TrainerCall, TrainingCommand, config_from_settings
from trl_packing.vision.batch import ImageBatches

NAME = "qwen2_5_vl"
NO_DATA = TrainingCommand.from_words(["--model", "none"])


@pytest.fixture(scope="module")
def processor():
    return tiny_processor(NAME)


@pytest.fixture
def probes(processor, monkeypatch):
    """The model, and its probes from rows of data."""
    model = tiny_vision_model(NAME, processor)
    args = config_from_settings(["--max_length", "320"])
    call = TrainerCall(model, args, image_dataset(), processor)
    monkeypatch.setattr(TrainingCommand, "_call", lambda self, **_: call)
    words = TrainingCommand.from_words(["--model", "none", "--data", "none.jsonl"])
    return model, ImageProbes.of(model, model, args, words)


def results_of(model, probes, **options):
    verified = VerifiedModel(model, "tiny", "auto", 64)
    return list(verified.verify(images=probes, **options))


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


def test_gradients_of_tower_and_text_are_compared(probes, monkeypatch):
    model, images = probes
    result = results_of(model, images, gradients=True)[-1]
    assert result.result.gradient_difference < 1e-4
    assert "\n               gradients " in str(result)
    before = [p.grad for p in model.parameters()]
    assert before == [None] * len(before)
    right = ImageBatches.tensors

    def blended(self, documents, input_ids):
        """The control: pixels of the document before reach the next one."""
        made = right(self, documents, input_ids)
        if "pixel_values" in made and len(documents) > 1:
            made["pixel_values"] = made["pixel_values"] + 0.05 * made["pixel_values"].flip(0)
        return made

    monkeypatch.setattr(ImageBatches, "tensors", blended)
    leaking = images.check(model, "documents", gradients=True)
    assert leaking.gradient_difference > 1e-2


def test_gradients_of_a_tower_whose_buffers_the_backward_reads(monkeypatch):
    processor = tiny_processor("llava_next")
    model = tiny_vision_model("llava_next", processor)
    name = "trl_packing.tools.exactness.with_images.processing_class_of"
    monkeypatch.setattr(name, lambda *_: processor)
    probes = ImageProbes.of(
        model, "none", config_from_settings([]), TrainingCommand.from_words(["--model", "none"])
    )
    result = results_of(model, probes, gradients=True)[-1]
    assert result.images
    assert result.is_exact, str(result)
    assert result.result.gradient_difference < 1e-4


def test_probes_of_several_data_sets_are_those_with_images(processor, monkeypatch):
    model = tiny_vision_model(NAME, processor)
    lines = Dataset.from_dict({"prompt": ["a"] * 100, "completion": ["b"] * 100})
    sets = {"lines": lines, "pictures": image_dataset()}
    call = TrainerCall(model, config_from_settings(["--max_length", "320"]), sets, processor)
    monkeypatch.setattr(TrainingCommand, "_call", lambda self, **_: call)
    words = TrainingCommand.from_words(["--model", "none", "--datasets", "none.jsonl"])
    with pytest.raises(ValueError, match="TRL's own code prepares data for this tokenizer"):
        ImageProbes.of(model, model, call.args, words)
    sets["lines"] = Dataset.from_list(documents_of_lengths([4] * 100))
    probes = ImageProbes.of(model, model, call.args, words)
    assert probes.source == "of the data"
    assert [sum(map(len, document["images"])) for document in probes.documents] == [2, 1, 0]


def test_a_model_without_data_is_checked_with_noise(processor, monkeypatch):
    model = tiny_vision_model(NAME, processor)
    args = config_from_settings([])
    name = "trl_packing.tools.exactness.with_images.processing_class_of"
    monkeypatch.setattr(name, lambda *_: processor)
    probes = ImageProbes.of(model, "none", args, NO_DATA)
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
        ImageProbes.of(
            model, "none", config_from_settings([]), TrainingCommand.from_words(["--model", "none"])
        )


def test_the_command_verifies_the_demo_with_its_pictures(capsys):
    assert main(["verify", "recipes/vision.py", "--max_length", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result.get("images") for result in found["backends"]] == [None, 3]
