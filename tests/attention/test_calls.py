"""Calls of a model that packs: on its row, on rows of a user's own, and ordinary ones.

    who calls       with                                         what comes
    our trainer     tokens of the row, in any way                its documents, apart
                    a part of the row, a mask that hides tokens  a refusal
    plain Trainer   boundaries, or tokens of our collator        its documents, apart
                    other tokens                                 a refusal
    anybody         rows in `other_rows`, padded rows, generate  what they are in any model

TRL pads to the right, so `model(input_ids=inputs["input_ids"])` is exact there.
"""

import copy

import pytest
import torch
from datasets import Dataset
from harness import TWO_RUNS, alone, assert_exact
from helpers import plain_runs
from helpers.by_hand import assert_same_step
from helpers.distributed.own_loss import steps
from helpers.distributed.ranks import on_ranks
from helpers.model_calls import (
    CALLS,
    DOCUMENTS,
    a_copy,
    backbone,
    embedded,
    ids_only,
    mask_of_ones,
    trainer_with,
)
from helpers.packed_models import alone as logits_alone
from helpers.packed_models import install, packed_batch
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import AttentionMaskInterface, DataCollatorForSeq2Seq
from transformers import DataCollatorWithFlattening as TheirFlattening

from trl_packing import PackedCollator, enable_packing, other_rows

# --- in our trainer -------------------------------------------------------------------------------


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


def test_a_loader_is_not_read_ahead(tmp_path):
    """As a list it held a whole evaluation set, and ranks counted the rows that fill its end."""
    read, seen = [], []

    def call(trainer, model, inputs):
        seen.append(len(read))
        return ids_only(trainer, model, inputs)

    trainer, _ = trainer_with(call, tmp_path, per_device_eval_batch_size=1, eval_packing=False)
    prepared = trainer.get_eval_dataloader()
    loader = prepared.base_dataloader
    collate = loader.collate_fn
    loader.collate_fn = lambda documents: read.append(documents) or collate(documents)
    trainer.get_eval_dataloader = lambda *_: prepared
    trainer.evaluate()
    assert seen == [2, 3, 4, 5, 6, 6], "accelerate reads one ahead"


# --- in a plain Trainer ---------------------------------------------------------------------------


def whole(trainer, model, inputs):
    return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits


COLLATORS = {
    "PackedDataset": None,
    "PackedCollator": PackedCollator(),
    "flattened by transformers": TheirFlattening(),
}
IN_MEMORY = [ids_only, mask_of_ones, backbone]
# Only our collator keeps its rows in memory, so that their tokens are known.
EXACT = [(name, whole) for name in COLLATORS] + [("PackedCollator", call) for call in IN_MEMORY]
REFUSED_IN_PLAIN = [("PackedCollator", a_copy), ("flattened by transformers", embedded)]
REFUSED_IN_PLAIN += [("PackedDataset", call) for call in (ids_only, mask_of_ones)]


def assert_step_is_exact(name, call, folder):
    """Train one step in a plain Trainer, whose loss is the mean of what `call` says of a row."""
    # gpt_oss needs us: transformers makes its mask without looking at position_ids.
    model = tiny_model("gpt_oss" if "transformers" in name else "llama")
    expected = copy.deepcopy(model)
    collator = COLLATORS[name]
    dataset = Dataset.from_list(plain_runs.DOCUMENTS) if collator else plain_runs.packed()
    enable_packing(model)
    found = plain_runs.first_step(model, dataset, folder, call, collator=collator)
    documents = (
        plain_runs.DOCUMENTS[:4] if collator else plain_runs.documents_of_rows(dataset, range(4))
    )
    assert_exact(found, alone(expected, documents))


@pytest.mark.parametrize(("name", "call"), EXACT)
def test_documents_are_known_by_boundaries_or_by_tokens_in_memory(name, call, tmp_path):
    assert_step_is_exact(name, call, tmp_path)


def assert_ours_is_exact(name, call, folder):
    assert_exact(trained(call, folder), alone(tiny_model("llama"), DOCUMENTS))


@pytest.mark.parametrize("assert_call_is_exact", [assert_ours_is_exact, assert_step_is_exact])
def test_the_comparisons_see_a_leak(assert_call_is_exact, tmp_path, monkeypatch):
    for module in ("attention.calls", "plain_trainer.enable"):
        monkeypatch.setattr(f"trl_packing.{module}.complete_call", lambda model, call: call)
    with pytest.raises(AssertionError):
        assert_call_is_exact("PackedCollator", ids_only, tmp_path)


