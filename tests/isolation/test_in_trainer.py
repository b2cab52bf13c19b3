"""`PackedSFTTrainer` checks isolation on its own documents before the first step."""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from helpers.combinations import combined
from helpers.leaks import (
    AddRowMean,
    OneDocument,
    documents,
    dynamic_ntk,
    longrope,
    lora,
    packed_model,
    with_layer,
)
from helpers.tiny import (
    documents_of_lengths,
    tiny_model,
    tiny_tokenizer,
)

import trl_packing.isolation.guard
from trl_packing import (
    PackedSFTConfig,
    PackedSFTTrainer,
    check_isolation,
)


def trainer(model, folder, lengths=(5, 9, 30, 12, 7, 20, 3, 16), collator=None, **options):
    return PackedSFTTrainer(
        model,
        PackedSFTConfig(
            output_dir=str(folder),
            **{
                "max_length": 256,
                "max_steps": 1,
                "logging_steps": 1,
                "save_strategy": "no",
                "report_to": "none",
                "disable_tqdm": True,
                "bf16": False,
                **options,
            },
        ),
        data_collator=collator,
        train_dataset=Dataset.from_list(documents_of_lengths(lengths)),
        processing_class=tiny_tokenizer(),
    )


# Under attention="auto" most of these would train exactly, by a slower way (test_exact_way.py).
NAMED = {"attention": "documents"}

LEAKING = {
    "row mean": (lambda: with_layer(AddRowMean), {}),
    "in training only": (lambda: with_layer(AddRowMean, only_in_training=True), {}),
    "longrope": (longrope, {"lengths": (10, 12, 80, 100)}),
    "dynamic NTK": (dynamic_ntk, {"lengths": (10, 12, 80, 100)}),
    "boundaries lost": (lambda: packed_model("llama"), {"collator": OneDocument()}),
}


@pytest.mark.parametrize(("build", "options"), LEAKING.values(), ids=LEAKING)
def test_training_stops_before_the_first_step(build, options, tmp_path):
    model = build()
    way = r"document-wise SDPA \(attention='documents'\)"
    expected = rf"LEAK.*{type(model).__name__}, {way}, training mode"
    run = trainer(model, tmp_path, **options, **NAMED)
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(RuntimeError, match=expected):
        run.train()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("name", "wrap"), combined(["llama", "gemma2"], [lambda model: model, lora])
)
def test_a_bf16_run_is_judged_as_sharply_as_any(name, wrap, tmp_path):
    """Master weights are float32, and autocast is taken off: the noise is float32's."""
    run = trainer(wrap(packed_model(name)), tmp_path, bf16=True, use_cpu=True)
    run.train()
    report = check_isolation(run.model_wrapped, documents(3, 60), training=True, fused_head=True)
    assert report.noise < 1e-4
    leaking = trainer(
        wrap(with_layer(AddRowMean, name)), tmp_path, bf16=True, use_cpu=True, **NAMED
    )
    with pytest.raises(RuntimeError, match=r"LEAK.*document-wise SDPA"):
        leaking.train()


def test_training_goes_on_below_the_threshold(tmp_path):
    for build in (longrope, dynamic_ntk):
        trainer(build(), tmp_path, lengths=(10, 12, 30, 50)).train()
        trainer(build(), tmp_path, lengths=(10, 12, 80, 100), max_length=48).train()


def stopped(probe):
    return pytest.raises(RuntimeError, match=probe)


def test_rows_that_came_packed_are_probed_by_their_documents(tmp_path):
    """The rows pass the threshold; only a document that does may leak."""
    for lengths, leaks in (((40, 40), False), ((10, 100), True)):
        first, second = documents_of_lengths(lengths)
        row = {key: first[key] + second[key] for key in ("input_ids", "labels")}
        run = trainer(longrope(), tmp_path, **NAMED)
        run.train_dataset = Dataset.from_list([row | {"seq_lengths": list(lengths)}] * 2)
        with stopped("after 100 tokens") if leaks else nullcontext():
            run.train()


def test_a_stream_is_probed_to_where_max_length_lets_it_reach(tmp_path):
    stream = Dataset.from_list(documents_of_lengths([20] * 8)).to_iterable_dataset()
    for max_length, leaks in ((60, False), (256, True)):
        run = trainer(longrope(), tmp_path, max_length=max_length, **NAMED)
        run.train_dataset = stream
        with stopped("after 65 tokens") if leaks else nullcontext():
            run.train()


def test_evaluation_is_checked_on_its_own_documents(tmp_path):
    run = trainer(longrope(), tmp_path, **NAMED)
    run.evaluate(run.train_dataset)
    with pytest.raises(RuntimeError, match="evaluation mode, after 100 tokens"):
        run.evaluate(Dataset.from_list(documents_of_lengths([20, 30, 100])))


def test_a_warning_lets_training_go_on(tmp_path, caplog):
    run = trainer(with_layer(AddRowMean), tmp_path, isolation_check="warn", **NAMED)
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        run.train()
    assert run.state.global_step == 1
    (said,) = [r.getMessage() for r in caplog.records if "LEAK" in r.getMessage()]
    assert "LlamaForCausalLM" in said


def test_off_checks_nothing(tmp_path, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("isolation was checked")

    run = trainer(with_layer(AddRowMean), tmp_path, isolation_check="off")
    monkeypatch.setattr(trl_packing.isolation.guard, "check_probes", refuse)
    run.train()
    run.evaluate(run.train_dataset)
    assert run.state.global_step == 1


def test_evaluation_is_checked_in_its_own_mode(tmp_path):
    model = with_layer(AddRowMean, only_in_training=True)
    run = trainer(model, tmp_path, **NAMED)
    run.evaluate(run.train_dataset)
    with pytest.raises(RuntimeError, match="training mode"):
        run.train()


@pytest.mark.parametrize("alpha", [5, 5.0, None], ids=["NEFTune 5", "NEFTune 5.0", "no NEFTune"])
def test_a_dropout_run_is_the_same_with_the_check_on_and_off(alpha, tmp_path, monkeypatch):
    checks = []
    original = trl_packing.isolation.check.check_probes

    def counted(*arguments, **options):
        checks.append(original(*arguments, **options))
        return checks[-1]

    monkeypatch.setattr(trl_packing.isolation.guard, "check_probes", counted)
    losses, weights = [], []
    for isolation_check in ("error", "off"):
        run = trainer(
            tiny_model("gpt2_dropout"),
            tmp_path,
            isolation_check=isolation_check,
            max_steps=3,
            max_length=32,
            per_device_train_batch_size=1,
            neftune_noise_alpha=alpha,
        )
        run.train()
        losses.append([e["loss"] for e in run.state.log_history if "loss" in e])
        weights.append(run.model.state_dict())
        assert run.model.transformer.drop.p == 0.1
    assert [report.verdict for report in checks] == ["isolated"]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
