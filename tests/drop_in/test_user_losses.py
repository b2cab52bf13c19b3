"""A user's `compute_loss` under gradient accumulation comes out as in TRL, for any model class.

Of a class that accepts `num_items_in_batch`, transformers takes the loss as it is. Of one that does
not (gemma3, Qwen-VL), the loss gets None for it and is divided by the micro-batches of the step.
With packing=False, a micro-batch holds the documents of a padded run's micro-batch.
"""

from itertools import chain

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from harness import make_trainer
from helpers.by_hand import assert_same_step, by_hand
from helpers.drop_in import assert_same_run, sgd_run
from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import documents_of_lengths, tiny_model
from torch.utils.data import BatchSampler
from trl import SFTTrainer

from trl_packing import PackedBatchSampler, PackedSFTTrainer

# Micro-batches of very unequal weight, so that a mean of their means is another number.
DOCUMENTS = documents_of_lengths([60, 3, 9, 44, 5, 30, 17, 4], prompt=2)


def a_number(trainer, model, inputs, num_items):
    """No tokens in it: the gradient says how often it counts."""
    return trainer.accelerator.unwrap_model(model).get_output_embeddings().weight.sum()


def the_number_of_items(trainer, model, inputs, num_items):
    return a_number(trainer, model, inputs, num_items) * (1.0 if num_items is None else 100.0)


def theirs(trainer, model, inputs, num_items):
    return super(type(trainer), trainer).compute_loss(model, inputs, num_items_in_batch=num_items)


def theirs_and_a_number(*inputs):
    return 0.0 * theirs(*inputs) + a_number(*inputs)


def with_loss(parent, loss):
    class Subclass(parent):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return loss(self, model, inputs, num_items_in_batch)

    return Subclass


def step_of(parent, loss, accepts, folder, scaled=None, **options):
    model = tiny_model("llama")
    kept = Keep()
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"accepts_loss_kwargs": accepts})
    settings = ONE_STEP | {"max_length": 96, "per_device_train_batch_size": 2} | options
    settings |= {"gradient_accumulation_steps": 4, "cls": with_loss(parent, loss)}
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


def test_our_loss_in_a_users_stays_exact(tmp_path):
    expected = by_hand(tiny_model("llama"), DOCUMENTS)
    for accepts in (True, False):
        step = step_of(PackedSFTTrainer, theirs, accepts, tmp_path, packing=False)
        assert_same_step(step, expected)
    with pytest.raises(AssertionError):  # the control: TRL's is a mean of means
        assert_same_step(step_of(SFTTrainer, theirs, False, tmp_path), expected)


def mean_of_micro_batch(trainer, model, inputs, num_items):
    return model(**inputs).loss


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_a_loss_that_is_the_mean_of_its_micro_batch_trains_as_in_trl(tmp_path, strategy):
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    ours, trls = (
        sgd_run(
            tmp_path,
            with_loss(cls, mean_of_micro_batch),
            train_sampling_strategy=strategy,
            **settings,
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, trls, ("loss", "grad_norm"))


@pytest.mark.parametrize("number", [24, 31])
@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_take_turns_on_the_batches_of_a_padded_run(number, ranks):
    lengths = np.random.default_rng(number).integers(1, 50, number)
    options = {"documents_per_step": 4 * ranks * 2, "accumulation": 2, "num_ranks": ranks}
    batches = BatchSampler(range(number), batch_size=4, drop_last=False)
    found = []
    for rank in range(ranks):
        ours, by_cost = (
            list(
                PackedBatchSampler(lengths, rank=rank, shuffle=False, divide_by_cost=by, **options)
            )
            for by in (False, True)
        )
        padded = list(BatchSamplerShard(batches, ranks, rank, even_batches=False))
        whole = number // (4 * ranks)  # in the last round, transformers repeats documents
        assert ours[:whole] == padded[:whole] != by_cost[:whole]
        assert len(ours) == -(-number // (4 * ranks))
        assert all(ours)
        found += chain(*ours)
    assert sorted(found) == list(range(number))
