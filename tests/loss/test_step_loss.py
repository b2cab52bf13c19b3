"""The loss of a step is Σ w · loss of a token / Σ w, over all its micro-batches and ranks.

The reference computes that document by document, from the logits of the untouched model.
"""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import TWO_RUNS
from helpers.by_hand import (
    LAYOUTS,
    LEARNING_RATE,
    LOSSES,
    TOLERANCE,
    assert_is_one_step_of,
    assert_same_step,
    by_hand,
    one_step,
    trainer_for,
    unweighted,
    weighted,
)
from helpers.combinations import combined
from helpers.distributed.train import Scenario, run, run_on_ranks, token_weights
from helpers.tiny import documents_of_lengths
from helpers.tiny import tiny_model as small_model
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX

# --- a step; its ways and options are rows of tests/test_oracle.py --------------------------------


@pytest.mark.parametrize(
    ("kind", "virtual", "loss"),
    combined(["PromptTuningConfig", "PrefixTuningConfig"], [1, 4], ["nll", "dft"]),
)
def test_virtual_tokens_shift_no_weight(kind, virtual, loss, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    model = peft.get_peft_model(small_model("llama"), config)
    documents = weighted(tiny_documents((12, 30, 7, 12)))
    found = one_step(model, documents, tmp_path, **LOSSES[loss])
    reference = by_hand(model, documents, loss)
    assert_same_step(found, reference)
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(model, unweighted(documents), loss))


@pytest.mark.parametrize(
    ("loss", "layout"), combined(LOSSES, ["three of a bin", "three of 3, 3 and 2 documents"])
)
def test_weights_of_one_change_no_bit(loss, layout, tmp_path):
    model, documents = tiny_model("llama"), tiny_documents()
    ones = [d | {"loss_weights": [1.0] * len(d["input_ids"])} for d in documents]
    options = {**LAYOUTS[layout], **LOSSES[loss]}
    found, expected = (one_step(model, d, tmp_path, **options) for d in (ones, documents))
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], g) for name, g in expected[1].items())


def test_a_step_of_zero_weights_learns_nothing(tmp_path):
    documents = [d | {"loss_weights": [0] * len(d["input_ids"])} for d in tiny_documents()]
    stream = Dataset.from_list(documents).to_iterable_dataset()  # a data set of them is refused
    loss, gradients = one_step(tiny_model("llama"), stream, tmp_path)
    assert loss == 0
    assert gradients
    assert all(g.abs().max() == 0 for g in gradients.values())


