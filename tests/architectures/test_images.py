"""Every vision-language type packs images exactly, or takes TRL's path and says why.

`make matrix` writes the same results as a column of docs/compatibility.md.
"""

import pytest

pytest.importorskip("PIL")
pytest.importorskip("transformers", "5.23")  # processors before it have other methods

from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from architectures import image_step
from architectures.compatibility import Verdict
from architectures.image_step import judge_images
from architectures.tiny_processors import NAMES, tiny_processor
from architectures.tiny_vision import image_names, image_rows, tiny_vision_model
from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.support import FAMILIES

# GLM-4V's processor reads tensors in a way that NumPy deprecates (transformers 5.23).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

_FAST = {"llava", "qwen3_vl"}


def slow(names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_every_packed_type_is_built_here():
    assert set(FAMILIES) <= set(NAMES) <= set(image_names())


@pytest.mark.parametrize("name", [*sorted(_FAST), *slow(sorted(set(FAMILIES) - _FAST))])
def test_a_packed_type_is_exact_with_images(name):
    found = judge_images(name)
    assert found.outcome == "exact", found
    assert found.error <= found.tolerance <= 1e-3


def test_any_other_type_takes_the_path_of_trl():
    for name in {*image_names()} - {*FAMILIES}:
        found = judge_images(name)
        assert found.outcome == "trl"
        assert f"images, which are not packed for {name} models" in found.reason


def test_images_in_another_order_are_a_silent_difference(monkeypatch):
    """The negative control of the column."""
    right = ImageBatches.tensors

    def wrong(self, documents, input_ids):
        made = right(self, documents, input_ids)
        return {**made, "pixel_values": made["pixel_values"].flip(0)}

    monkeypatch.setattr(ImageBatches, "tensors", wrong)
    found = judge_images("llava", isolation_check="off")
    assert found.outcome == "differs"
    assert found.error > 100 * found.tolerance
    assert Verdict("llava", "exact", "documents", images=found).is_silent_difference


def test_a_tower_without_gradient_is_not_called_exact():
    processor = tiny_processor("llava")
    model = tiny_vision_model("llava", processor)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "vision" not in name and "projector" not in name
    with pytest.raises(RuntimeError, match="no gradient reaches a part"):
        image_step.compare_with_images(model, processor)


@pytest.mark.slow
def test_large_gemma_4_models_open_images_in_windows_only():
    """Their tokens of an image see each other in both directions in layers with a window."""
    processor = tiny_processor("gemma4")
    model = tiny_vision_model("gemma4", processor, use_bidirectional_attention="vision")
    found = image_step.compare_with_images(model, processor)
    assert (found.outcome, found.backend) == ("exact", "mask")
    assert "documents leaks by" in found.reason


def test_paligemma_takes_the_path_of_trl_which_cannot_train_its_rows():
    """Its processor refuses a completion without an image."""
    from transformers.models.paligemma.processing_paligemma import PaliGemmaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    images = SiglipImageProcessorPil(size={"height": 16, "width": 16})
    images.image_seq_length = 16
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    tokenizer = tiny_processor("llava").tokenizer
    processor = type("PaliGemmaProcessor", (PaliGemmaProcessor,), unchecked)(
        images, tokenizer, chat_template=tokenizer.chat_template
    )
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    with pytest.raises(ValueError, match="`images` are expected as arguments"):
        collate(list(image_rows().select([0, 3])))
