"""Plain `transformers.Trainer` on packed rows: one document at a time, and without us it is not.

The reference is `by_hand`: each document alone through the untouched model; so are tolerances.
"""

import contextlib
import copy
import json
import pickle
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from helpers.by_hand import TOLERANCE, Keep, assert_same_step, by_hand
from helpers.distributed.train import launch
from helpers.plain_runs import (
    COLLATORS,
    DOCUMENTS,
    LENGTHS,
    MATH,
    PACK_LEN,
    documents_of_rows,
    packed,
    packing_of,
    trainer_of,
)
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from torch.utils.data import BatchSampler, DataLoader
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DefaultDataCollator,
    Trainer,
    TrainingArguments,
)
from transformers import DataCollatorWithFlattening as TheirFlattening

import trl_packing.isolation.fallback
import trl_packing.plain_trainer.enable
from trl_packing import (
    DataCollatorWithFlattening,
    PackedCollator,
    PackedDataset,
    RepackEveryEpoch,
    enable_packing,
    make_supervised_dset,
)
from trl_packing.plain_trainer.dataset import enabled_models
from trl_packing.tools import tiny_models as architectures
from trl_packing.tools.tiny_step import tiny_documents


def first_step(model, dataset, folder, **options):
    """Return loss and gradients of the only step of a plain Trainer."""
    kept = Keep()
    trainer = trainer_of(model, dataset, folder, callbacks=[kept], **options)
    trainer.train()
    return trainer.state.log_history[0]["loss"], kept.gradients


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "documents"),
        ("gemma2", "documents"),
        ("gpt_oss", "documents"),
        ("qwen3_moe", "documents"),
        ("gpt2", "documents"),
        ("falcon_mamba", "padded"),
        ("lfm2", "padded"),
    ],
)
def test_a_step_equals_one_document_at_a_time(name, way, tmp_path):
    model, dataset = tiny_model(name), packed()
    untouched = copy.deepcopy(model)
    assert enable_packing(model).backend == way
    found = first_step(model, dataset, tmp_path)
    assert_same_step(found, by_hand(untouched, documents_of_rows(dataset, range(4))))


@pytest.mark.parametrize("name", COLLATORS)
@pytest.mark.parametrize("remove_unused_columns", [True, False])
def test_any_collator_that_keeps_the_columns_will_do(name, remove_unused_columns, tmp_path):
    model, dataset = tiny_model("gpt_oss"), packed()
    expected = by_hand(model, documents_of_rows(dataset, range(4)))
    enable_packing(model, dataset)
    found = first_step(
        model,
        dataset,
        tmp_path,
        collator=COLLATORS[name],
        remove_unused_columns=remove_unused_columns,
    )
    assert_same_step(found, expected)


@pytest.mark.parametrize("collator", [TheirFlattening(), DataCollatorWithFlattening()])
def test_unpacked_documents_may_be_flattened(collator, tmp_path):
    """gpt_oss needs us: transformers makes its mask without looking at position_ids."""
    model, dataset = tiny_model("gpt_oss"), Dataset.from_list(DOCUMENTS)
    expected = by_hand(model, DOCUMENTS[:4])
    without = first_step(copy.deepcopy(model), dataset, tmp_path, collator=collator)
    with pytest.raises(AssertionError):
        assert_same_step(without, expected)
    enable_packing(model)
    assert_same_step(first_step(model, dataset, tmp_path, collator=collator), expected)


@pytest.mark.parametrize("before", [True, False], ids=["then peft", "after peft"])
def test_lora(before, tmp_path):
    def lora(model):
        torch.manual_seed(3)
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        return get_peft_model(model, config)

    dataset, model = packed(), tiny_model("gemma2")
    expected = by_hand(lora(tiny_model("gemma2")), documents_of_rows(dataset, range(4)))
    if before:
        enable_packing(model)
    model = lora(model)
    if not before:
        enable_packing(model)
    assert_same_step(first_step(model, dataset, tmp_path), expected)