@pytest.mark.parametrize(("name", "call"), REFUSED_IN_PLAIN)
def test_any_other_call_in_training_is_refused(name, call, tmp_path):
    with pytest.raises(ValueError, match=r"boundaries of documents.*other_rows"):
        assert_step_is_exact(name, call, tmp_path)


@pytest.mark.parametrize("name", ["falcon_mamba", "llama"])  # their caches have had two names
def test_other_calls_are_as_they_were(name):
    """In evaluation, in training inside `other_rows`, and of `generate` in both."""
    model, plain = tiny_model(name), tiny_model(name)
    enable_packing(model)
    padded = dict(
        DataCollatorForSeq2Seq(tiny_tokenizer())([dict(d) for d in plain_runs.DOCUMENTS[:3]])
    )
    ids = torch.tensor([plain_runs.DOCUMENTS[1]["input_ids"]])
    for call in (padded, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with other_rows():
            found = model.train()(**call)
        torch.testing.assert_close(found.logits, plain.train()(**call).logits)
        torch.testing.assert_close(model.eval()(**call).logits, plain.eval()(**call).logits)
        with pytest.raises(ValueError, match="other_rows"):
            model.train()(**call)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for mode in (True, False):
        written = [m.train(mode).generate(ids[:, :23], **options) for m in (model, plain)]
        assert torch.equal(*written)


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_cache_is_of_one_document(name):
    model = tiny_model("llama")
    enable_packing(model)
    ids = torch.arange(3, 11)[None]
    numbers = {"attention_mask": torch.tensor([[1] * 5 + [2] * 3])}
    with pytest.raises(ValueError, match=r"a cache .* one document"):
        model.train()(input_ids=ids, **numbers, **{name: object()})


# --- ordinary calls -------------------------------------------------------------------------------

LENGTHS = torch.tensor([12, 3, 7])


def padded(side):
    rows = [torch.tensor(d["input_ids"]) for d in documents_of_lengths(LENGTHS.tolist(), seed=4)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    at = torch.arange(12) if side == "right" else torch.arange(11, -1, -1)
    return {"input_ids": ids, "attention_mask": (at < LENGTHS[:, None]).long()}


def everyday_calls(model):
    """Ordinary uses of a model besides packed training; every result compares bit by bit."""
    model.eval()
    left, right = padded("left"), padded("right")
    # The second half of the row does not see the first.
    at = torch.arange(12)
    seen = (at[:, None] >= at[None]) & ((at[:, None] < 5) == (at[None] < 5))
    additive = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    results = {
        "one document": model(input_ids=left["input_ids"][:1]).logits,
        "left-padded": model(**left).logits[left["attention_mask"].bool()],
        "right-padded": model(**right).logits[right["attention_mask"].bool()],
        "generated": model.generate(**left, do_sample=False, max_new_tokens=6, pad_token_id=0),
        "4-D mask": model(input_ids=left["input_ids"][:1], attention_mask=additive).logits,
    }
    logits = model.train()(**right).logits[right["attention_mask"].bool()]
    weight = model.get_input_embeddings().weight
    results["gradient"] = torch.autograd.grad(logits.square().mean(), weight)[0]
    return results


WAYS = [("llama", way) for way in ("documents", "model", "mask", "padded")]
WAYS += [(name, "auto") for name in ("gemma2", "gpt_oss")]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_calls_that_are_not_packed_stay_as_they_were(name, way):
    model = tiny_model(name)
    before = everyday_calls(model)
    install(model, way)
    model(**packed_batch([3, 5]))
    torch.testing.assert_close(everyday_calls(model), before, rtol=0, atol=TWO_RUNS)


def test_without_a_mask_function_padded_batches_would_change(monkeypatch):
    """The negative control of the test above, and why a mask function is registered too."""
    model = tiny_model("llama")
    before = everyday_calls(model)
    install(model)
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, "packed_documents")
    after = everyday_calls(model)
    assert (after["left-padded"] - before["left-padded"]).abs().max() > 0.1
    assert not torch.equal(after["generated"], before["generated"])
