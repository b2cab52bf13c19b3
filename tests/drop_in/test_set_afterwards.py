"""Attributes set on a built trainer, and overridden methods, mean the same as in TRL.

Losses are compared with those of TRL's own trainer, in float32: the same sums in another order.
"""

import pytest
import torch
from datasets import Dataset
from harness import make_trainer
from helpers.drop_in import trained_losses
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_tokenizer
from torch.utils.data import WeightedRandomSampler
from transformers import DataCollatorForSeq2Seq
from trl import SFTTrainer

from trl_packing import PackedCollator, PackedSFTTrainer

TOLERANCE = 2e-5
ROWS = documents_of_lengths([3 + (i * 7) % 27 for i in range(18)], prompt=1)


SETTINGS = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "max_length": 64}
SETTINGS |= {"learning_rate": 1e-3, "logging_steps": 1}


def trainer_of(folder, cls=PackedSFTTrainer, rows=ROWS, **options):
    options = SETTINGS | {"packing": False} | options
    return make_trainer(folder, rows, cls=cls, evaluated=Dataset.from_list(ROWS[:5]), **options)


def assert_same_losses(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


# --- data_collator and train_dataset --------------------------------------------------------------


def test_a_collator_set_afterwards_is_refused_with_what_to_pass(tmp_path):
    trainer = trainer_of(tmp_path)
    ours = trainer.data_collator
    seq2seq = DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer())
    for collator in (seq2seq, PackedCollator(pad_to_multiple_of=64)):
        trainer.data_collator = collator
        for use in (trainer.train, trainer.evaluate, trainer.get_train_dataloader):
            with pytest.raises(ValueError, match=r"on a built trainer.* train_on='assistant'"):
                use()
    trainer.data_collator = ours
    assert "cu_seq_lens_q" in next(iter(trainer.get_train_dataloader()))


@pytest.mark.parametrize("packing", [False, True])
def test_labels_given_afterwards_are_packed(tmp_path, packing):
    """As unsloth's `train_on_responses_only` gives them."""
    trainer = trainer_of(tmp_path, packing=packing)
    before = trainer.packing_report
    trainer.train_dataset = trainer.train_dataset.map(
        lambda row: {"labels": [-100] * (len(row["input_ids"]) - 1) + row["input_ids"][-1:]}
    )
    trainer.train()
    assert trainer.packing_report.bins == before.bins
    assert trainer.packing_report.trained_tokens == len(ROWS) < before.trained_tokens


@pytest.mark.parametrize("packing", [False, True])
def test_raw_rows_are_prepared(tmp_path, packing):
    trainer = trainer_of(tmp_path, packing=packing)
    trainer.train_dataset = tiny_dataset("language_modeling")
    trainer.train()
    assert "input_ids" in trainer.train_dataset.column_names
    expected = trainer_of(tmp_path, packing=packing, rows=list(tiny_dataset("language_modeling")))
    assert trainer.packing_report.tokens == expected.packing_report.tokens


def test_one_of_the_sources_set_afterwards_is_trained_alone(tmp_path):
    math, chat = Dataset.from_list(ROWS[:7]), Dataset.from_list(ROWS[7:])
    trainer = trainer_of(tmp_path, rows={"math": math, "chat": chat}, packing=True)
    assert trainer.packing_report.documents == len(ROWS)
    trainer.train_dataset = math
    trainer.train()
    assert trainer.packing_report.documents == len(math)
    assert trainer.state.log_history[-1]["train_documents"] == len(math)


# --- _get_train_sampler ---------------------------------------------------------------------------


def with_sampler(parent):
    class Sampling(parent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.weights = [1.0] * len(ROWS)  # known only now, as in many a subclass

        def _get_train_sampler(self, train_dataset=None):
            generator = torch.Generator().manual_seed(1)
            return WeightedRandomSampler(self.weights, 16, generator=generator)

    return Sampling


def test_a_sampler_of_a_subclass_says_which_documents_a_step_holds(tmp_path):
    theirs, ours = (
        trainer_of(tmp_path, with_sampler(cls), gradient_accumulation_steps=2)
        for cls in (SFTTrainer, PackedSFTTrainer)
    )
    assert_same_losses(trained_losses(ours), trained_losses(theirs))
    assert ours.packing_report.documents == 18
    assert "4 documents" in str(ours.packing_report)


def test_a_subclass_that_asks_super_for_the_sampler_keeps_the_bins(tmp_path):
    class Asking(PackedSFTTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return super()._get_train_sampler(train_dataset)

    trainer, plain = (trainer_of(tmp_path, cls, packing=True) for cls in (Asking, PackedSFTTrainer))
    assert_same_losses(trained_losses(trainer), trained_losses(plain))
    assert trainer.packing_report.bins == plain.packing_report.bins
