"""Loss and gradients of a packed step with images equal those of its documents one at a time.

`tests/architectures/test_images.py` compares all families in one micro-batch.
"""

import harness
import pytest
from helpers.vision import image_dataset
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling


def sized(size, accumulated, **more):
    sizes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulated}
    return sizes | more


LAYOUTS = {
    "one micro-batch": sized(4, 1),
    "three of a bin": sized(1, 4),
    "padding-free": sized(4, 2, packing=False),
    "documents_per_step": sized(2, 2, documents_per_step=8),
}


def alone(model, processor, dataset, **collator):
    """Return loss and gradients of the mean over all trained tokens, one document at a time."""
    return harness.alone(model, batches_of(processor, dataset, **collator), collate=dict)


def batches_of(processor, dataset, **collator):
    """Return a batch of TRL's collator for each row."""
    collate = DataCollatorForVisionLanguageModeling(processor, **collator)
    return [collate([row]) for row in dataset]


def packed(model, processor, dataset, folder, **options):
    """Return one step of `PackedSFTTrainer`."""
    options = {"max_length": 320, "packing": True, "per_device_train_batch_size": 8} | options
    return harness.run(model, dataset, folder, tokenizer=processor, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_step_equals_documents_one_at_a_time(layout, model, processor, tmp_path):
    dataset = image_dataset()
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS[layout])
    assert found.trainer._trl_path is None
    harness.assert_exact(found, alone(model, processor, dataset, completion_only_loss=True))


def test_conversations_train_the_same_tokens_as_trl(model, processor, tmp_path):
    dataset = image_dataset(form="messages")
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS["one micro-batch"])
    harness.assert_exact(found, alone(model, processor, dataset))


@pytest.mark.slow
def test_documents_per_step_and_weights_reach_the_loss(model, processor, tmp_path):
    dataset = image_dataset().add_column("loss_weight", [0.0] * 4 + [1.0] * 4)
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS["documents_per_step"])
    kept = image_dataset().select(range(4, 8))
    harness.assert_exact(found, alone(model, processor, kept, completion_only_loss=True))
