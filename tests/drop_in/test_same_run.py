"""Losses, gradients, logs and parameters equal those of TRL's own run, step by step."""

import math

import numpy as np
import pytest
from helpers.combinations import fast
from helpers.drop_in import (
    PackedSFTTrainer,
    assert_same_run,
    both_modes,
    logged,
    packed_only,
    sgd_run,
    unchanged,
)
from helpers.tiny import MODELS, tiny_dataset, tiny_iterable, tiny_model
from trl import SFTTrainer


def test_the_comparison_can_fail(tmp_path):
    """One document more, or one trained token more in each document, is seen."""
    run = sgd_run(tmp_path, SFTTrainer)
    for changes in ({"rows": 23}, {"form": "language_modeling"}):
        with pytest.raises(AssertionError):
            assert_same_run(sgd_run(tmp_path, PackedSFTTrainer, **changes), run, ("loss",))


@pytest.mark.parametrize("form", ["language_modeling", "prompt_completion", "tokenized_labels"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_unpacked_run_equals_trl_step_by_step(tmp_path, form, accumulation):
    """22 documents, 4 a batch: the last step is a short one."""
    ours, theirs = (
        sgd_run(tmp_path, cls, form=form, gradient_accumulation_steps=accumulation)
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    # TRL's accuracy is a mean of micro-batch means, and ours is one of the whole step.
    metrics = ("mean_token_accuracy", "entropy") if accumulation == 1 else ()
    assert_same_run(ours, theirs, ("loss", "grad_norm", "num_tokens", "epoch", *metrics))
    assert ours.state.global_step == math.ceil(22 / (4 * accumulation))


@pytest.mark.parametrize(
    "name", fast((n for n in MODELS if n != "gpt2_dropout"), ("llama", "gemma2", "qwen3_moe"))
)
def test_unpacked_run_of_every_model_equals_trl(tmp_path, name):
    """Completion-only, since TRL scales gpt2's full loss by (tokens − documents) / tokens."""
    ours, theirs = (
        sgd_run(
            tmp_path, cls, model=name, rows=8, router_aux_loss_coef=0.0 if "moe" in name else None
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, theirs)
    assert unchanged(dict(tiny_model(name).named_parameters()), ours) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dft"},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"selective": True}},
        {"max_grad_norm": 0.01},
        {"weight_decay": 0.1},
        {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
        {"dataloader_drop_last": True},
        {"num_train_epochs": 2},
        {"max_steps": 3},
        {"max_length": 30},
        {"max_length": None},
        {"completion_only_loss": False},
        {"logging_steps": 2},
        {"pad_to_multiple_of": 8},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 64},
        {"torch_empty_cache_steps": 1},
        {"average_tokens_across_devices": False},
        {"include_num_input_tokens_seen": "non_padding"},
        {"shuffle_dataset": True},
        {"accelerator_config": {"even_batches": False}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_unpacked_run_with_this_option_equals_trl(tmp_path, changes):
    ours, theirs = (
        sgd_run(tmp_path, cls, **{"rows": 14, **changes}) for cls in (PackedSFTTrainer, SFTTrainer)
    )
    keys = ["loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen"]
    if "pad_to_multiple_of" not in changes:
        keys.append("num_tokens")
    # Of several micro-batches TRL logs the mean of their means; see the test below.
    if not {"gradient_accumulation_steps", "logging_steps"} & set(changes):
        keys += ["mean_token_accuracy", "entropy"]
    assert_same_run(ours, theirs, keys)
    assert len(ours.get_train_dataloader()) == len(theirs.get_train_dataloader())


def test_entropy_of_several_steps_is_trls_weighed_by_their_trained_tokens(tmp_path):
    ours, theirs = (
        sgd_run(tmp_path, cls, rows=14, logging_steps=2) for cls in (PackedSFTTrainer, SFTTrainer)
    )
    each = sgd_run(tmp_path, SFTTrainer, rows=14, logging_steps=1)
    targets = [labels[1:] for labels in each.train_dataset["labels"]]
    by_document = [sum(label != -100 for label in labels) for labels in targets]
    trained = [sum(by_document[i : i + 4]) for i in range(0, 14, 4)]
    by_step = logged(each, "entropy")
    assert len(by_step) == len(trained) == 4
    expected = [np.average(by_step[i : i + 2], weights=trained[i : i + 2]) for i in (0, 2)]
    assert logged(ours, "entropy") == pytest.approx(expected, rel=1e-4)
    with pytest.raises(AssertionError):
        assert logged(theirs, "entropy") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_unpacked_run_over_a_stream_equals_trl_step_by_step(tmp_path, accumulation):
    ours, theirs = (
        sgd_run(
            tmp_path,
            cls,
            dataset=tiny_iterable("prompt_completion", 22),
            num_train_epochs=3.0,
            max_steps=4,
            gradient_accumulation_steps=accumulation,
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, theirs, ("loss", "grad_norm", "num_tokens"))


@both_modes
def test_logged_keys_are_those_of_trl(tmp_path, packing):
    ours, theirs = (
        sgd_run(
            tmp_path,
            cls,
            packing=packing,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=2,
            arguments={"eval_dataset": tiny_dataset("prompt_completion", 4)},
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert {*other} <= {*mine}


@packed_only
@pytest.mark.parametrize(
    "changes",
    [{}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"completion_only_loss": False}],
    ids=lambda changes: ",".join(changes) or "nll",
)
def test_a_packed_step_over_all_documents_equals_trl_unpacked(tmp_path, changes):
    ours = sgd_run(tmp_path, PackedSFTTrainer, packing=True, max_length=2048, **changes)
    theirs = sgd_run(tmp_path, SFTTrainer, per_device_train_batch_size=22, **changes)
    assert_same_run(ours, theirs)
