"""A user's `compute_loss` under gradient accumulation comes out as in TRL, for any model class.

Of a class that accepts `num_items_in_batch`, transformers takes the loss as it is. Of one that does
not (gemma3, Qwen-VL), the loss gets None for it and is divided by the micro-batches of the step.
"""

import pytest
from harness import make_trainer
from helpers.by_hand import assert_same_step, by_hand
from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import documents_of_lengths, tiny_model
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer

# Micro-batches of very unequal weight, so that a mean of their means is another number.
DOCUMENTS = documents_of_lengths([60, 3, 9, 44, 5, 30, 17, 4], prompt=2)


def a_number(trainer, model, inputs, num_items):
    """No tokens in it: the gradient says how often it counts."""
    return trainer.accelerator.unwrap_model(model).get_output_embeddings().weight.sum()


def the_number_of_items(trainer, model, inputs, num_items):
    return a_number(trainer, model, inputs, num_items) * (1.0 if num_items is None else 100.0)


def theirs_and_a_number(trainer, model, inputs, num_items):
    loss = super(type(trainer), trainer).compute_loss(model, inputs, num_items_in_batch=num_items)
    return 0.0 * loss + a_number(trainer, model, inputs, num_items)


def theirs(trainer, model, inputs, num_items):
    return super(type(trainer), trainer).compute_loss(model, inputs, num_items_in_batch=num_items)


def step_of(parent, loss, accepts, folder, scaled=None, **options):
    class Subclass(parent):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(self, model, inputs, num_items_in_batch)

    model = tiny_model("llama")

    class Model(type(model)):
        accepts_loss_kwargs = accepts

    Model.__name__ = type(model).__name__
    model.__class__ = Model
    kept = Keep()
    settings = ONE_STEP | {"max_length": 96, "per_device_train_batch_size": 2} | options
    settings |= {"gradient_accumulation_steps": 4, "cls": Subclass}
    trainer = make_trainer(folder, DOCUMENTS, model, callbacks=[kept], **settings)
    if scaled is not None:
        trainer.loss_is_scaled_for_ga = scaled
    trainer.train()
    return trainer.state.log_history[0]["loss"], kept.gradients


@pytest.mark.parametrize("scaled", [None, True, False])
@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("loss", [a_number, the_number_of_items, theirs_and_a_number])
def test_a_users_loss_counts_as_in_trl(loss, accepts, scaled, tmp_path):
    ours = step_of(PackedSFTTrainer, loss, accepts, tmp_path, scaled, packing=False)
    assert_same_step(ours, step_of(SFTTrainer, loss, accepts, tmp_path, scaled))


@pytest.mark.parametrize("accepts", [True, False])
def test_our_loss_in_a_users_stays_exact(accepts, tmp_path):
    ours = step_of(PackedSFTTrainer, theirs, accepts, tmp_path, packing=False)
    assert_same_step(ours, by_hand(tiny_model("llama"), DOCUMENTS))


def test_the_comparison_sees_a_mean_of_means(tmp_path):
    found = step_of(SFTTrainer, theirs, False, tmp_path)
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(tiny_model("llama"), DOCUMENTS))
