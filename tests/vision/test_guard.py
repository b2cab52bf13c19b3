"""The isolation check with images: it passes what is exact and finds what is not."""

import copy

import numpy as np
import pytest
import torch
from helpers.vision import image_dataset, images_of_others, noise, tiny_vlm
from vision.test_exact import LAYOUTS, packed

from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.isolation.check import check_probes
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.batch import ImageBatches, hide_boundaries
from trl_packing.vision.images import ImageStore
from trl_packing.vision.run_images import image_probes

ONE_BATCH = LAYOUTS["one micro-batch"]


def documents_of(processor, counts):
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


def checked(backend, model, processor, counts=(1, 1)):
    model = copy.deepcopy(model)
    hide_boundaries(model)
    choice = resolve_attention(model, backend, device="cpu", dtype=torch.float32)
    install_attention(model, choice)
    images = ImageBatches(ImageStore(), processor, model)
    probes = image_probes(documents_of(processor, counts))
    collator = PackedCollator(tensors_only=True, images=images)
    return check_probes(model, probes, collator=collator, training=True)


@pytest.mark.parametrize("counts", [(1, 1), (2, 1, 0)], ids=["one image", "two, one and none"])
@pytest.mark.parametrize("backend", ["documents", "model"])
def test_images_are_isolated(backend, counts, model, processor):
    report = checked(backend, model, processor, counts)
    assert report.verdict == "isolated", str(report)
    assert report.leak > 100 * report.noise


def test_positions_without_text_leak_through_the_models_mask(monkeypatch, model, processor):
    right = ImageBatches.tensors

    def without_text(self, documents, input_ids):
        made = right(self, documents, input_ids)
        return {**made, "position_ids": made["position_ids"][1:]}

    monkeypatch.setattr(ImageBatches, "tensors", without_text)
    assert checked("model", model, processor).verdict == "leaks"
    assert checked("documents", model, processor)  # its boundaries come from elsewhere


@pytest.mark.parametrize("check", ["error", "off"])
def test_gemma3_runs_by_the_next_exact_backend_and_needs_the_check(check, tmp_path):
    """The backend of text is off by tens of percent with its images."""
    given = (*tiny_vlm("gemma3"), image_dataset(), tmp_path)
    options = {"isolation_check": check}
    if check == "off":
        with pytest.raises(ValueError, match="isolation_check='off' with images on gemma3"):
            packed(*given, **ONE_BATCH, **options)
        return
    attention = packed(*given, **ONE_BATCH, **options).trainer.attention
    assert attention.backend == "mask"
    assert all(words in attention.reason for words in ("differs by", "with images"))


def test_a_tower_that_mixes_the_images_of_a_row_is_found():
    """The image of the document before changes those after it, although no token sees another."""
    model, processor = tiny_vlm()
    assert checked("documents", model, processor)
    projector = model.model.multi_modal_projector
    projector.register_forward_hook(lambda _, args, output: output + output.mean(0, keepdim=True))
    assert checked("documents", model, processor).verdict == "leaks"


@pytest.mark.parametrize("options", [{}, {"attention": "documents"}])
def test_no_exact_backend_is_refused(trainer_of, options):
    said = r"LEAK.*SFTTrainer trains rows with images padded"
    with images_of_others(), pytest.raises(RuntimeError, match=said):
        trainer_of(**options).train()


PROBED = [((1, 2, 0, 1), [2, 1, 0]), ((1, 1, 1, 1), [1, 1]), ((0, 0), [])]


@pytest.mark.parametrize(("images", "expected"), PROBED)
def test_the_guard_probes_every_number_of_images_that_the_run_has(images, expected, trainer_of):
    rows = image_dataset().select([{1: 0, 2: 1, 0: 2}[count] for count in images])
    trainer = trainer_of(rows)
    trainer._guard.sample(trainer.train_dataset, 320)
    probes = trainer._guard._with_images
    assert [sum(map(len, probe["images"])) for probe in probes] == expected
