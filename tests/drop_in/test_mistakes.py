"""Mistakes raise an error that names them."""

import types

import pytest
import torch
from datasets import DatasetDict
from helpers.drop_in import PackedSFTTrainer, both_modes, config, packed_only, trainer_for
from helpers.tiny import tiny_dataset, tiny_iterable, tiny_model
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing.training.arguments import check_arguments

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
@both_modes
def test_context_parallelism_refuses_packing(tmp_path, packing):
    args = config(tmp_path, packing=packing, eval_packing=True)
    args.parallelism_config = types.SimpleNamespace(cp_enabled=True, sp_enabled=False)
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
