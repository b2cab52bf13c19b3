"""A loss of the user's own may call the model on a packed row without its boundaries.

TRL pads to the right, so `model(input_ids=inputs["input_ids"])` is exact there. Here the row's
documents must stay apart under any call of its tokens, or the call is refused.
"""

import copy

import pytest
import torch
from harness import alone, assert_exact
from helpers.by_hand import assert_same_step
from helpers.distributed.own_loss import steps
from helpers.distributed.ranks import on_ranks
from helpers.model_calls import CALLS, DOCUMENTS, ids_only, trainer_with
from helpers.packed_models import alone as logits_alone
from helpers.tiny import tiny_model

from trl_packing import other_rows
from trl_packing.attention.calls import CurrentBatches


def trained(call, folder, **options):
    trainer, kept = trainer_with(call, folder, **options)
    trainer.train()
    return trainer.state.log_history[0]["loss"], kept.gradients


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_loss_that_says_nothing_of_documents_trains_them_apart(call, tmp_path):
    expected = alone(tiny_model("llama"), DOCUMENTS)
    assert_exact(trained(call, tmp_path), expected)
    trainer, _ = trainer_with(call, tmp_path)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected[0], rel=1e-4)


def test_the_comparison_sees_documents_that_see_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.attention.calls.complete_call", lambda model, call: call)
    with pytest.raises(AssertionError):
        assert_exact(trained(ids_only, tmp_path), alone(tiny_model("llama"), DOCUMENTS))


def causal(x):
    return torch.ones(1, 1, x.shape[1], x.shape[1]).tril().bool()


REFUSED = {
    "two halves": lambda x: {"input_ids": x[:, : x.shape[1] // 2 * 2].reshape(2, -1)},
    "a copy of a part": lambda x: {"input_ids": x[:, :50].clone()},
    # Masks under which documents see each other.
    "a mask": lambda x: {"input_ids": x, "attention_mask": (x.cumsum(1) > x[0, 0]).long()},
    "a causal mask": lambda x: {"input_ids": x, "attention_mask": causal(x)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_whose_documents_nobody_can_tell_apart_are_refused(name, tmp_path):
    says = "attention_mask that hides" if "mask" in name else "boundaries of documents.*other_rows"

    def call(trainer, model, inputs):
        return model(**REFUSED[name](inputs["input_ids"])).logits

    trainer, _ = trainer_with(call, tmp_path)
    for use in (trainer.train, trainer.evaluate):
        with pytest.raises(ValueError, match=says):
            use()


@pytest.mark.parametrize("name", ["falcon_mamba", "llama"])  # their caches have had two names
def test_rows_of_the_users_own_are_what_they_are_in_any_model(name, tmp_path):
    ids = torch.randint(6, 90, (2, 11), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    seen = []

    def call(trainer, model, inputs):
        with other_rows():
            seen.append(model(input_ids=ids).logits.detach())
            with pytest.raises(ValueError, match="key_index"):  # the keys of another row
                model(input_ids=ids, key_index=torch.arange(11))
        seen.append(trainer.accelerator.unwrap_model(model).generate(ids, **options))
        return ids_only(trainer, model, inputs)

    trained(call, tmp_path, model=tiny_model(name))
    plain = tiny_model(name)
    torch.testing.assert_close(seen[0], plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(seen[1], plain.generate(ids, **options))


@pytest.mark.parametrize("is_whole", [True, False], ids=["**inputs", "ids"])
def test_a_teacher_takes_the_batch_or_is_warned_of(is_whole, tmp_path, caplog):
    """Without `use_cache=False`, transformers makes a cache, and does not read the positions."""
    teacher = tiny_model("llama").eval()
    said = []

    def distill(trainer, model, inputs):
        row = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            call = row if is_whole else {"input_ids": row["input_ids"]}
            said.append((inputs, teacher(**call).logits))
        return model(**row).logits

    trained(distill, tmp_path)
    row, logits = said[0]
    assert torch.allclose(logits, logits_alone(tiny_model("llama"), row), atol=1e-4) == is_whole
    assert ("which is not the model of this run" in caplog.text) == (not is_whole)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["falcon_mamba", "llama"])
def test_a_loop_of_ones_own_takes_the_batches_of_a_built_trainer(name, training, tmp_path):
    trainer, _ = trainer_with(ids_only, tmp_path, model=tiny_model(name))
    copied = copy.deepcopy(trainer.model)
    for batch in trainer.get_train_dataloader():
        row = {key: value for key, value in batch.items() if key != "labels"}
        expected = logits_alone(tiny_model(name), row)
        for model in (trainer.model, copied):
            found = model.train(training)(**row).logits
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    trainer.train()


@pytest.mark.slow
def test_two_ranks_train_documents_apart(tmp_path):
    """The user's loss is a rank's sum by the items of all ranks, and DDP takes the mean of it."""
    loss, gradients = alone(tiny_model("llama"), DOCUMENTS)
    expected = loss / 2, {name: gradient / 2 for name, gradient in gradients.items()}
    for refusal, results in on_ranks(steps, {"": str(tmp_path)}, tmp_path)[""]:
        assert "outside of train() and evaluate()" in refusal
        assert "call enable_packing(model) first" in refusal
        assert len(results) == 4
        for found in results.values():
            of_model = {name.removeprefix("module."): g for name, g in found[1].items()}
            assert_same_step((found[0], of_model), expected)


def test_a_loader_is_not_read_ahead():
    """As a list it held a whole evaluation set, and ranks counted the rows that fill its end."""
    read = []
    next(iter(CurrentBatches(map(read.append, "abc"))))
    assert read == ["a"]
