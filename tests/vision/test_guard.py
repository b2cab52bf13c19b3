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
from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.image_check import check_images
from trl_packing.vision.image_store import ImageStore
from trl_packing.vision.tower import hide_boundaries

NAME = "qwen2_5_vl"


def documents_of(processor):
    """Return two documents of the same text with different images."""
    made = []
    for number in range(2):
        image = noise(24, 40, number)
        text = f"<|vision_start|><|image_pad|><|vision_end|>What is this, number {number}?"
        ids = processor(images=[image], text=[text])["input_ids"][0]
        made.append({"input_ids": np.asarray(ids), "images": [[image]]})
    return made


def checked(backend, model=None, processor=None):
    processor = processor or tiny_processor(NAME)
    model = copy.deepcopy(model or tiny_vision_model(NAME, processor))
    hide_boundaries(model)
    choice = resolve_attention(model, backend, device="cpu", dtype=torch.float32)
    install_attention(model, choice)
    collator = PackedCollator(
        tensors_only=True, images=ImageBatches(ImageStore(), processor, model)
    )
    return check_images(model, documents_of(processor), collator=collator, training=True)


@pytest.mark.parametrize("backend", ["documents", "model"])
def test_images_are_isolated(backend):
    report = checked(backend)
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


def test_positions_that_run_on_are_found(monkeypatch):
    right = ImageBatches.tensors

    def running(self, documents, input_ids):
        made = right(self, documents, input_ids)
        made["position_ids"] = made["position_ids"].flip(0)  # width instead of time
        return made

    monkeypatch.setattr(ImageBatches, "tensors", running)
    assert checked("documents").verdict == "leaks"


def test_gemma3_runs_by_the_next_exact_backend(tmp_path):
    processor = tiny_processor("gemma3")
    model = tiny_vision_model("gemma3", processor)
    _, _, trainer = packed(
        model, processor, image_dataset(), tmp_path, **LAYOUTS["one micro-batch"]
    )
    assert trainer.attention.backend == "mask"
    assert "not exact with images" in trainer.attention.reason
