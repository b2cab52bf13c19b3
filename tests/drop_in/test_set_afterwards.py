"""Attributes set on a built trainer, and overridden methods, mean the same as in TRL.

Losses are compared with those of TRL's own trainer, in float32: the same sums in another order.
"""

from functools import partial

import pytest
import torch
from datasets import Dataset
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_model, tiny_tokenizer
from torch.utils.data import RandomSampler, SequentialSampler, WeightedRandomSampler
from transformers import DataCollatorForSeq2Seq
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.training.user_collator import calls

TOLERANCE = 2e-5
ROWS = documents_of_lengths([3 + (i * 7) % 27 for i in range(18)], prompt=1)


def config(folder, cls=SFTConfig, **options):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "max_length": 64,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
    }
    return cls(**(settings | options))


def trainer_of(folder, cls=PackedSFTTrainer, rows=ROWS, **options):
    return cls(
        tiny_model(),
        config(folder, PackedSFTConfig, **({"packing": False} | options)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:5]),
        processing_class=tiny_tokenizer(),
    )


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def assert_same_losses(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> list[float]:
    return losses(trainer_of(tmp_path_factory.mktemp("padded"), SFTTrainer))


# --- data_collator --------------------------------------------------------------------------------


class Marking:
    """A collator that wraps another one, as users write them."""

    def __init__(self, inner):
        self.inner = inner
        self.kinds = set()

    def __call__(self, features):
        self.kinds |= {type(feature["input_ids"]) for feature in features}
        batch = self.inner(features)
        batch["marked"] = torch.ones(1)
        return batch


class Wrapping(PackedSFTTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.data_collator = Marking(self.data_collator)

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert inputs.pop("marked") == 1
        return super().compute_loss(model, inputs, *args, **kwargs)


OWN_COLLATORS = {
    "Seq2Seq": lambda: DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer()),
    "TRL's": lambda: DataCollatorForLanguageModeling(pad_token_id=0),
    "a function": lambda: lambda rows: DataCollatorForLanguageModeling(pad_token_id=0)(rows),
}


@pytest.mark.parametrize("name", OWN_COLLATORS)
def test_a_collator_set_afterwards_trains_padded_rows_as_in_trl(tmp_path, padded, name):
    trainer = trainer_of(tmp_path)
    trainer.data_collator = collator = OWN_COLLATORS[name]()
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 4
    assert_same_losses(losses(trainer), padded)
    assert trainer.data_collator is collator


def test_a_collator_set_afterwards_evaluates_as_in_trl(tmp_path):
    evaluated = []
    for cls in (SFTTrainer, PackedSFTTrainer):
        trainer = trainer_of(tmp_path, cls, per_device_eval_batch_size=2)
        trainer.data_collator = DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer())
        evaluated.append(trainer.evaluate())
    assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"], abs=TOLERANCE)
    assert evaluated[0]["eval_entropy"] == pytest.approx(evaluated[1]["eval_entropy"], abs=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_labels_given_afterwards_are_trained(tmp_path, packing):
    """As unsloth's `train_on_responses_only` does: other labels, and a collator that pads."""

    def responses_only(rows):
        return {"labels": [[-100] * 2 + ids[2:] for ids in rows["input_ids"]]}

    found = []
    for cls in (SFTTrainer, PackedSFTTrainer):
        trainer = trainer_of(tmp_path, cls, packing=packing and cls is PackedSFTTrainer)
        trainer.train_dataset = trainer.train_dataset.map(responses_only, batched=True)
        trainer.data_collator = DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer())
        found.append(losses(trainer))
    assert_same_losses(found[1], found[0])


def test_labels_given_afterwards_are_packed_where_the_collator_is_left(tmp_path):
    trainer = trainer_of(tmp_path, packing=True)
    before = trainer.packing_report
    trainer.train_dataset = trainer.train_dataset.map(
        lambda row: {"labels": [-100] * (len(row["input_ids"]) - 1) + row["input_ids"][-1:]}
    )
    trainer.train()
    assert trainer.packing_report.bins == before.bins
    assert trainer.packing_report.trained_tokens == len(ROWS) < before.trained_tokens


