"""The constructor takes the arguments of `SFTTrainer`: models and their ids, dtypes, settings."""

import inspect
import math
from pathlib import Path

import pytest
import torch
import transformers
from helpers.drop_in import (
    PackedSFTTrainer,
    both_modes,
    packed_only,
    train_moves_all,
    trainer_for,
    trainer_from_id,
)
from helpers.tiny import MODELS, tiny_dataset, tiny_model, tiny_tokenizer
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer


def test_constructor_takes_the_arguments_of_sft_trainer():
    ours, theirs = (
        inspect.signature(c.__init__).parameters for c in (PackedSFTTrainer, SFTTrainer)
    )
    named = [p for p in ours.values() if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.default) for p in named] == [(p.name, p.default) for p in theirs.values()]
    assert all(p.annotation is not p.empty for p in named[1:])


@packed_only
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_packed(tmp_path, name):
    """Those that carry a state from token to token too: rows are padded inside the model."""
    trainer = trainer_for(
        tmp_path, model=tiny_model(name), packing=True, num_train_epochs=1, max_length=64
    )
    train_moves_all(trainer)


@both_modes
def test_a_model_id_brings_its_tokenizer(tmp_path, model_id, packing):
    trainer = trainer_from_id(model_id, tmp_path, packing=packing)
    assert trainer.processing_class.eos_token == "<|im_end|>"
    assert trainer.model.dtype == torch.float32
    train_moves_all(trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_model_init_kwargs_set_the_dtype(tmp_path, model_id, dtype):
    trainer = trainer_from_id(
        model_id,
        tmp_path,
        model_init_kwargs={"dtype": getattr(torch, dtype)},
        bf16=True,
        learning_rate=0.1,
    )
    train_moves_all(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, dtype)}


@both_modes
def test_bf16_is_the_default_and_trains_fp32_weights(tmp_path, packing):
    args = SFTConfig(output_dir=str(tmp_path), packing=packing, num_train_epochs=1, use_cpu=True)
    assert args.bf16
    trainer = PackedSFTTrainer(
        tiny_model("qwen2"), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    train_moves_all(trainer)
    assert trainer.model.dtype == torch.float32


@both_modes
def test_three_epochs_of_trl_defaults(tmp_path, model_id, packing):
    """Most of TRL's own tests run this: 17 documents, 8 a batch, bf16, a learning rate of 2e-5."""
    trainer = PackedSFTTrainer(
        model=model_id,
        args=SFTConfig(output_dir=str(tmp_path), packing=packing, use_cpu=True),
        train_dataset=tiny_dataset(rows=17),
    )
    train_moves_all(trainer)
    assert trainer.state.global_step == (3 if packing else 9)
    assert {"mean_token_accuracy", "entropy", "num_tokens"} <= {*trainer.state.log_history[-1]}
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}" / "model.safetensors").exists()


def test_args_may_be_none(tmp_path, model_id, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the default, bf16, asks for a GPU that has it; autocast on a CPU does too
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    trainer = PackedSFTTrainer(model=model_id, train_dataset=tiny_dataset())
    assert Path(trainer.args.output_dir).name == "tiny-qwen2-SFT"


def test_plain_training_arguments_are_taken(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True
    )
    trainer = PackedSFTTrainer(
        tiny_model(), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.packing is False
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@both_modes
def test_the_config_is_left_as_trl_leaves_it(tmp_path, packing):
    """The same object can go to the next trainer."""
    ours, theirs = (
        trainer_for(tmp_path, cls=cls, packing=packing).args for cls in (None, SFTTrainer)
    )
    assert ours.to_dict() == theirs.to_dict()
    assert ours.packing is packing
    again = PackedSFTTrainer(
        tiny_model(), ours, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    train_moves_all(again)
