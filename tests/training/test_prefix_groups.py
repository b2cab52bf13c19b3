"""Runs of prefix_sharing="group": groups in bins and steps, and the losses of their documents."""

import json

import numpy as np
import pytest
import torch
from architectures import tiny_models as architectures
from datasets import Dataset
from harness import TWO_RUNS
from helpers.distributed.same_steps import Run, on_ranks, trained
from helpers.tiny import tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.training import prefix_sharing

OPTIONS = {"max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 1}
KINDS = {
    "packed": {},
    "padding-free": {"packing": False, "per_device_train_batch_size": 8},
    "documents_per_step": {"documents_per_step": 16, "gradient_accumulation_steps": 2},
}


def documents(prompts=12, answers=5, seed=0):
    """Return answers to prompts in random order; a number in each tells its prompt."""
    rng = np.random.default_rng(seed)
    size = len(tiny_tokenizer())
    questions = rng.integers(6, size, (prompts, 40))
    rows = []
    for of in rng.permutation(np.repeat(np.arange(prompts), answers)):
        answer = rng.integers(6, size, rng.integers(4, 20)).tolist()
        question = questions[of].tolist()
        rows.append({"input_ids": question + answer, "labels": [-100] * 40 + answer})
    return Dataset.from_list(rows)


class Recording(PackedSFTTrainer):
    """Keeps the tokens of each micro-batch."""

    def __init__(self, *args, **kwargs):
        self.rows = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.rows.append(inputs["input_ids"].shape[1])
        return super().training_step(model, inputs, num_items_in_batch)


def trainer_of(folder, data=None, model="llama", cls=Recording, **options):
    args = PackedSFTConfig(
        str(folder),
        **OPTIONS | {"learning_rate": 0.0, "logging_steps": 1, "prefix_sharing": "group"} | options,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        run_page=False,
    )
    data = documents() if data is None else data
    return cls(
        tiny_model(model) if isinstance(model, str) else model,
        args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny_tokenizer(),
    )


class RowsApart(Recording):
    """Trains the same bins and steps by rows without sharing."""

    def get_batch_samples(self, *args, **kwargs):
        assert not self._collators.packed.shares_prefixes
        return super().get_batch_samples(*args, **kwargs)

    def _before_first_step(self):
        super()._before_first_step()
        self._collators.packed.shares_prefixes = False


def steps_of(trainer):
    names = ("loss", "grad_norm", "documents_per_step", "num_tokens", "entropy")
    return [
        [log[name] for name in names] for log in trainer.state.log_history if "grad_norm" in log
    ]


def losses_of(trainer):
    return [log["loss"] for log in trainer.state.log_history if "grad_norm" in log]


@pytest.mark.parametrize(
    "kind", ["packed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in [*KINDS][1:])]
)
def test_steps_are_those_of_their_documents_apart(kind, tmp_path):
    trainer = trainer_of(tmp_path, learning_rate=1e-3, **KINDS[kind])
    trainer.train()
    found = trainer.evaluate()
    apart = trainer_of(tmp_path, cls=RowsApart, learning_rate=1e-3, **KINDS[kind])
    apart.train()
    np.testing.assert_allclose(steps_of(trainer), steps_of(apart), rtol=TWO_RUNS)
    assert found["eval_loss"] == pytest.approx(apart.evaluate()["eval_loss"], rel=TWO_RUNS)
    assert sum(trainer.rows) < 0.5 * sum(apart.rows)
    if kind == "packed":
        assert max(trainer.rows) <= 256 < max(apart.rows)
    # Control: without groups, steps hold other documents.
    other = trainer_of(tmp_path, prefix_sharing="off", learning_rate=1e-3, **KINDS[kind])
    other.train()
    assert abs(steps_of(other)[0][0] - steps_of(trainer)[0][0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_losses_of_sources_stay_in_an_evaluation(packing, tmp_path):
    data = documents()
    data = data.add_column("source", ["a" if i % 3 else "b" for i in range(len(data))])

    def evaluate(sharing):
        options = {"eval_packing": packing, "source_column": "source", "prefix_sharing": sharing}
        return trainer_of(tmp_path, data, per_device_eval_batch_size=4, **options).evaluate()

    grouped, apart = evaluate("group"), evaluate("off")
    for name in ("eval_loss", "eval_loss_a", "eval_loss_b", "eval_entropy"):
        assert grouped[name] == pytest.approx(apart[name], rel=TWO_RUNS), name
    for name in ("eval_num_documents_a", "eval_num_tokens"):
        assert grouped[name] == apart[name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["packed", "documents_per_step"])
def test_a_run_resumes_within_an_epoch_to_the_bit(kind, tmp_path):
    constant = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    options = KINDS[kind] | constant | {"dataloader_num_workers": 1}
    whole = trainer_of(tmp_path / "a", **options)
    whole.train()
    first = trainer_of(tmp_path / "b", save_steps=2, max_steps=2, **options)
    first.args.save_strategy = "steps"
    first.train()
    resumed = trainer_of(tmp_path / "b", **options)
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed) == losses_of(whole)
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


@pytest.mark.slow
def test_an_epoch_resumed_with_other_groups_is_refused(tmp_path):
    first = trainer_of(tmp_path, save_steps=2, max_steps=2)
    first.args.save_strategy = "steps"
    first.train()
    resumed = trainer_of(tmp_path, prefix_group_size=3)
    with pytest.raises(ValueError, match="prefix_group_size=3 instead of 8"):
        resumed.train(resume_from_checkpoint=True)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_is_grouped_within_its_windows(packing, tmp_path):
    options = {
        "max_steps": 4,
        "packing": packing,
        "per_device_train_batch_size": 1 + 7 * (not packing),
    }

    def train(**others):
        trainer = trainer_of(tmp_path, documents().to_iterable_dataset(), **options, **others)
        trainer.train()
        return trainer

    shared, off = train(), train(prefix_sharing="off")
    apart = train(cls=RowsApart)
    np.testing.assert_allclose(steps_of(shared), steps_of(apart), rtol=TWO_RUNS)
    assert sum(shared.rows) < 0.5 * sum(apart.rows)
    assert steps_of(off)[0] != steps_of(apart)[0]


@pytest.mark.slow
def test_a_stream_of_groups_resumes_to_the_bit(tmp_path):
    def trainer(folder, **options):
        constant = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}
        data = documents().to_iterable_dataset()
        return trainer_of(folder, data, **{"max_steps": 6} | constant | options)

    whole = trainer(tmp_path / "a")
    whole.train()
    first = trainer(tmp_path / "b", max_steps=2, save_steps=2)
    first.args.save_strategy = "steps"
    first.train()
    resumed = trainer(tmp_path / "b")
    resumed.train(resume_from_checkpoint=True)
    assert losses_of(resumed) == losses_of(whole)
    other = trainer(tmp_path / "b", prefix_group_size=3)
    with pytest.raises(ValueError, match="a stream of prefix_group_size=8, and now it is 3"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_stream_of_an_earlier_version_resumes(tmp_path):
    options = {"prefix_sharing": "off", "max_steps": 2, "save_steps": 2}
    first = trainer_of(tmp_path, documents().to_iterable_dataset(), **options)
    first.args.save_strategy = "steps"
    first.train()
    saved = tmp_path / "checkpoint-2" / "stream_0.json"
    position = json.loads(saved.read_text())
    assert position.pop("prefix_group_size") is None
    saved.write_text(json.dumps(position))
    resumed = trainer_of(tmp_path, documents().to_iterable_dataset(), **options | {"max_steps": 3})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


@pytest.mark.slow
def test_two_ranks_train_the_steps_of_one(tmp_path):
    """Two ranks sum over a step in another order; see test_distributed.py for the tolerance."""
    settings = {"prefix_sharing": "group", "max_length": 256, "per_device_train_batch_size": 1}
    kinds = {"packed": {"packing": True}, "documents_per_step": {"documents_per_step": 16}}

    def runs(accumulation):
        steps = {"gradient_accumulation_steps": accumulation}
        return {
            name: Run(
                str(tmp_path / name),
                "PackedSFTTrainer",
                documents().to_list(),
                settings=settings | kind | steps,
            )
            for name, kind in kinds.items()
        }

    of_ranks = on_ranks(runs(1), tmp_path / "results")
    for name, run in runs(2).items():
        alone, (first, second) = trained(run), of_ranks[name]
        assert len(alone["losses"]) > 2
        assert first["losses"] == second["losses"]
        np.testing.assert_allclose(first["losses"], alone["losses"], atol=1e-5)


@pytest.mark.slow
def test_a_model_that_cannot_share_trains_single_documents(tmp_path, caplog):
    def train(sharing):
        torch.manual_seed(0)
        model = architectures.tiny_model("mamba")
        model.resize_token_embeddings(len(tiny_tokenizer()))
        trainer = trainer_of(tmp_path, model=model, prefix_sharing=sharing)
        trainer.train()
        return trainer

    grouped, off = train("group"), train("off")
    assert "prefix_sharing='group' does nothing in this run: attention='padded'" in caplog.text
    assert steps_of(grouped) == steps_of(off)
    assert grouped.packing_report.bins == off.packing_report.bins


def test_a_model_that_fails_the_check_trains_single_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_sharing, "check_prefixes", _fail)
    trainer = trainer_of(tmp_path)
    planned = trainer.packing_report.bins
    trainer.train()
    assert planned < trainer.packing_report.bins == 14
    assert max(trainer.rows) <= 256
    assert "not shared: RuntimeError: no" in str(trainer.packing_report)


@pytest.mark.slow
def test_a_model_that_fails_only_when_it_is_wrapped_stops(tmp_path, monkeypatch):
    """Its bins hold more tokens than a row may have without sharing."""
    calls, check = [], prefix_sharing.check_prefixes

    def fails_later(*args, **kwargs):
        calls.append(1)
        return check(*args, **kwargs) if len(calls) == 1 else _fail()

    monkeypatch.setattr(prefix_sharing, "check_prefixes", fails_later)
    with pytest.raises(RuntimeError, match="the model cannot share as it runs now"):
        trainer_of(tmp_path).train()


def _fail(*_args, **_kwargs):
    raise RuntimeError("no")


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefix_group_size": 1}, "prefix_group_size=1 must be at least 2"),
        ({"prefix_group_size": 4, "prefix_sharing": "bin"}, "prefix_group_size=4 has no effect"),
        ({"prefix_group_size": 2.5}, "prefix_group_size=2.5 must be a whole number"),
        ({"packing_strategy": "wrapped"}, "packing_strategy='wrapped': pieces are cut where"),
        ({"static_shapes": True}, "static_shapes=True"),
    ],
)
def test_settings_that_cannot_be_combined_are_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        PackedSFTConfig(
            str(tmp_path), use_cpu=True, bf16=False, **{"prefix_sharing": "group"} | options
        )


def test_rows_that_were_packed_before_are_refused(tmp_path):
    rows = Dataset.from_list(
        [{"input_ids": [7] * 30, "labels": [7] * 30, "seq_lengths": [20, 10]}] * 4
    )
    with pytest.raises(ValueError, match="cannot regroup rows that were packed before"):
        trainer_of(tmp_path, rows)


def test_a_sampler_of_the_user_is_refused(tmp_path):
    class Own(Recording):
        def _get_train_sampler(self, train_dataset=None):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with pytest.raises(ValueError, match="_get_train_sampler of Own draws documents, not groups"):
        trainer_of(tmp_path, cls=Own).train()


@pytest.mark.slow
def test_the_size_of_groups_changes_the_run(tmp_path):
    small, large = (trainer_of(tmp_path, prefix_group_size=size) for size in (2, 8))
    assert small.packing_report.bins > large.packing_report.bins