def test_a_collator_that_wraps_ours_makes_its_batches_of_packed_rows(tmp_path, padded):
    trainer = trainer_of(tmp_path, Wrapping)
    assert_same_losses(losses(trainer), padded)
    assert trainer.data_collator.kinds == {list}, "as in TRL: `ids + [2]` appends"
    assert trainer.packing_report.documents == len(ROWS)
    trainer.evaluate()


def test_a_collator_that_wraps_ours_keeps_the_bins(tmp_path):
    plain = trainer_of(tmp_path, packing=True)
    trainer = trainer_of(tmp_path, Wrapping, packing=True)
    assert_same_losses(losses(trainer), losses(plain))
    assert trainer.packing_report.bins == plain.packing_report.bins


def test_another_packed_collator_may_be_set(tmp_path, padded):
    trainer = trainer_of(tmp_path)
    trainer.data_collator = PackedCollator(pad_to_multiple_of=64)
    assert next(iter(trainer.get_train_dataloader()))["input_ids"].shape[1] % 64 == 0
    assert_same_losses(losses(trainer), padded)


def test_our_collator_set_again_packs_again(tmp_path, padded):
    trainer = trainer_of(tmp_path)
    ours, trainer.data_collator = trainer.data_collator, OWN_COLLATORS["Seq2Seq"]()
    assert "attention_mask" in next(iter(trainer.get_train_dataloader()))
    trainer.data_collator = ours
    assert "cu_seq_lens_q" in next(iter(trainer.get_train_dataloader()))
    assert_same_losses(losses(trainer), padded)
    assert trainer.packing_report.documents == len(ROWS)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"documents_per_step": 8}, "documents_per_step=8, but data_collator is your own"),
        ({"loss_weighting": "document"}, "loss_weighting='document' cannot weigh tokens"),
        ({"packing": True, "static_shapes": True}, "static_shapes=True, but data_collator"),
    ],
)
def test_settings_that_padded_rows_ignore_are_refused(tmp_path, options, named):
    trainer = trainer_of(tmp_path, **options)
    trainer.data_collator = OWN_COLLATORS["Seq2Seq"]()
    with pytest.raises(ValueError, match=named):
        trainer.train()


def test_static_shapes_are_refused_where_a_wrapper_may_change_them(tmp_path):
    trainer = trainer_of(tmp_path, Wrapping, packing=True, static_shapes=True)
    with pytest.raises(ValueError, match="static_shapes=True holds the shape"):
        trainer.train()


def test_what_holds_our_collator_calls_it():
    ours, other = PackedCollator(), PackedCollator()
    kept = {"inner": ours}

    def around(inner):
        return lambda rows: inner(rows)

    class Method:
        def __init__(self, inner):
            self.inner = inner

        def collate(self, rows):
            return self.inner(rows)

    for make in (around, Marking, lambda c: partial(Marking.__call__, c), lambda c: [c]):
        assert calls(make(ours), ours)
        assert not calls(make(other), ours), "control: another collator of the same class"
    assert calls(Method(ours).collate, ours)
    assert not calls(Method(other).collate, ours)
    assert calls(lambda rows: kept["inner"](rows), ours)
    assert not calls(DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer()), ours)


# --- train_dataset --------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [False, True])
def test_other_rows_are_reported_and_trained(tmp_path, packing):
    trainer = trainer_of(tmp_path, packing=packing)
    assert trainer.packing_report.documents == 18
    trainer.train_dataset = trainer.train_dataset.select(range(10))
    trainer.train()
    assert trainer.packing_report.documents == 10
    assert trainer.packing_report.steps_per_epoch == trainer.state.global_step


