"""Images train as in TRL, packed or on TRL's path; text trains a vision model."""

import pytest
from helpers.drop_in import PackedSFTTrainer, assert_same_run, trainer_for
from helpers.tiny import tiny_dataset
from helpers.vision import tiny_vlm
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.vision import support


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "TRL's path"])
def test_images_train_as_in_trl(tmp_path, monkeypatch, is_packed):
    pytest.importorskip("PIL")
    if is_packed:
        pytest.importorskip("transformers", "5.23")  # older ones take TRL's path
    else:
        monkeypatch.setattr(support, "FAMILIES", ())

    def run(cls):
        model, processor = tiny_vlm("llava")
        options = {"per_device_train_batch_size": 3, "max_length": None, "optim": "sgd"}
        options |= {"gradient_checkpointing": False, "train_sampling_strategy": "sequential"}
        arguments = {"eval_dataset": tiny_dataset("images", 3)}
        options |= {"model": model, "processing_class": processor, "arguments": arguments}
        trainer = trainer_for(tmp_path, tiny_dataset("images", 6), cls=cls, **options)
        trainer.train()
        return trainer

    ours, theirs = run(PackedSFTTrainer), run(SFTTrainer)
    assert isinstance(ours.data_collator, DataCollatorForVisionLanguageModeling) != is_packed
    assert isinstance(theirs.data_collator, DataCollatorForVisionLanguageModeling)
    assert_same_run(ours, theirs)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)
