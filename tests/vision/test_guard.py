"""The isolation check with images: it passes what is exact and finds what is not."""

import copy

import numpy as np
import pytest
import torch
from helpers.vision import image_dataset, noise, tiny_processor, tiny_vision_model
from vision.test_exact import LAYOUTS, packed

from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.batch import ImageBatches, hide_boundaries
from trl_packing.vision.guard import check_images
from trl_packing.vision.images import ImageStore

NAME = "qwen2_5_vl"


def documents_of(processor, counts=(1, 1)):
    """Return documents of about the same text with different images, as many as `counts` says."""
    made = []
    for number, count in enumerate(counts):
        images = [noise(24, 40, number + 10 * at) for at in range(count)]
        wraps = "vision_start" in processor.chat_template
        image = "<|vision_start|><|image_pad|><|vision_end|>" if wraps else processor.image_token
        text = f"{image * count}What is this, number {number}?"
        ids = processor(images=images or None, text=[text])["input_ids"][0]
        made.append({"input_ids": np.asarray(ids), "images": [images] if images else []})
    return made


def checked(backend, model=None, processor=None, counts=(1, 1)):
    processor = processor or tiny_processor(NAME)
    model = copy.deepcopy(model or tiny_vision_model(NAME, processor))
    hide_boundaries(model)
    choice = resolve_attention(model, backend, device="cpu", dtype=torch.float32)
    install_attention(model, choice)
    collator = PackedCollator(
        tensors_only=True, images=ImageBatches(ImageStore(), processor, model)
    )
    documents = documents_of(processor, counts)
    return check_images(model, documents, collator=collator, training=True)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1, 0)], ids=["one image", "two, one and none"])
@pytest.mark.parametrize("backend", ["documents", "model"])
def test_images_are_isolated(backend, counts):
    report = checked(backend, counts=counts)
    assert report.verdict == "isolated", str(report)
    assert report.leak > 100 * report.noise


def test_positions_without_the_row_of_text_leak_through_the_models_mask(monkeypatch):
    right = ImageBatches.tensors

    def without_text(self, documents, input_ids):
        made = right(self, documents, input_ids)
        return {**made, "position_ids": made["position_ids"][1:]}

    monkeypatch.setattr(ImageBatches, "tensors", without_text)
    assert checked("model").verdict == "leaks"
    assert checked("documents").verdict == "isolated"  # its boundaries come from elsewhere


@pytest.mark.parametrize("check", ["error", "off"])
def test_gemma3_runs_by_the_next_exact_backend_or_not_without_the_check_that_finds_it(
    check, tmp_path
):
    """The backend of text is off by tens of percent with its images."""
    processor = tiny_processor("gemma3")
    options = {**LAYOUTS["one micro-batch"], "isolation_check": check}
    given = (tiny_vision_model("gemma3", processor), processor, image_dataset(), tmp_path)
    if check == "off":
        with pytest.raises(ValueError, match="isolation_check='off' with images on gemma3"):
            packed(*given, **options)
        return
    attention = packed(*given, **options)[2].attention
    assert attention.backend == "mask"
    assert all(words in attention.reason for words in ("leaks by", "with images"))


def test_a_tower_that_mixes_the_images_of_a_row_is_found():
    """The image of the document before changes those after it, although no token sees another."""
    processor = tiny_processor("llava")
    model = tiny_vision_model("llava", processor)
    assert checked("documents", model, processor).verdict == "isolated"
    projector = model.model.multi_modal_projector
    projector.register_forward_hook(lambda _, args, output: output + output.mean(0, keepdim=True))
    assert checked("documents", model, processor).verdict == "leaks"


@pytest.mark.parametrize(
    ("images", "expected"), [((1, 2, 0, 1), [2, 1, 0]), ((1, 1, 1, 1), [1, 1]), ((0, 0), [])]
)
def test_the_guard_probes_every_number_of_images_that_the_run_has(images, expected, tmp_path):
    processor = tiny_processor("llava")
    model = tiny_vision_model("llava", processor)
    rows = image_dataset().select([{1: 0, 2: 1, 0: 2}[count] for count in images])
    _, _, trainer = packed(model, processor, rows, tmp_path, **LAYOUTS["one micro-batch"])
    probes = trainer._guard._with_images
    assert [sum(map(len, probe["images"])) for probe in probes] == expected
