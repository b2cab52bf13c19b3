"""Which runs share prefixes, what the report says of it, and which bins groups of prefixes fill."""

from unittest import mock

import numpy as np
import pytest
import torch
from architectures import tiny_models as architectures
from datasets import Dataset
from harness import make_trainer
from helpers.steps import steps_in
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from peft import LoraConfig, get_peft_model

from trl_packing import PackedCollator, PackedSFTTrainer
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.report import prefix_savings
from trl_packing.training import prefix_sharing
from trl_packing.training.prefix_sharing import PrefixSharing


def answers(number=60, *, prompt=60, prompts=3) -> list[dict]:
    """Return answers to parts of some prompts; every fourth document has no prompt."""
    rng = np.random.default_rng(0)
    questions = [rng.integers(6, 90, prompt).tolist() for _ in range(prompts)]
    rows = []
    for n in range(number):
        question = questions[n % prompts][: rng.integers(5, prompt)] if n % 4 else []
        rows.append(row_of(question, rng.integers(6, 90, rng.integers(2, 20)).tolist()))
    return rows


def of_groups() -> list[dict]:
    """Return five answers to each of twelve prompts, in random order."""
    rng = np.random.default_rng(0)
    questions = rng.integers(6, 90, (12, 40)).tolist()
    order = rng.permutation(np.repeat(np.arange(12), 5))
    return [row_of(questions[n], rng.integers(6, 90, rng.integers(4, 20)).tolist()) for n in order]


def row_of(question, answer) -> dict:
    return {"input_ids": question + answer, "labels": [-100] * len(question) + answer}


APART = documents_of_lengths([30] * 40)


