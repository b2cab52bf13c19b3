"""Every vision-language type packs images exactly, or takes TRL's path and says why.

`make matrix` writes the same results as a column of docs/compatibility.md.
"""

import pytest

pytest.importorskip("PIL")
pytest.importorskip("transformers", "5.23")  # processors before it have other methods


from helpers.combinations import fast
from helpers.vision import FAMILIES, images_of_others

from architectures import image_step
from architectures.compatibility import Verdict
from architectures.image_step import judge_images
from architectures.tiny_processors import tiny_processor
from architectures.tiny_vision import image_names, tiny_vision_model

# GLM-4V's processor reads tensors in a way that NumPy deprecates (transformers 5.23).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("name", fast(FAMILIES, {"llava", "qwen3_vl"}))
def test_a_packed_type_is_exact_with_images(name):
    found = judge_images(name)
    assert found.outcome == "exact", found
    assert found.error <= found.tolerance <= 1e-3


def test_any_other_type_takes_the_path_of_trl():
    for name in {*image_names()} - {*FAMILIES}:
        found = judge_images(name)
        assert found.outcome == "trl"
        assert f"images, which are not packed for {name} models" in found.reason


def test_images_in_another_order_are_a_silent_difference():
    """The negative control of the column."""
    with images_of_others():
        found = judge_images("llava", isolation_check="off")
    assert found.outcome == "differs"
    assert found.error > 100 * found.tolerance
    assert Verdict("llava", "exact", "documents", images=found).is_silent_difference


@pytest.mark.slow
def test_large_gemma_4_models_open_images_in_windows_only():
    """Their tokens of an image see each other in both directions in layers with a window."""
    processor = tiny_processor("gemma4")
    model = tiny_vision_model("gemma4", processor, use_bidirectional_attention="vision")
    found = image_step.compare_with_images(model, processor)
    assert (found.outcome, found.backend) == ("exact", "mask")
    assert "documents differs by" in found.reason