def test_a_class_that_ignores_the_number_of_items(tmp_path):
    """Micro-batches of very unequal weight: their mean is not that of their tokens."""
    model, dataset = tiny_model("llama"), packed()
    type_before = type(model)

    class Ignores(type_before):
        accepts_loss_kwargs = False

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **k):
            k.pop("num_items_in_batch", None)
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                labels=labels,
                **k,
            )

    model.__class__ = Ignores
    expected = by_hand(tiny_model("llama"), documents_of_rows(dataset, range(4)))
    enable_packing(model)
    assert_same_step(first_step(model, dataset, tmp_path), expected)
    # Its ordinary rows are now counted by Trainer too, so their loss is divided by us.
    rows = Dataset.from_list(DOCUMENTS[:4])
    collator = DataCollatorForSeq2Seq(tiny_tokenizer())
    ordinary = first_step(model, rows, tmp_path, collator=collator)
    assert_same_step(ordinary, by_hand(tiny_model("llama"), DOCUMENTS[:4]))


def test_label_smoothing_sees_the_same_targets(tmp_path):
    model, dataset = tiny_model("llama"), packed()
    expected = by_hand(model, documents_of_rows(dataset, range(4)), loss="smoothed")
    enable_packing(model)
    found = first_step(model, dataset, tmp_path, label_smoothing_factor=0.1)
    assert_same_step(found, expected)


def test_gradient_checkpointing_makes_the_same_step(tmp_path):
    model, dataset = tiny_model("gemma2"), packed()
    expected = by_hand(model, documents_of_rows(dataset, range(4)))
    enable_packing(model)
    assert_same_step(first_step(model, dataset, tmp_path, gradient_checkpointing=True), expected)


def test_bf16_autocast_is_checked_again_and_close(tmp_path):
    model, dataset = tiny_model("llama"), packed()
    expected, _ = by_hand(model, documents_of_rows(dataset, range(4)))
    enable_packing(model)
    packing = packing_of(model)  # before accelerate wraps the forward
    loss, _ = first_step(model, dataset, tmp_path, bf16=True)
    assert loss == pytest.approx(expected, rel=2**-7)  # bf16 keeps 8 bits
    assert {check.precision.dtype for check in packing.guard.passed} == {
        torch.float32,
        torch.bfloat16,
    }


def test_evaluation_is_the_mean_of_the_means_of_micro_batches(tmp_path):
    """As plain Trainer has it, padded or packed; each mean is exact."""
    model, dataset = tiny_model("gpt_oss"), packed()
    rows = [documents_of_rows(dataset, [row]) for row in range(len(dataset))]
    expected = np.mean([by_hand(model.eval(), documents)[0] for documents in rows])
    enable_packing(model)
    trainer = trainer_of(model, dataset, tmp_path, evaluated=dataset, per_device_eval_batch_size=1)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert {check.training for check in packing_of(model).guard.passed} == {True, False}


def test_the_check_leaves_random_numbers_and_weights_alone(tmp_path):
    def run(**options):
        torch.manual_seed(1)
        model = tiny_model("gpt2_dropout")
        enable_packing(model, **options)
        trainer = trainer_of(model, packed(), tmp_path, max_steps=3, learning_rate=0.01)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert run() == run(isolation_check="off", attention="documents")


def test_workers_that_are_spawned_give_rows_out_where_a_model_is_enabled():
    """They are sent the data set, and have no model."""
    enabled_models.clear()
    sent = pickle.loads(pickle.dumps(packed()))
    with pytest.raises(RuntimeError, match="call enable_packing"):
        sent.__getitems__([0])
    model = tiny_model("llama")
    enable_packing(model)
    sent = pickle.loads(pickle.dumps(packed()))
    enabled_models.clear()
    assert len(sent.__getitems__([0, 1])) == 1


# --- controls -------------------------------------------------------------------------------------