@pytest.mark.parametrize("packing", [False, True])
def test_raw_rows_are_prepared(tmp_path, packing):
    trainer = trainer_of(tmp_path, packing=packing)
    trainer.train_dataset = tiny_dataset("language_modeling")
    trainer.train()
    assert "input_ids" in trainer.train_dataset.column_names
    expected = trainer_of(tmp_path, packing=packing, rows=list(tiny_dataset("language_modeling")))
    assert trainer.packing_report.tokens == expected.packing_report.tokens


def test_ids_beyond_the_vocabulary_are_refused_in_other_rows_too(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train_dataset = Dataset.from_list([{"input_ids": [5, 6, 5000]}])
    with pytest.raises(ValueError, match="5000"):
        trainer.train()


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


@pytest.mark.parametrize("rows", [ROWS, Rows()], ids=["list", "torch"])
def test_rows_that_are_not_of_datasets_take_trls_path(tmp_path, padded, rows):
    trainer = trainer_of(tmp_path)
    trainer.train_dataset = rows
    assert_same_losses(losses(trainer), padded)


# --- _get_train_sampler ---------------------------------------------------------------------------


def with_sampler(parent, sampler_of):
    class Sampling(parent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.weights = [1.0] * len(ROWS)  # known only now, as in many a subclass

        def _get_train_sampler(self, train_dataset=None):
            return sampler_of(self)

    return Sampling


SAMPLERS = {
    "random": lambda self: RandomSampler(self.train_dataset),
    "sequential": lambda self: SequentialSampler(self.train_dataset),
    "weighted": lambda self: WeightedRandomSampler(
        self.weights, 16, generator=torch.Generator().manual_seed(1)
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_of_a_subclass_says_which_documents_a_step_holds(tmp_path, name):
    found = [
        trainer_of(tmp_path, with_sampler(cls, SAMPLERS[name]), gradient_accumulation_steps=2)
        for cls in (SFTTrainer, PackedSFTTrainer)
    ]
    theirs, ours = map(losses, found)
    assert_same_losses(ours, theirs)
    report = found[1].packing_report
    assert (report.documents, report.documents_per_step) == (18, 8)
    assert report.steps_per_epoch == len(ours)
    assert "4 documents" in str(report)


def test_a_sampler_of_a_subclass_is_told_that_nothing_is_packed(tmp_path, caplog):
    trainer = trainer_of(tmp_path, with_sampler(PackedSFTTrainer, SAMPLERS["random"]), packing=True)
    trainer.train()
    assert "draws documents, not bins" in caplog.text
    assert trainer.packing_report.bins is None
    assert trainer.state.global_step == 5  # 18 documents, four a step


def test_a_subclass_that_asks_super_for_the_sampler_keeps_the_bins(tmp_path):
    class Asking(PackedSFTTrainer):
        def _get_train_sampler(self, train_dataset=None):
            return super()._get_train_sampler(train_dataset)

    trainer, plain = (trainer_of(tmp_path, cls, packing=True) for cls in (Asking, PackedSFTTrainer))
    assert_same_losses(losses(trainer), losses(plain))
    assert trainer.packing_report.bins == plain.packing_report.bins


@pytest.mark.parametrize(
    "options",
    [
        {"documents_per_step": 8, "packing": True},
        {"static_shapes": True, "packing": True},
        {"curriculum": "length"},
        {"mixture": {"a": {"epochs": 2}}, "source_column": "source"},
        {"mixture_temperature": 2.0, "source_column": "source", "packing": True},
    ],
)
def test_settings_of_ours_are_refused_beside_a_sampler_of_a_subclass(tmp_path, options):
    rows = [row | {"source": "ab"[number % 2]} for number, row in enumerate(ROWS)]
    cls = with_sampler(PackedSFTTrainer, SAMPLERS["random"])
    trainer = trainer_of(tmp_path, cls, rows, **options)
    with pytest.raises(ValueError, match="but _get_train_sampler of Sampling draws documents"):
        trainer.train()
