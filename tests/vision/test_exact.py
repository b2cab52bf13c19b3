"""Loss and gradients of a packed step with images equal those of its documents one at a time."""

import harness
import pytest
from helpers.vision import NAMES, image_dataset, tiny_processor, tiny_vision_model
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.vision.batch import ImageBatches


def sized(size, accumulated, **more):
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    return sizes | more


LAYOUTS = {
    "one micro-batch": sized(4, 1),
    "three of a bin": sized(1, 4),
    "padding-free": sized(4, 2, packing=False),
    "documents_per_step": sized(2, 2, documents_per_step=8),
}
_FAST = [(name, "one micro-batch") for name in ("qwen2_5_vl", "llava", "gemma3")]
_FAST += [("qwen2_5_vl", layout) for layout in LAYOUTS]
CASES = [
    pytest.param(name, layout, marks=[] if (name, layout) in _FAST else pytest.mark.slow)
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
    return harness.alone(model, batches, collate=dict)


def packed(model, processor, dataset, folder, **options):
    """Return one step of `PackedSFTTrainer`: its loss, its gradients and its trainer."""
    options = {"max_length": 320, "packing": True, "per_device_train_batch_size": 8} | options
    found = harness.run(model, dataset, folder, tokenizer=processor, **options)
    return found.losses[0], found.gradients, found.trainer


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_packed_step_equals_documents_one_at_a_time(name, layout, tmp_path):
    processor, dataset = tiny_processor(name), image_dataset()
    model = tiny_vision_model(name, processor)
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS[layout])
    assert found[2]._trl_path is None
    harness.assert_exact(found, alone(model, processor, dataset, completion_only_loss=True))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "llava"])
def test_images_in_the_wrong_order_fail_that_comparison(name, tmp_path, monkeypatch):
    processor, dataset = tiny_processor(name), image_dataset()
    model = tiny_vision_model(name, processor)
    right = ImageBatches.tensors

    def wrong(self, documents, input_ids):
        made = right(self, documents, input_ids)
        if "pixel_values" in made:
            made["pixel_values"] = made["pixel_values"].flip(0)
        return made

    monkeypatch.setattr(ImageBatches, "tensors", wrong)
    options = LAYOUTS["one micro-batch"] | {"isolation_check": "off"}
    found = packed(model, processor, dataset, tmp_path, **options)
    expected = alone(model, processor, dataset, completion_only_loss=True)
    bounds = expected.bounds_of_gradients()
    apart = [
        harness.norm([found[1][n] - g]) / bounds[n] for n, g in expected.exact.gradients.items()
    ]
    assert max(apart) > 1000


def test_conversations_train_the_same_tokens_as_trl(tmp_path):
    processor, dataset = tiny_processor("qwen2_5_vl"), image_dataset(form="messages")
    model = tiny_vision_model("qwen2_5_vl", processor)
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS["one micro-batch"])
    harness.assert_exact(found, alone(model, processor, dataset))