def test_without_enable_packing_rows_are_not_given_out(tmp_path):
    enabled_models.clear()
    with pytest.raises(RuntimeError, match="call enable_packing"):
        first_step(tiny_model("llama"), packed(), tmp_path)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "falcon_mamba"])
def test_a_model_that_is_not_enabled_fails_the_comparison(name, tmp_path):
    other, model, dataset = tiny_model("llama"), tiny_model(name), packed()
    enable_packing(other)  # so that rows are given out
    found = first_step(model, dataset, tmp_path)
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(model, documents_of_rows(dataset, range(4))))


class AllOnes(DefaultDataCollator):
    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def test_a_collator_that_makes_a_mask_of_ones_is_seen_through(tmp_path):
    model, dataset = tiny_model("llama"), packed()
    expected = by_hand(model, documents_of_rows(dataset, range(4)))
    enable_packing(model)
    assert_same_step(first_step(model, dataset, tmp_path, collator=AllOnes()), expected)


def test_a_model_that_leaks_whichever_way_is_refused():
    model = tiny_model("llama")

    def leak(module, inputs, output):
        return output + 0.1 * output.mean() if output.shape[1] > 17 else output

    model.model.embed_tokens.register_forward_hook(leak)
    with pytest.raises(RuntimeError, match="documents LEAK into each other"):
        enable_packing(model, attention="documents")
    enable_packing(model, attention="documents", isolation_check="warn")


# --- what it refuses ------------------------------------------------------------------------------


def test_what_is_no_decoder_is_refused():
    with pytest.raises(TypeError, match="takes a transformers model, got str"):
        enable_packing("llama")
    with pytest.raises(ValueError, match="output_router_logits"):
        enable_packing(tiny_model("qwen3_moe", output_router_logits=True))
    with pytest.raises(ValueError, match="isolation_check='no'"):
        enable_packing(tiny_model("llama"), isolation_check="no")


def test_another_loss_is_refused():
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().mean() * 0 + 1.0
    with pytest.raises(ValueError, match="another loss"):
        enable_packing(model)


def test_labels_of_a_language_modeling_collator_are_refused(tmp_path):
    model = tiny_model("llama")
    enable_packing(model)
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    with pytest.raises(ValueError, match="first token of a packed document has a label"):
        first_step(model, packed(), tmp_path, collator=collator)


def test_a_mask_beside_boundaries_is_refused():
    model = tiny_model("llama")
    enable_packing(model)
    batch = PackedCollator()(DOCUMENTS[:2])
    with pytest.raises(ValueError, match="came with an attention_mask"):
        model(**batch, attention_mask=torch.ones_like(batch["input_ids"]))


def test_rows_stacked_by_hand_are_refused():
    model, dataset = tiny_model("llama"), packed()
    enable_packing(model)
    two = DataCollatorForSeq2Seq(tiny_tokenizer())([dataset[0], dataset[1]])
    with pytest.raises(ValueError, match="a packed batch is one row, got 2"):
        model(**two)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused_also_if_they_come_later(kind, tmp_path):
    def tuned(model):
        return get_peft_model(model, kind(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4))

    with pytest.raises(ValueError, match="virtual tokens"):
        enable_packing(tuned(tiny_model("llama")))
    model = tiny_model("llama")
    enable_packing(model)
    with pytest.raises(ValueError, match="virtual tokens"):
        first_step(tuned(model), packed(), tmp_path)


@pytest.mark.parametrize("is_embedded", [False, True], ids=["ids", "embedded"])
def test_a_document_beyond_a_length_constant_is_checked_when_it_comes(is_embedded, monkeypatch):
    monkeypatch.setattr("trl_packing.plain_trainer.enable._REACH", 30)
    model = tiny_model("mistral", sliding_window=40)
    enable_packing(model)
    assert packing_of(model).reach == 30
    model.train()(**PackedCollator()(documents_of_lengths([35, 9])))
    assert packing_of(model).reach == 30
    batch = dict(PackedCollator()(documents_of_lengths([60, 9])))
    if is_embedded:
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    model(**batch)
    assert packing_of(model).reach == 60


