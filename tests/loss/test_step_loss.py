"""The loss of a step is Σ w · loss of a token / Σ w, over all its micro-batches and ranks.

The reference computes that document by document, from the logits of the untouched model. The ways
and options of a step are rows of tests/test_oracle.py.
"""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from harness import TWO_RUNS, alone, assert_exact, make_trainer, run
from helpers.by_hand import (
    LAYOUTS,
    LEARNING_RATE,
    LOSSES,
    TOLERANCE,
    assert_is_one_step_of,
    unweighted,
    weighted,
)
from helpers.combinations import combined
from helpers.distributed.train import Scenario, run_on_ranks, token_weights
from helpers.distributed.train import run as run_scenario
from helpers.tiny import documents_of_lengths, tiny_model
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer

DOCUMENTS = documents_of_lengths((47, 5, 23, 38, 12, 60, 3, 29), prompt=3)


VIRTUAL = combined(["PromptTuningConfig", "PrefixTuningConfig"], [1, 4], ["nll", "dft"])


@pytest.mark.parametrize(("kind", "virtual", "loss"), VIRTUAL)
def test_virtual_tokens_shift_no_weight(kind, virtual, loss, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    model = peft.get_peft_model(tiny_model("llama"), config)
    documents = weighted(documents_of_lengths((12, 30, 7, 12), prompt=4))
    found = run(model, documents, tmp_path, **LOSSES[loss])
    assert_exact(found, alone(model, documents, loss))
    with pytest.raises(AssertionError):
        assert_exact(found, alone(model, unweighted(documents), loss))


def test_a_model_that_scores_too_few_tokens_is_refused(tmp_path):
    trainer = make_trainer(tmp_path, DOCUMENTS)
    batch = next(iter(trainer.get_train_dataloader()))

    def one_score(**inputs):
        output = trainer.model(**inputs)
        output.log_probs = output.log_probs[:, :1]  # which all weights would multiply
        return output

    assert torch.isfinite(trainer.compute_loss(trainer.model, dict(batch)))
    with pytest.raises(RuntimeError, match="fewer tokens than there are labels"):
        trainer.compute_loss(one_score, dict(batch))


class OwnSteps(PackedSFTTrainer):
    """Reads the micro-batches of a step itself, and counts nothing."""

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        return list(islice(epoch_iterator, num_batches)), None


@pytest.mark.parametrize("weights", [weighted, unweighted])
def test_a_subclass_that_reads_steps_itself_trains_one_mean(weights, tmp_path):
    model, documents = tiny_model("llama"), weights(DOCUMENTS)
    found = run(model, documents, tmp_path, cls=OwnSteps, **LAYOUTS["three of a bin"])
    assert_exact(found, alone(model, documents))


def test_weights_are_not_divided_by_a_step_that_nobody_measured(tmp_path):
    trainer = make_trainer(tmp_path, weighted(DOCUMENTS))
    batch = next(iter(trainer.get_train_dataloader()))
    assert trainer.compute_loss(trainer.model, batch) > 0
    with pytest.raises(ValueError, match=r"num_items_in_batch=9, but .* inside trainer\.train"):
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(9))


class Between(SFTTrainer):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return 2 * super().compute_loss(model, inputs, *args, **kwargs)


def test_a_class_behind_ours_computes_its_loss_and_takes_no_weights(tmp_path):
    model = tiny_model("llama")
    mixed = type("Mixed", (PackedSFTTrainer, Between), {})
    loss = run(model, DOCUMENTS, tmp_path, cls=mixed)[0]
    assert loss == pytest.approx(2 * alone(model, DOCUMENTS)[0], rel=TOLERANCE)
    with pytest.raises(ValueError, match=r"loss without them, .*; put PackedSFTTrainer"):
        run(model, weighted(DOCUMENTS), tmp_path, cls=mixed)


def test_weights_stay_float32_where_deepspeed_has_floats_cast(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, weighted(DOCUMENTS))
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(dtype=lambda: torch.bfloat16))
    monkeypatch.setattr(trainer, "is_deepspeed_enabled", True)
    monkeypatch.setattr(type(trainer.accelerator.state), "deepspeed_plugin", plugin)
    batch = trainer.data_collator(weighted(DOCUMENTS)) | {"other": torch.ones(1)}
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
}
# Three bins of one document: rank 1 has none in the second step, and so a batch without weights.
EMPTY = {"lengths": [32, 32, 32], "batch_size": 1, "max_steps": 2}


def scenario(folder, arguments, accumulation=1):
    arguments = {"lengths": LENGTHS, "batch_size": 3, "max_steps": 1, **arguments}
    options = {"optim": "sgd", "learning_rate": LEARNING_RATE, "max_grad_norm": 0.0}
    return Scenario(
        str(folder), **arguments, accumulation=accumulation, weighted=True, options=options
    )


@pytest.mark.slow
def test_two_ranks_take_the_weighted_mean_over_both(tmp_path):
    made = {name: scenario(tmp_path / name, each) for name, each in {**RANKS, "": EMPTY}.items()}
    found = run_on_ranks(made, tmp_path / "results")
    model = tiny_model("llama")
    rows = documents_of_lengths(LENGTHS, prompt=2)
    documents = [row | {"loss_weights": token_weights(row["input_ids"])} for row in rows]
    for result in (rank for name in RANKS for rank in found[name]):
        assert_is_one_step_of(result, alone(model, documents))
        with pytest.raises(AssertionError):
            assert_is_one_step_of(result, alone(model, rows))
    # A rank without documents left takes part.
    one = run_scenario(scenario(tmp_path / "one", EMPTY, accumulation=2))
    for result in found[""]:
        assert len(result["losses"]) == 2
        for key in ("losses", "parameters"):
            torch.testing.assert_close(result[key], one[key], rtol=0, atol=TWO_RUNS)
    assert [len(batch) for batch in found[""][1]["batches"]] == [32, 1]
