"""A user's callbacks, optimizers, collators, subclasses and loss functions work as in TRL."""

import pytest
import torch
import transformers
from harness import TWO_RUNS
from helpers.drop_in import (
    PackedSFTTrainer,
    assert_same_run,
    both_modes,
    sgd_run,
    train_moves_all,
    trainer_for,
)
from helpers.tiny import VOCAB_SIZE, documents_of_lengths, tiny_model
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling


@both_modes
def test_optimizers_can_be_passed(tmp_path, packing):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_for(
        tmp_path, model=model, packing=packing, arguments={"optimizers": (optimizer, scheduler)}
    )
    train_moves_all(trainer)
    assert trainer.lr_scheduler is scheduler
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        arguments={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})},
    )
    train_moves_all(trainer)


def test_subclasses_can_override_compute_loss(tmp_path):
    calls = []

    class Mine(PackedSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            calls.append({*inputs})
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    train_moves_all(trainer_for(tmp_path, cls=Mine, packing=True))
    assert calls
    assert all({"input_ids", "labels"} <= keys for keys in calls)


def test_compute_loss_func_sees_the_inputs_that_trl_gives(tmp_path):
    """Logits of the whole vocabulary, labels to be shifted, the step's number of trained tokens."""

    def run(cls):
        seen = []

        def compute_loss_func(outputs, labels, num_items_in_batch=None):
            seen.append((outputs.logits.shape[-1], num_items_in_batch is not None))
            return transformers.loss.loss_utils.ForCausalLMLoss(
                outputs.logits, labels, VOCAB_SIZE, num_items_in_batch=num_items_in_batch
            )

        with pytest.warns(FutureWarning, match="compute_loss_func"):
            trainer = sgd_run(tmp_path, cls, arguments={"compute_loss_func": compute_loss_func})
        return trainer, seen

    (ours, seen), (theirs, _) = run(PackedSFTTrainer), run(SFTTrainer)
    assert {*seen} == {(VOCAB_SIZE, True)}
    assert_same_run(ours, theirs)


@both_modes
def test_a_padded_batch_can_be_scored_by_hand(tmp_path, packing):
    """Code of a user's own: TRL's padded batch, an attention mask in it, through `compute_loss`."""
    rows = documents_of_lengths([5, 9, 3], prompt=2)
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    model = tiny_model()
    with torch.no_grad():
        expected = model(**batch).loss.item()
    trainer = trainer_for(tmp_path, model=model, packing=packing)
    with torch.no_grad():
        loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        assert trainer.model(**batch).loss.item() == pytest.approx(expected, rel=TWO_RUNS)
    assert loss.item() == pytest.approx(expected, rel=TWO_RUNS)
    assert outputs.logits.shape == (3, 9, VOCAB_SIZE)


def test_an_own_collator_is_used_unchanged(tmp_path):
    seen = []

    def collate(rows):
        seen.extend(rows)
        return DataCollatorForLanguageModeling(pad_token_id=0)(rows)

    ours, theirs = (
        sgd_run(tmp_path, cls, arguments={"data_collator": collate})
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert ours.data_collator is collate
    assert all({"input_ids", "labels"} <= {*row} for row in seen)
    assert_same_run(ours, theirs)