# --- what was refused stays refused ---------------------------------------------------------------


def leak_in_rows_beyond(model, least):
    """Mix all positions of rows of more than `least` tokens, whichever way they are run."""

    def leak(module, inputs, output):
        return output + 0.1 * output.mean() if output.shape[1] > least else output

    model.model.embed_tokens.register_forward_hook(leak)
    return model


def flattened(lengths=(9, 20, 12)):
    return PackedCollator()(documents_of_lengths(lengths))


def test_a_model_that_leaks_is_refused_by_every_packed_call_too():
    model = leak_in_rows_beyond(tiny_model("llama"), 17)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="documents LEAK into each other"):
            enable_packing(model, attention="documents")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="documents LEAK into each other"):
                model.train()(**flattened())


def test_another_loss_is_refused_before_anything_is_put_on_the_model():
    """A model that is left half enabled would train on our loss instead of its own."""
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().mean() * 0 + 1.0
    expected = model(**flattened()).loss.item()
    before = dict(vars(model))
    for _ in range(2):
        with pytest.raises(ValueError, match="another loss"):
            enable_packing(model)
        assert vars(model) == before
        assert model(**flattened()).loss.item() == expected == 1.0
    enable_packing(model, isolation_check="off")
    assert model(**flattened()).loss.item() > 2, "the control: enabled, the loss is ours"


