"""A blank image makes a rank call the tower, and changes neither the loss nor any gradient."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures import tiny_processors, tiny_vision
from harness import TWO_RUNS
from helpers.combinations import fast
from helpers.vision import noise, tiny_vlm

from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.documents.host_row import for_kernels
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.batch import (
    ImageBatches,
    StillTower,
    blank_document,
    hide_boundaries,
    parameters_of_images,
    ranks_wait_for_tower,
)
from trl_packing.vision.images import ImageStore
from trl_packing.vision.support import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")

TEXTS = [{"input_ids": np.arange(20, 45)}, {"input_ids": np.arange(50, 62)}]


def collator(model, processor, *, fills_rows):
    images = ImageBatches(ImageStore(), processor, model, fills_rows=fills_rows)
    return PackedCollator(tensors_only=True, images=images)


def step(model, batch):
    model.zero_grad()
    batch = for_kernels(batch)
    labels = batch.pop("labels")
    logits = model(**batch).logits
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:])
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("name", fast(FAMILIES, {"qwen2_5_vl", "llava_next"}))
def test_rows_without_images_train_the_same_and_give_the_tower_zeros(name):
    processor = tiny_processors.tiny_processor(name)
    model = tiny_vision.tiny_vision_model(name, processor)
    hide_boundaries(model)
    install_attention(model, resolve_attention(model, "mask", device="cpu", dtype=torch.float32))
    ids = processor.tokenizer("Question Answer what is this And short Yes ?")["input_ids"]
    documents = [{"input_ids": np.resize(ids, 25)}, {"input_ids": np.resize(ids[::-1], 12)}]
    loss, plain = step(model, collator(model, processor, fills_rows=False)(documents))
    collate = collator(model, processor, fills_rows=True)
    found, filled = step(model, collate(documents))
    assert found == pytest.approx(loss, rel=TWO_RUNS)
    of_images = {id(p) for p in parameters_of_images(model)}
    seen = {name for name in filled if filled[name] is not None and plain[name] is None}
    assert seen
    for name, parameter in model.named_parameters():
        if name in seen:
            assert id(parameter) in of_images, name
            assert not filled[name].any(), name
        elif plain[name] is not None:
            assert id(parameter) not in of_images, name
            torch.testing.assert_close(filled[name], plain[name], rtol=1e-4, atol=TWO_RUNS)
    _, trained = step(model, collate([blank_document(processor), *documents]))
    assert seen == {name for name in trained if trained[name] is not None and plain[name] is None}


def test_the_blank_image_is_padding_of_its_row(model, processor):
    blank = blank_document(processor)["input_ids"]
    assert len(blank) == 16
    collate = collator(model, processor, fills_rows=True)
    collate.pad_to_multiple_of = 8
    batch = collate(TEXTS)
    end = sum(len(d["input_ids"]) for d in TEXTS)
    assert batch["input_ids"][0, end : end + 16].tolist() == blank.tolist()
    assert (batch["labels"][0, end:] == -100).all()
    assert batch["input_ids"].shape[1] % 8 == 0
    assert (batch.host.lengths.tolist(), batch.host.num_images) == ([25, 12], 0)
    assert collate([])["input_ids"][0, :16].tolist() == blank.tolist()
    image = {"input_ids": blank, "images": [[noise(32, 32, 0)]]}
    host = collate([image, TEXTS[0]]).host
    assert (host.num_images, host.padding) == (1, 7), "no blank image"


def test_a_step_without_images_leaves_the_tower_without_gradients():
    model, processor = tiny_vlm()
    collate = collator(model, processor, fills_rows=True)
    with_image = collate([blank_document(processor), *TEXTS])
    still = StillTower()
    for batches, sees_images in (([collate(TEXTS)] * 2, False), ([collate(TEXTS), with_image], 1)):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        still.measure(batches)
        still.on_pre_optimizer_step(None, None, None, model=model)
        kept = {n.split(".")[1] for n, p in model.named_parameters() if p.grad is not None}
        assert ("vision_tower" in kept) == bool(sees_images)
        assert "language_model" in kept


WAITING = [
    (1, True, None, False),
    (2, False, True, False),
    (2, False, False, True),
    (2, True, True, True),
]


@pytest.mark.parametrize(("world_size", "sharded", "find_unused", "expected"), WAITING)
def test_ranks_wait_where_all_of_them_gather_or_reduce(world_size, sharded, find_unused, expected):
    args = SimpleNamespace(world_size=world_size, ddp_find_unused_parameters=find_unused)
    trainer = SimpleNamespace(args=args, is_deepspeed_enabled=False, is_fsdp_enabled=sharded)
    trainer.aux_loss_enabled = False
    assert ranks_wait_for_tower(trainer) == expected
    trainer.aux_loss_enabled = True
    with pytest.raises(ValueError, match="router_aux") if expected else nullcontext():
        ranks_wait_for_tower(trainer)