def trainer_of(folder, rows=None, model="llama", **options) -> PackedSFTTrainer:
    settings = {"max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 1}
    settings |= {"learning_rate": 0.0}  # so that every step compares gradients of the same weights
    settings |= {"logging_steps": 1, "prefix_sharing": "bin", "run_page": False}
    rows = Dataset.from_list(rows or answers()) if isinstance(rows, list | None) else rows
    return make_trainer(folder, rows, model, evaluated=rows, **settings | options)


def trained(folder, *args, **options) -> PackedSFTTrainer:
    trainer = trainer_of(folder, *args, **options)
    trainer.train()
    return trainer


def line(trainer) -> str | None:
    lines = trainer.packing_report.lines()
    return next((line.text for line in lines if line.label == "prefixes"), None)


# --- who shares -----------------------------------------------------------------------------------


class OwnLoss(PackedSFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


class OwnStep(PackedSFTTrainer):
    """Computes the loss of a row, in which a shared token would count once."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        inputs = self._prepare_inputs(inputs)
        loss = model(**{k: v for k, v in inputs.items() if "weight" not in k}).loss
        self.accelerator.backward(loss)
        return loss.detach()


class OwnRows(PackedCollator):
    """A class of a user, which could mask a token of the last document."""

    def __call__(self, documents):
        return super().__call__(documents)


def of_architecture(name):
    torch.manual_seed(0)
    made = architectures.tiny_model(name)
    made.resize_token_embeddings(len(tiny_tokenizer()))
    return made


def with_dropout():
    adapter = LoraConfig(r=2, lora_dropout=0.25, target_modules=["q_proj"])
    return get_peft_model(tiny_model("llama"), adapter)


# arguments of `trainer_of`, and why nothing is shared.
APART_BECAUSE = {
    "padded rows": (lambda: {"model": of_architecture("bloom")}, "attention='padded'"),
    "a state": (lambda: {"model": of_architecture("lfm2")}, "recurrent layers carry a state"),
    "a state, by document": (lambda: {"model": of_architecture("rwkv")}, "recurrent layers carry"),
    "the model's attention": (lambda: {"attention": "model"}, "attention='model'"),
    "a loss": (lambda: {"cls": OwnLoss}, "the loss is your own"),
    "noise": (lambda: {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 draws noise"),
    "rows": (lambda: {"collator": OwnRows()}, "data_collator is your own"),
    "dropout": (lambda: {"model": with_dropout()}, "lora_dropout=0.25 draws for each document"),
}


@pytest.mark.parametrize("case", APART_BECAUSE)
def test_runs_in_which_each_document_needs_its_tokens_do_not_share(case, tmp_path, caplog):
    arguments, reason = APART_BECAUSE[case]
    trainer = trained(tmp_path, **arguments())
    assert not trainer.data_collator.shares_prefixes
    assert line(trainer).startswith("not shared: ")
    assert reason in line(trainer)
    assert "prefix_sharing='bin' does nothing in this run: " in caplog.text
    if "dropout" in case:  # an evaluation drops nothing
        assert next(iter(trainer.get_eval_dataloader())).get("key_index") is not None


def test_a_loss_that_is_set_later_counts_each_document(tmp_path):
    trainer = trained(tmp_path)
    assert trainer.data_collator.shares_prefixes
    trainer.compute_loss_func = lambda outputs, *_, **__: outputs.logits.square().mean()
    trainer.train()
    assert not trainer.data_collator.shares_prefixes


@pytest.mark.parametrize("fails_in", ["training", "evaluation"])
def test_a_check_that_fails_in_one_mode_leaves_the_other_alone(fails_in, tmp_path, monkeypatch):
    """Rows of training must not share after an evaluation for which the check has passed."""
    check = PrefixSharing._failure

    def failing(self, model, documents, training):
        fails = training == (fails_in == "training")
        return "it fails" if fails else check(self, model, [], training)

    monkeypatch.setattr(PrefixSharing, "_failure", failing)
    monkeypatch.setattr(PackedSFTTrainer, "_loss_is_ours", lambda self: True)
    rows = {True: [], False: []}

    class Seen(PackedSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            rows[model.training].append("key_index" in inputs)
            return super().compute_loss(model, inputs, *args, **kwargs)

    trained(tmp_path, cls=Seen, eval_strategy="steps", eval_steps=2)
    assert any(rows[fails_in == "evaluation"])
    assert not any(rows[fails_in == "training"])


# --- savings --------------------------------------------------------------------------------------


def test_the_savings_are_those_of_the_collators_rows():
    documents = ArrowDocuments(Dataset.from_list(answers()), ["input_ids", "labels"])
    collate = PackedCollator(shares_prefixes=True)
    lengths = documents.lengths()
    options = {"num_ranks": 2, "accumulation": 2, "capacity": 256}
    groups = group_documents(PrefixIndex.of(documents), lengths, 256, 8)
    apart, sampler = (PackedBatchSampler(lengths, groups=g, **options) for g in (None, groups))
    found = [prefix_savings(documents, s, "group") for s in (apart, sampler)]
    for savings, drawn in zip(found, (apart, sampler), strict=True):
        assert savings.is_whole
        assert savings.tokens == lengths.sum()
        batches = [documents.__getitems__(batch) for batch in drawn.micro_batches() if len(batch)]
        assert savings.computed == sum(collate(batch)["input_ids"].shape[1] for batch in batches)
    assert found[1].computed < found[0].computed < 0.9 * lengths.sum()
    # By hand: the groups of which a document is in each step.
    steps = [{groups.numbers[d] for batch in s for d in batch} for s in steps_in(sampler)]
    assert found[1].per_step == np.mean([*map(len, steps)])


def test_the_reports_savings_are_those_of_the_run(tmp_path):
    trainer = trainer_of(tmp_path)
    planned = trainer.packing_report.prefixes
    trainer.train()
    counts = trainer._meter.so_far()
    assert counts["tokens"] - counts["shared"] == planned.computed
    assert line(trainer) == f"{planned.tokens / planned.computed:.2f}× fewer tokens computed"


def test_documents_without_common_prefixes_cost_no_check(tmp_path, monkeypatch):
    checked = mock.Mock(wraps=prefix_sharing.check_prefixes)
    monkeypatch.setattr(prefix_sharing, "check_prefixes", checked)
    trainer = trained(tmp_path, APART)
    assert line(trainer).startswith("nothing to share")
    assert not checked.called
    # An evaluation set may share where training does not.
    batches = trainer.get_eval_dataloader(Dataset.from_list(answers()))
    assert any("key_index" in batch for batch in batches)
    assert not trainer.data_collator.shares_prefixes
    assert checked.called, "the control: with common prefixes the model is checked"


# --- groups ---------------------------------------------------------------------------------------


def test_a_model_that_fails_the_check_trains_single_documents(tmp_path, monkeypatch):
    fails = mock.Mock(side_effect=RuntimeError("no"))
    monkeypatch.setattr(prefix_sharing, "check_prefixes", fails)
    trainer = trainer_of(tmp_path, of_groups(), prefix_sharing="group")
    planned = trainer.packing_report.bins
    trainer.train()
    assert planned < trainer.packing_report.bins
    assert "not shared: RuntimeError: no" in str(trainer.packing_report)


@pytest.mark.slow
def test_a_model_that_fails_only_when_it_is_wrapped_stops(tmp_path, monkeypatch):
    """Its bins hold more tokens than a row may have without sharing."""
    checks = iter([prefix_sharing.check_prefixes, mock.Mock(side_effect=RuntimeError("no"))])
    monkeypatch.setattr(prefix_sharing, "check_prefixes", lambda *a, **k: next(checks)(*a, **k))
    with pytest.raises(RuntimeError, match="cannot share as it runs now"):
        trained(tmp_path, of_groups(), prefix_sharing="group")


class OwnSampler(PackedSFTTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return torch.utils.data.SequentialSampler(self.train_dataset)


PACKED = [{"input_ids": [7] * 30, "labels": [7] * 30, "seq_lengths": [20, 10]}] * 4


REFUSED = [
    ({"pad_to_multiple_of": 8}, "pad_to_multiple_of=8 and prefix_sharing='group' exclude"),
    ({"rows": PACKED}, "cannot regroup rows that were packed before"),
    ({"cls": OwnSampler}, "_get_train_sampler of OwnSampler draws documents, not groups"),
    ({"cls": OwnStep}, "training_step of OwnStep .*set prefix_sharing='off'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_settings_that_cannot_be_combined_are_refused(options, message, tmp_path):
    with pytest.raises((ValueError, RuntimeError), match=message):
        trained(tmp_path, **{"prefix_sharing": "group"} | options)
