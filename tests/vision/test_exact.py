"""Loss and gradients of a packed step with images equal those of its documents one at a time."""

import copy

import pytest
import torch.nn.functional as F
from helpers.one_step import ONE_STEP, Keep
from helpers.vision import NAMES, image_dataset, tiny_processor, tiny_vision_model
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision.batch import ImageBatches

#: Relative, float32. A wrong image or position changes gradients by tens of percent.
TOLERANCE = 5e-6

LAYOUTS = {
    "one micro-batch": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "three of a bin": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    "padding-free": {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "packing": False,
    },
    "documents_per_step": {
        "documents_per_step": 8,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
    },
}

_FAST = {"qwen2_5_vl", "llava", "gemma3"}
_ONE = next(iter(LAYOUTS))
CASES = [
    pytest.param(
        *(name, layout),
        marks=[]
        if name in _FAST and (layout == _ONE or name == "qwen2_5_vl")
        else pytest.mark.slow,
    )
    for name in NAMES
    for layout in LAYOUTS
]

# GLM-4V's processor reads tensors in a way that NumPy deprecates (transformers 5.23).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def alone(model, processor, dataset, **collator):
    """Return loss and gradients of the mean over all trained tokens, one document at a time."""
    return trained_alone(model, batches_of(processor, dataset, **collator))


def batches_of(processor, dataset, **collator):
    """Return a batch of TRL's collator for each row."""
    collate = DataCollatorForVisionLanguageModeling(processor, **collator)
    return [collate([row]) for row in dataset]


def trained_alone(model, batches):
    """Return loss and gradients of the mean over all trained tokens of batches of a document."""
    model = copy.deepcopy(model).train()
    trained = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        labels = batch["labels"]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        losses = F.cross_entropy(logits[0, :-1].float(), labels[0, 1:], reduction="sum")
        (losses / trained).backward()
        total += float(losses.detach()) / trained
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return total, gradients


def packed(model, processor, dataset, folder, **options):
    """Return loss and gradients of one step of `PackedSFTTrainer`, and the trainer."""
    keep = Keep()
    options = {"max_length": 320, "packing": True} | ONE_STEP | options
    trainer = PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(folder), **options),
        train_dataset=dataset,
        processing_class=processor,
        callbacks=[keep],
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses[0], keep.gradients, trainer


def difference(found, expected):
    """Return the largest relative difference of gradients: of tower, projector and text apart."""
    assert found.keys() >= expected.keys()
    for name in found.keys() - expected.keys():
        assert not found[name].any(), name
    largest = 0.0
    for part in ("vis", ""):
        names = [n for n in expected if part in n]
        error = sum(float((found[n] - expected[n]).pow(2).sum()) for n in names)
        size = sum(float(expected[n].pow(2).sum()) for n in names)
        largest = max(largest, (error / size) ** 0.5)
    return largest


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_packed_step_equals_documents_one_at_a_time(name, layout, tmp_path):
    processor, dataset = tiny_processor(name), image_dataset()
    model = tiny_vision_model(name, processor)
    loss, gradients = alone(model, processor, dataset, completion_only_loss=True)
    found, packed_gradients, trainer = packed(
        model, processor, dataset, tmp_path, **LAYOUTS[layout]
    )
    assert trainer._run_path.reason is None
    assert found == pytest.approx(loss, rel=1e-5)
    assert difference(packed_gradients, gradients) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_images_in_the_wrong_order_fail_that_comparison(name, tmp_path, monkeypatch):
    processor, dataset = tiny_processor(name), image_dataset()
    model = tiny_vision_model(name, processor)
    _, gradients = alone(model, processor, dataset, completion_only_loss=True)
    right = ImageBatches.tensors

    def wrong(self, documents, input_ids):
        made = right(self, documents, input_ids)
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].flip(0)
        return made

    monkeypatch.setattr(ImageBatches, "tensors", wrong)
    options = LAYOUTS["one micro-batch"] | {"isolation_check": "off"}
    _, found, _ = packed(model, processor, dataset, tmp_path, **options)
    assert difference(found, gradients) > 1000 * TOLERANCE


def test_conversations_train_the_same_tokens_as_trl(tmp_path):
    processor, dataset = tiny_processor("qwen2_5_vl"), image_dataset(form="messages")
    model = tiny_vision_model("qwen2_5_vl", processor)
    loss, gradients = alone(model, processor, dataset)
    found, packed_gradients, _ = packed(
        model, processor, dataset, tmp_path, **LAYOUTS["one micro-batch"]
    )
    assert found == pytest.approx(loss, rel=1e-5)
    assert difference(packed_gradients, gradients) < TOLERANCE
