"""Mistakes raise an error that names them."""

import types

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import DatasetDict
from helpers.drop_in import PackedSFTTrainer, both_modes, config, packed_only, trainer_for
from helpers.tiny import tiny_dataset, tiny_iterable, tiny_model, tiny_tokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import PackedSFTConfig
from trl_packing.config import check_device
from trl_packing.run.arguments import check_arguments

PADDED = DataCollatorForLanguageModeling(pad_token_id=0)
MISTAKES = [  # rows, settings and arguments that TRL refuses too, and a word of its sentence
    ("language_modeling", {"packing": True, "max_length": None}, {}, "`max_length` can't be `No"),
    ("language_modeling", {"truncation_mode": "keep_middle"}, {}, "(?i)truncation.mode"),
    ("language_modeling", {"packing": True}, {"data_collator": PADDED}, "(?i)collator"),
    ("language_modeling", {"router_aux_loss_coef": 0.5}, {}, "not a Mixture-of-Experts model"),
    (None, {}, {}, "`train_dataset` is required"),
    (DatasetDict({"train": tiny_dataset()}), {}, {}, "must be a `Dataset` or `IterableDataset`"),
    (tiny_iterable(), {"max_steps": -1}, {}, "max_steps"),
    (tiny_dataset(), {"processing_class": object()}, {}, "processing_class"),
    (tiny_dataset("images"), {}, {}, "vision"),
]


@pytest.mark.parametrize(("rows", "settings", "arguments", "text"), MISTAKES)
def test_what_cannot_be_is_refused_as_in_trl(tmp_path, rows, settings, arguments, text):
    with pytest.raises((ValueError, TypeError), match=text):
        trainer_for(tmp_path, rows, arguments=arguments, **settings)


@packed_only
def test_marks_that_a_template_lacks_are_no_reason_to_write_one(tmp_path):
    rows, tokenizer = tiny_dataset("conversational_language_modeling"), tiny_tokenizer(chat=True)
    asked = {"processing_class": tokenizer, "assistant_only_loss": True}
    with pytest.raises(ValueError, match=r"generation %} marks, .*; set train_on='assistant'"):
        trainer_for(tmp_path, rows, **asked)
    with pytest.raises(ValueError, match=r"needs a chat template, .* set chat_template_path"):
        trainer_for(tmp_path, rows, **asked | {"processing_class": tiny_tokenizer()})
    marks = tiny_tokenizer(chat="generation")
    report = trainer_for(tmp_path, rows, **asked | {"processing_class": marks}).packing_report
    assert 0 < report.trained_tokens < report.tokens


@packed_only
@pytest.mark.parametrize("name", ["no-folder", "./no-folder", "/no/folder"])
def test_a_model_that_is_not_there_is_named(tmp_path, name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"the model '{name}' .* is no folder, and cannot be"):
        PackedSFTTrainer(name, config(tmp_path), train_dataset=tiny_dataset())


@packed_only
def test_a_run_launched_on_gpus_needs_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)  # as `accelerate launch --multi_gpu` sets them (1.15)
    with pytest.raises(ValueError, match=r"on GPUs .*, but torch finds none; .* use_cpu=True"):
        PackedSFTConfig(str(tmp_path), use_cpu=False)
    with pytest.raises(ValueError, match="but torch finds none"):
        check_arguments(types.SimpleNamespace(use_cpu=False), tiny_dataset(), None)
    check_device(types.SimpleNamespace(use_cpu=True))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # torchrun
    check_device(types.SimpleNamespace(use_cpu=False))


@packed_only
@both_modes
def test_context_parallelism_refuses_packing(tmp_path, packing):
    args = config(tmp_path, packing=packing, eval_packing=True)
    args.parallelism_config = ParallelismConfig(cp_size=2)
    with pytest.raises(ValueError, match="not compatible with context parallelism"):
        PackedSFTTrainer("any", args, train_dataset=tiny_dataset())


@packed_only
@both_modes
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_one_process_has_no_batches_to_cut(tmp_path, name, packing):
    """On one process they do nothing in TRL; accelerate would cut our boundaries like rows."""
    plain, asked = (
        trainer_for(tmp_path / str(i), packing=packing, accelerator_config=config)
        for i, config in enumerate((None, {name: True}))
    )
    for trainer in (plain, asked):
        trainer.train()
    for ours, theirs in zip(plain.model.parameters(), asked.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    args = types.SimpleNamespace(accelerator_config=asked.args.accelerator_config, world_size=2)
    with pytest.raises(ValueError, match=name):
        check_arguments(args, tiny_dataset("language_modeling"), None)


@packed_only
def test_liger_without_a_gpu_and_model_init_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="use_liger_kernel=True needs a GPU"):
        trainer_for(tmp_path, use_liger_kernel=True)
    with pytest.raises(ValueError, match="model_init makes models"):
        trainer_for(tmp_path, arguments={"model_init": tiny_model})
    trainer = trainer_for(tmp_path)
    trainer.model_init = lambda trial: tiny_model()  # as hyperparameter_search asks for
    with pytest.raises(ValueError, match="model_init makes models"):
        trainer.train()
