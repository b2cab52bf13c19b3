"""Mistakes raise an error that names them, before anything is written."""

import types

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict, Features, List, Value
from helpers.drop_in import (
    PackedSFTTrainer,
    both_modes,
    config,
    packed_only,
    trainer_for,
    trainer_from_id,
)
from helpers.tiny import tiny_dataset, tiny_iterable, tiny_tokenizer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing.training.arguments import check_arguments

PADDED = DataCollatorForLanguageModeling(pad_token_id=0)
REENTRANT = {"selective": True, "use_reentrant": True}
SETTINGS = [  # settings and arguments that TRL refuses, and a word of its sentence
    ({"packing": True, "max_length": None}, {}, "`max_length` can't be `None`"),
    ({"truncation_mode": "keep_middle"}, {}, "(?i)truncation.mode"),
    ({"packing": True}, {"data_collator": PADDED}, "(?i)collator"),
    ({"loss_type": "hinge"}, {}, "loss_type"),
    ({"loss_type": "dft"}, {"compute_loss_func": lambda *a, **k: 0.0}, "loss_type='dft'"),
    ({"gradient_checkpointing_kwargs": REENTRANT}, {}, "selective"),
    ({"router_aux_loss_coef": 0.5}, {}, "not a Mixture-of-Experts model"),
]


@pytest.mark.parametrize(("settings", "arguments", "text"), SETTINGS)
def test_settings_that_cannot_be(tmp_path, settings, arguments, text):
    with pytest.raises(ValueError, match=text):
        trainer_for(tmp_path, arguments=arguments, **settings)


def test_arguments_that_cannot_be(tmp_path, model_id):
    for dataset, changes, text in (
        (None, {}, "`train_dataset` is required"),
        (DatasetDict({"train": tiny_dataset()}), {}, "must be a `Dataset` or `IterableDataset`"),
        (tiny_iterable(), {"max_steps": -1}, "max_steps"),
        (tiny_dataset(), {"processing_class": object()}, "processing_class"),
        (tiny_dataset("images"), {}, "vision"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            trainer_for(tmp_path, dataset, **changes)
    given = {"quantization_config": transformers.BitsAndBytesConfig(load_in_8bit=True)}
    with pytest.raises(ValueError, match="`quantization_config` both"):
        trainer_from_id(model_id, tmp_path, given, model_init_kwargs=given)


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
        check_arguments(args, tiny_dataset("language_modeling"))


def _no_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


LONG = [{"prompt": "a long prompt " * 9, "completion": "x"}]
MISTAKES = {
    "no documents": ([], {}, "empty|no documents|no rows"),
    "an empty document": ([{"input_ids": []}], {}, "empty|no document|trained token"),
    "max_length 0": ([{"text": "a b c"}], {"max_length": 0}, "max_length"),
    "unknown strategy": ([{"text": "a"}], {"packing_strategy": "best"}, "packing_strategy"),
    "all dropped": (LONG, {"max_length": 4}, "max_length"),
    "no eos": ([{"text": "a"}], {"processing_class": _no_eos}, "(?i)eos"),
}


@packed_only
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_behind(tmp_path, mistake):
    rows, changes, text = MISTAKES[mistake]
    dataset = Dataset.from_list(rows) if rows else tiny_dataset().select([])
    if mistake == "an empty document":  # whose ids are integers, though there are none
        dataset = dataset.cast(Features({"input_ids": List(Value("int64"))}))
    changes = {k: v() if callable(v) else v for k, v in changes.items()}
    for packing in (True, False)[: 2 - (mistake == "unknown strategy")]:
        with pytest.raises((ValueError, TypeError), match=text):
            trainer_for(tmp_path / "out", dataset, packing=packing, **changes).train()
        assert not list((tmp_path / "out").glob("*"))