@pytest.mark.parametrize(
    ("dtype", "breaks_off_at"),
    [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2), (torch.bfloat16, 3)],
)
def test_a_check_that_breaks_off_leaves_no_backend_that_leaks(dtype, breaks_off_at, monkeypatch):
    """bloom needs padded rows. In another precision, the search starts with faster backends."""
    monkeypatch.setattr("trl_packing.plain_trainer.enable._REACH", 30)
    monkeypatch.setattr("trl_packing.plain_trainer.enable.length_constants", lambda model: [40])
    model, reference = architectures.tiny_model("bloom"), architectures.tiny_model("bloom")
    assert enable_packing(model).backend == "padded"
    check, calls = trl_packing.isolation.check.check_isolation, []

    def breaks_off(*arguments, **options):
        calls.append(options["attention"])
        if len(calls) == breaks_off_at:
            raise torch.OutOfMemoryError("out of memory, a test says")
        return check(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(trl_packing.isolation.fallback, "check_isolation", breaks_off)
        autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
        with pytest.raises(torch.OutOfMemoryError), autocast:
            model.train()(**PackedCollator()(tiny_documents((60, 9))))
    row = PackedCollator()(tiny_documents((20, 9)))
    logits = model(**row).logits
    for ids, got in zip(row["input_ids"].split([20, 9], 1), logits.split([20, 9], 1), strict=True):
        expected = reference(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_documents_beyond_a_constant_are_checked_in_the_other_mode_too(monkeypatch):
    monkeypatch.setattr("trl_packing.plain_trainer.enable._REACH", 30)
    model = tiny_model("mistral", sliding_window=40)
    enable_packing(model)
    check, longest = trl_packing.isolation.check.check_isolation, []

    def record(model, documents, **options):
        longest.append(max(map(len, documents), default=0))
        return check(model, documents, **options)

    monkeypatch.setattr(trl_packing.isolation.fallback, "check_isolation", record)
    model.train()(**flattened([60, 9]))
    model.eval()(**flattened([60, 9]))
    assert longest == [60, 60]


def test_documents_beyond_a_constant_are_checked_in_a_mode_that_had_passed(monkeypatch):
    monkeypatch.setattr("trl_packing.plain_trainer.enable._REACH", 30)
    model = tiny_model("mistral", sliding_window=40)
    enable_packing(model)
    model.eval()(**flattened())
    check, longest = trl_packing.isolation.check.check_isolation, []

    def record(model, documents, **options):
        longest.append(max(map(len, documents), default=0))
        return check(model, documents, **options)

    monkeypatch.setattr(trl_packing.isolation.fallback, "check_isolation", record)
    model.train()(**flattened([60, 9]))
    model.eval()(**flattened([60, 9]))
    model.train()(**flattened([60, 9]))
    assert longest == [60, 60]


def test_a_fallback_that_one_mode_needs_is_kept_in_the_other(monkeypatch):
    check, checked = trl_packing.isolation.check.check_isolation, []

    def leaks_in_training(*arguments, attention, training, **options):
        is_first = attention.startswith("document-wise SDPA")
        checked.append((is_first, training))
        report = check(*arguments, attention=attention, training=training, **options)
        leaks = training and is_first
        return replace(report, verdict="leaks") if leaks else report

    monkeypatch.setattr(trl_packing.isolation.fallback, "check_isolation", leaks_in_training)
    model = tiny_model("llama")
    assert enable_packing(model).backend == "model"
    for _ in range(2):
        model.eval()(**flattened())
        model.train()(**flattened())
    assert checked == [(True, True), (False, True), (False, False)]


def test_a_model_that_cannot_run_packed_documents_is_refused_under_warn_too():
    """A warning would only come before the same error in the first step."""
    with pytest.raises(RuntimeError, match="BloomForCausalLM cannot run packed documents by"):
        enable_packing(architectures.tiny_model("bloom"), attention="mask", isolation_check="warn")


def test_a_sharded_model_relies_on_a_check_that_passed_only(monkeypatch):
    """Inside a forward of a sharded model nothing can be checked."""
    for model, expected in (
        (tiny_model("llama"), nullcontext()),
        (
            leak_in_rows_beyond(tiny_model("llama"), 17),
            pytest.raises(RuntimeError, match="no check of this model has passed"),
        ),
    ):
        with contextlib.suppress(RuntimeError):
            enable_packing(model, attention="documents")
        with monkeypatch.context() as patch:
            patch.setattr("trl_packing.plain_trainer.enable.is_sharded", lambda model: True)
            for _ in range(2):
                with expected:
                    model.eval()(**flattened())


# --- what else the model does ---------------------------------------------------------------------


def test_the_rest_of_the_model_is_as_it_was(tmp_path):
    model, plain = tiny_model("gpt_oss"), tiny_model("gpt_oss")
    enable_packing(model)
    batch = DataCollatorForSeq2Seq(tiny_tokenizer(), padding="longest")(DOCUMENTS[:3])
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=0, atol=0)
    torch.testing.assert_close(model(**batch).loss, plain(**batch).loss)
    prompt = {"input_ids": batch["input_ids"][:1, :3], "attention_mask": torch.ones(1, 3).long()}
    kwargs = {"max_new_tokens": 5, "do_sample": False}
    assert (
        model.generate(**prompt, **kwargs).tolist() == plain.generate(**prompt, **kwargs).tolist()
    )


def test_nothing_of_it_is_saved(tmp_path):
    model = tiny_model("llama")
    enable_packing(model)
    trainer = trainer_of(model, packed(), tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "trl_packing" not in json.dumps(config)
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert "_packing" not in vars(loaded)
    assert loaded.config._attn_implementation == "sdpa"


def test_a_copy_trains_its_own_weights():
    model = tiny_model("llama")
    enable_packing(model)
    copied = copy.deepcopy(model)
    copied(**PackedCollator()(DOCUMENTS[:3]), num_items_in_batch=torch.tensor(9)).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert copied.lm_head.weight.grad is not None


def test_enabling_twice_is_enabling_once(tmp_path):
    model, dataset = tiny_model("gpt_oss"), packed()
    expected = by_hand(model, documents_of_rows(dataset, range(4)))
    enable_packing(model)
    enable_packing(model, dataset)
    assert_same_step(first_step(model, dataset, tmp_path), expected)


# --- the data set ---------------------------------------------------------------------------------


def test_rows_hold_every_document_once_and_number_it():
    dataset = packed()
    seen = []
    for row in dataset[:]:
        numbers = row["attention_mask"].tolist()
        assert len(numbers) == len(row["input_ids"]) <= PACK_LEN
        assert numbers == sorted(numbers)
        for number in range(1, max(numbers) + 1):
            here = row["attention_mask"] == number
            assert row["labels"][here][0] == -100
            seen.append(row["input_ids"][here].tolist())
    assert sorted(seen) == sorted(document["input_ids"] for document in DOCUMENTS)


def test_a_data_loader_joins_the_rows_of_a_micro_batch():
    model, dataset = tiny_model("llama"), packed()
    enable_packing(model)
    loader = DataLoader(dataset, batch_size=3, collate_fn=DefaultDataCollator(), num_workers=1)
    batches = list(loader)
    assert all(len(batch["input_ids"]) == 1 for batch in batches)
    first = batches[0]["attention_mask"][0]
    assert first.max() == sum(len(dataset.plan[row]) for row in range(3))
    assert sum(int((b["labels"] != -100).sum()) for b in batches) == sum(
        max(length - 2, 0) for length in LENGTHS
    )


def test_padding_of_the_documents_is_left_out():
    padded = [
        {
            "input_ids": torch.tensor([0] * 5 + d["input_ids"]),
            "labels": torch.tensor([-100] * 5 + d["labels"]),
            "attention_mask": torch.tensor([0] * 5 + [1] * len(d["input_ids"])),
        }
        for d in DOCUMENTS
    ]
    expected = [row["input_ids"].tolist() for row in packed()[:]]
    for dataset in (
        padded,
        Dataset.from_list([{k: v.tolist() for k, v in d.items()} for d in padded]),
    ):
        rows = PackedDataset(dataset, tiny_tokenizer(), PACK_LEN)[:]
        assert [row["input_ids"].tolist() for row in rows] == expected


def test_a_transform_makes_the_rows():
    dataset = Dataset.from_list([{"text": "ab"}, {"text": "c"}])
    dataset = dataset.with_transform(lambda b: {"input_ids": [list(t.encode()) for t in b["text"]]})
    rows = PackedDataset(dataset, None, 8, shuffle_seed=None)[:]
    assert [row["input_ids"].tolist() for row in rows] == [[97, 98, 99]]
    assert rows[0]["labels"].tolist() == [-100, 98, -100]


@pytest.mark.parametrize("seed", [None, -1])
def test_without_a_seed_nothing_is_shuffled(seed):
    dataset = packed(shuffle_seed=seed, strategy="next_fit")
    assert np.concatenate(list(dataset.plan)).tolist() == list(range(len(DOCUMENTS)))
    other = packed(shuffle_seed=7)
    assert [r.tolist() for r in other.plan] != [r.tolist() for r in packed(shuffle_seed=8).plan]


def test_stat_prints_both_counts_and_how_full_rows_are(capsys):
    dataset = packed()
    dataset.stat()
    printed = capsys.readouterr().out
    assert f"16 documents -> {len(dataset)} rows of 80" in printed
    assert f"{sum(LENGTHS) / 16:.1f} -> {sum(LENGTHS) / len(dataset):.1f} tokens" in printed


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="document 1 has 60 tokens but pack_len is 50"):
        PackedDataset(Dataset.from_list(DOCUMENTS), None, 50)
    for column, value in (("loss_weights", [1.0] * 3), ("seq_lengths", [2, 1])):
        rows = Dataset.from_list([{**DOCUMENTS[0], column: value}])
        with pytest.raises(ValueError, match=f"the data set has {column}.*PackedSFTTrainer"):
            PackedDataset(rows, None, 50)


def rows_of_ranks(dataset, ranks, batch_size):
    """The row indices that accelerate gives to each rank in an epoch."""
    batches = BatchSampler(range(len(dataset)), batch_size, drop_last=False)
    return [i for r in range(ranks) for b in BatchSamplerShard(batches, ranks, r) for i in b]


def test_with_a_multiple_of_rows_no_rank_trains_a_row_twice():
    dataset = packed()
    assert len(rows_of_ranks(dataset, 4, 2)) > len(dataset)  # what the multiple is for
    even = packed(rows_multiple_of=8)
    assert sorted(rows_of_ranks(even, 4, 2)) == list(range(len(even)))
    tokens = sorted(int(t) for row in even[:] for t in row["input_ids"])
    assert tokens == sorted(t for document in DOCUMENTS for t in document["input_ids"])


def test_rows_of_no_document_are_a_masked_token():
    dataset = packed(DOCUMENTS[:1], rows_multiple_of=4)
    assert len(dataset) == 4
    assert [(len(row["input_ids"]), row["labels"].tolist()) for row in dataset[1:]] == [
        (1, [-100])
    ] * 3


def batches_of(folder, dataset, repacks, resume=None, **options):
    """Return the tokens of every micro-batch that a Trainer runs."""
    model = tiny_model("llama")
    enable_packing(model)
    seen = []

    class Recording(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            seen.append(inputs["input_ids"][0].tolist())
            return super().training_step(model, inputs, num_items_in_batch)

    callbacks = [RepackEveryEpoch(dataset)] if repacks else []
    trainer = trainer_of(
        model,
        dataset,
        folder,
        callbacks=callbacks,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=-1,
        train_sampling_strategy="random",
        **options,
    )
    trainer.__class__ = Recording
    trainer.train(resume_from_checkpoint=resume)
    return seen


def test_rows_are_drawn_anew_every_epoch_if_asked_for(tmp_path):
    dataset = packed()
    same = batches_of(tmp_path, packed(), False, num_train_epochs=2)
    half = len(dataset)
    assert sorted(same[:half]) == sorted(same[half:])
    anew = batches_of(tmp_path, dataset, True, num_train_epochs=2)
    assert len(anew) == 2 * half
    assert sorted(anew[:half]) != sorted(anew[half:])
    everything = sorted(t for document in DOCUMENTS for t in document["input_ids"])
    for epoch in (anew[:half], anew[half:]):
        assert sorted(t for row in epoch for t in row) == everything


def test_a_resumed_run_sees_the_batches_that_it_would_have_seen(tmp_path):
    rows = len(packed())
    steps = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": rows + 2}
    whole = batches_of(tmp_path, packed(), True, **steps)
    checkpoint = str(tmp_path / f"checkpoint-{rows + 2}")
    resumed = batches_of(tmp_path / "again", packed(), True, resume=checkpoint, **steps)
    assert resumed == whole[rows + 2 :]


# --- from raw data --------------------------------------------------------------------------------


@pytest.fixture
def math_file(tmp_path):
    path = tmp_path / "math.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MATH))
    return str(path)


def text_of(documents, tokenizer):
    """(text, what of it is trained) of every document of packed rows."""
    found = []
    for row in documents[:]:
        for number in range(1, int(row["attention_mask"].max()) + 1):
            here = row["attention_mask"] == number
            ids, labels = row["input_ids"][here], row["labels"][here]
            found.append((tokenizer.decode(ids), tokenizer.decode(labels[labels != -100])))
    return sorted(found)


def test_queries_and_responses_become_packed_rows(math_file):
    tokenizer = tiny_tokenizer()
    dataset = make_supervised_dset(
        tokenizer=tokenizer,
        data_path=math_file,
        pack_len=200,
        query_field="q",
        resp_field="a",
        prompt_template="qa",
    )
    assert isinstance(dataset, PackedDataset)
    assert text_of(dataset, tokenizer) == sorted(
        (f"Question: {row['q']}\nAnswer:\n{row['a']}<eos>", f"{row['a']}<eos>") for row in MATH
    )


def test_templates_of_dart_math_are_read(math_file, tmp_path):
    parts = {
        "sys_prompt": "Be {brief}.\n",
        "query_prompt": "User:\n",
        "prompt_after_query": "\n\n",
        "resp_prompt": "Assistant:\n",
    }
    (tmp_path / "own.json").write_text(json.dumps(parts))
    tokenizer = tiny_tokenizer()
    for template in (parts, str(tmp_path / "own.json")):
        dataset = make_supervised_dset(
            tokenizer, math_file, "q", "a", pack_len=200, prompt_template=template
        )
        assert text_of(dataset, tokenizer)[0][0].startswith(
            "Be {brief}.\nUser:\nWhat is 0 + 0?\n\nAssistant:It is 0."
        )
    with pytest.raises(ValueError, match="must have query_prompt"):
        make_supervised_dset(tokenizer, math_file, "q", "a", prompt_template={"id": "x"})


def test_several_files_have_fields_of_their_own(math_file, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"query": "Why?", "response": "So."}) + "\n")
    tokenizer = tiny_tokenizer()
    dataset = make_supervised_dset(
        tokenizer, [math_file, str(other)], ["q", "query"], ["a", "response"], pack_len=300
    )
    assert len(dataset.lengths) == 13
    with pytest.raises(ValueError, match="2 fields"):
        make_supervised_dset(tokenizer, [math_file] * 3, ["q", "query"])


