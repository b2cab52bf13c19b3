"""A budget of tokens divides micro-batches into several forwards, and changes no loss or weight.

Tolerance, float32: sums over tokens in another order; losses of about 6, a few roundings each.
"""

import pytest
import torch
from datasets import Dataset
from harness import make_trainer
from helpers.drop_in import trained_losses
from helpers.tiny import documents_of_lengths

from trl_packing import PackedSFTTrainer

CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # losses of parts are added in another order

LENGTHS = [3 + (i * 11) % 29 for i in range(40)]
LENGTHS[7] = 60  # above the budget
BUDGET = 40
SETTINGS = {"learning_rate": 0.05, "max_steps": 5, "logging_steps": 1, "max_length": 64}
SETTINGS |= {"packing": False, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
ROWS = documents_of_lengths(LENGTHS, prompt=2, seed=0)
for row in ROWS:
    row["loss_weights"] = [token % 7 / 4 for token in row["input_ids"]]

WAYS = {
    "the documents of a padded run": {},
    "fixed steps": {"packing": True, "documents_per_step": 8},
    "bins": {"packing": True},
    "a stream": {"train_sampling_strategy": "sequential"},
    "a balance of weights": {"loss_weighting": "document"},
    "adam": {"optim": "adamw_torch", "gradient_checkpointing": True, "learning_rate": 1e-3},
    "padded rows": {"attention": "padded"},
}


def trained(folder, cls=PackedSFTTrainer, rows=ROWS, memory=1000, **settings):
    """Return the losses, parameters and tokens of each forward of a run, and its trainer.

    A forward of more tokens than `memory` fails.
    """
    settings = {"optim": "sgd", **SETTINGS, **settings}
    trainer = make_trainer(folder, rows, cls=cls, **settings)
    forwards = []

    def note(module, inputs, kwargs):
        if module.training and torch.is_grad_enabled():
            forwards.append(kwargs["input_ids"].shape[1])
            if forwards[-1] > memory:
                raise RuntimeError("CUDA out of memory. Tried to allocate")

    trainer.model.register_forward_pre_hook(note, with_kwargs=True)
    losses = trained_losses(trainer)
    return losses, dict(trainer.model.named_parameters()), forwards, trainer


@pytest.mark.parametrize("way", WAYS)
def test_a_divided_run_trains_as_the_undivided_one(way, tmp_path):
    rows = Dataset.from_list(ROWS).to_iterable_dataset() if way == "a stream" else ROWS
    whole = trained(tmp_path, rows=rows, **WAYS[way])
    parts = trained(tmp_path, rows=rows, max_tokens_per_micro_batch=BUDGET, **WAYS[way])
    for one, other in zip(whole[:2], parts[:2], strict=True):
        torch.testing.assert_close(other, one, **CLOSE)
    if way != "padded rows":
        assert max(whole[2]) > 64 or way == "bins"
        assert {*parts[2]} - {60} <= {*range(BUDGET + 1)}
        assert len(parts[2]) > len(whole[2])


def test_other_documents_fail_the_same_comparison(tmp_path):
    whole = trained(tmp_path)
    other = trained(tmp_path, max_tokens_per_micro_batch=BUDGET, data_seed=1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(other[:2], whole[:2], **CLOSE)


def test_a_batch_size_that_is_searched_lowers_the_budget_and_no_step(tmp_path):
    short = [row for row in ROWS if len(row["input_ids"]) <= BUDGET]
    for rows, settings in (
        (short, {"max_tokens_per_micro_batch": 80}),
        (short, {"max_tokens_per_micro_batch": 80, "packing": True, "documents_per_step": 8}),
        (ROWS, {"max_tokens_in_memory": 80}),  # chunks are shorter, too
    ):
        found = trained(tmp_path, rows=rows, memory=50, auto_find_batch_size=True, **settings)
        assert found[3]._train_batch_size < 4
        if "packing" not in settings:
            torch.testing.assert_close(found[:2], trained(tmp_path, rows=rows)[:2], **CLOSE)
        assert found[3].state.global_step == 5


class WithoutCount(PackedSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs)


class OwnStep(PackedSFTTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)


class OwnLoss(PackedSFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return model(input_ids=inputs["input_ids"]).logits.mean()


@pytest.mark.parametrize("cls", [WithoutCount, OwnStep, OwnLoss])
def test_losses_that_may_be_means_of_parts_are_refused(cls, tmp_path):
    with pytest.raises(
        (ValueError, RuntimeError), match=r"max_tokens_per_micro_batch.*compute_loss"
    ):
        trained(tmp_path, cls, max_tokens_per_micro_batch=BUDGET)


class Doubled(PackedSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)


def test_a_loss_that_passes_the_count_on_may_be_the_users(tmp_path):
    whole = trained(tmp_path, Doubled)
    parts = trained(tmp_path, Doubled, max_tokens_per_micro_batch=BUDGET)
    torch.testing.assert_close(parts[:2], whole[:2], **CLOSE)
    with pytest.raises(ValueError, match=r"max_tokens_in_memory=40 .* compute_loss of Doubled"):
        trained(tmp_path, Doubled, max_tokens_in_memory=BUDGET)


def test_a_loss_function_of_the_user_gets_the_tokens_of_the_step(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs["logits"][0, :-1]
        return torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum") / (
            num_items_in_batch
        )

    rows = [{"input_ids": row["input_ids"]} for row in ROWS]
    found = []
    for budget in (None, BUDGET):
        options = {"compute_loss_func": loss}
        run = trained(tmp_path, rows=rows, max_tokens_per_micro_batch=budget, arguments=options)
        found.append(run[:2])
    torch.testing.assert_close(found[1], found[0], **CLOSE)