class OwnSteps(PackedSFTTrainer):
    """Reads the micro-batches of a step itself, and counts nothing."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return list(islice(epoch_iterator, num_batches)), None


class OwnCount(OwnSteps):
    def get_batch_samples(self, epoch_iterator, num_batches, device):
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum((b["labels"][:, 1:] != IGNORE_INDEX).sum() for b in batches)


@pytest.mark.parametrize("trainer", [OwnSteps, OwnCount])
@pytest.mark.parametrize("weights", [weighted, unweighted])
def test_a_subclass_that_reads_steps_itself_trains_one_mean(
    trainer, weights, tmp_path, monkeypatch
):
    model, documents = tiny_model("llama"), weights(tiny_documents())
    monkeypatch.setattr("helpers.by_hand.PackedSFTTrainer", trainer)
    found = one_step(model, documents, tmp_path, **LAYOUTS["three of a bin"])
    assert_same_step(found, by_hand(model, documents))


def test_weights_are_not_divided_by_a_step_that_nobody_measured(tmp_path):
    trainer = trainer_for(tiny_model("llama"), weighted(tiny_documents()), tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.compute_loss(trainer.model, batch) > 0
    with pytest.raises(ValueError, match=r"num_items_in_batch=9, but .* inside trainer\.train"):
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))


class Between(SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


def test_a_class_behind_ours_computes_its_loss_and_takes_no_weights(tmp_path, monkeypatch):
    model, documents = tiny_model("llama"), tiny_documents()
    mixed = type("Mixed", (PackedSFTTrainer, Between), {})
    monkeypatch.setattr("helpers.by_hand.PackedSFTTrainer", mixed)
    loss, _ = one_step(model, documents, tmp_path)
    assert loss == pytest.approx(2 * by_hand(model, documents)[0], rel=TOLERANCE)
    with pytest.raises(ValueError, match="computes the loss without them; put PackedSFTTrainer"):
        one_step(model, weighted(documents), tmp_path)


def test_weights_stay_float32_where_deepspeed_has_floats_cast(tmp_path, monkeypatch):
    documents = weighted(tiny_documents())
    trainer = trainer_for(tiny_model("llama"), documents, tmp_path)
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    batch = trainer.data_collator(documents) | {"other": torch.ones(1)}
    batch["loss_weights"] *= 257 / 256
    prepared = trainer._prepare_inputs(batch)
    assert prepared["other"].dtype == torch.bfloat16, "the control"
    assert torch.equal(prepared["loss_weights"], batch["loss_weights"])


# --- two ranks ------------------------------------------------------------------------------------

LENGTHS = [32, 5, 30, 9, 17, 23, 3, 28]
RANKS = {
    "packed": {},
    "not packed": {"packing": False, "batch_size": 4},
    "a class that ignores loss kwargs": {"ignores_loss_kwargs": True},
    "evaluation": {"eval_lengths": LENGTHS[:5], "counts_correct": True},
}
# Three bins of one document: rank 1 has none in the second step, and so a batch without weights.
EMPTY = {"lengths": [32, 32, 32], "batch_size": 1, "max_steps": 2}


def scenario(name, folder, accumulation):
    arguments = dict(EMPTY if name == "empty" else RANKS[name])
    options = {"optim": "sgd", "learning_rate": LEARNING_RATE, "max_grad_norm": 0.0}
    return Scenario(
        str(folder / name),
        **{"lengths": LENGTHS, "batch_size": 3, "max_steps": 1, **arguments},
        accumulation=accumulation,
        weighted=True,
        options=options,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    scenarios = {name: scenario(name, base, 1) for name in (*RANKS, "empty")}
    return run_on_ranks(scenarios, base / "results")


def documents_of(lengths, seed):
    rows = documents_of_lengths(lengths, prompt=2, seed=seed)
    return [row | {"loss_weights": token_weights(row["input_ids"])} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_take_the_weighted_mean_over_both(name, two_ranks):
    model, documents = small_model("llama"), documents_of(LENGTHS, seed=0)
    expected = by_hand(model, documents)
    evaluated = by_hand(model, documents_of(LENGTHS[:5], seed=1))[0]
    for result in two_ranks[name]:
        assert_is_one_step_of(result, expected)
        if name == "evaluation":
            assert result["metrics"]["eval_loss"] == pytest.approx(evaluated, rel=TOLERANCE)
    with pytest.raises(AssertionError):
        assert_is_one_step_of(two_ranks[name][0], by_hand(model, unweighted(documents)))


@pytest.mark.slow
def test_a_rank_without_documents_left_takes_part_in_the_weighted_mean(two_ranks, tmp_path):
    alone = run(scenario("empty", tmp_path, 2))
    for result in two_ranks["empty"]:
        assert len(result["losses"]) == 2
        for key in ("losses", "parameters"):
            torch.testing.assert_close(result[key], alone[key], rtol=0, atol=TWO_RUNS)
    assert [len(batch) for batch in two_ranks["empty"][1]["batches"]] == [32, 1]


# --- what is refused ------------------------------------------------------------------------------


def test_a_loss_function_of_ones_own_is_refused_at_once(tmp_path):
    def own(outputs, labels, num_items_in_batch=None):
        return outputs.logits.sum()

    with pytest.raises(ValueError, match=r"compute_loss_func .*remove_columns\('loss_weights'\)"):
        trainer_for(
            tiny_model("llama"),
            weighted(tiny_documents()),
            tmp_path,
            arguments={"compute_loss_func": own},
        )


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_name_their_document(wrong, tmp_path):
    documents = weighted(tiny_documents((9, 8, 7)))
    documents[1]["loss_weights"][4] = wrong
    with pytest.raises(ValueError, match=f"document 1: loss_weights has {wrong} at token 4; give"):
        trainer_for(tiny_model("llama"), documents, tmp_path)