@pytest.mark.parametrize("pack_len", [None, 0, -1])
def test_without_a_pack_len_documents_stay_documents(math_file, pack_len):
    documents = make_supervised_dset(tiny_tokenizer(), math_file, "q", "a", pack_len=pack_len)
    assert documents.column_names == ["input_ids", "labels", "attention_mask"]
    assert len(documents) == 12
    assert documents[0]["attention_mask"] == [1] * len(documents[0]["input_ids"])


def test_what_is_cut_is_told(math_file, caplog):
    with caplog.at_level("WARNING", "trl_packing.plain_trainer.supervised"):
        dataset = make_supervised_dset(
            tiny_tokenizer(), math_file, "q", "a", pack_len=18, prompt_template="{query} "
        )
    assert dataset.lengths.max() == 18
    assert "lost" in caplog.text
    with pytest.raises(ValueError, match="18"):
        make_supervised_dset(tiny_tokenizer(), math_file, "q", "a", pack_len=18, overflow="error")


def test_the_four_lines_of_the_page_run(math_file, tmp_path):
    """`monkey_patch4pack` is `enable_packing`, and Trainer calls the tokenizer processing_class."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    enable_packing(model)
    pack_dset = make_supervised_dset(
        tokenizer=tokenizer,
        data_path=math_file,
        pack_len=200,
        query_field="q",
        resp_field="a",
        prompt_template="alpaca",
    )
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", max_steps=2)
    trainer = Trainer(model=model, args=args, processing_class=tokenizer, train_dataset=pack_dset)
    assert trainer.train().training_loss > 0


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_train_what_one_rank_accumulates(tmp_path):
    launch("helpers.distributed.plain", str(tmp_path), ranks=2)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    model, dataset = tiny_model("gpt_oss"), packed(rows_multiple_of=2)
    enable_packing(model)
    options = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.05, "optim": "sgd"}
    trainer = trainer_of(
        model,
        dataset,
        tmp_path,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert ranks[0]["fp32"]["losses"] == pytest.approx(losses, rel=TOLERANCE)
    for rank in ranks:
        for name, value in model.state_dict().items():
            close = {"rtol": 0, "atol": 1e-5, "msg": name}
            torch.testing.assert_close(rank["fp32"]["state"][name], value, **close)
        # In bf16, and in evaluation, the check runs inside the forwards of both ranks.
        assert len(rank["bf16"]["checked"]) == 3
        assert rank["bf16"]["losses"] == pytest.approx(losses, rel=2**-6)
    assert ranks[0]["fp32"]["eval_loss"] == ranks[1]["fp32"]["eval_loss"]
