"""Mistakes raise an error that names them, before anything is written."""

import types

import pytest
import torch
from datasets import Dataset, Features, List, Value
from helpers.drop_in import both_modes, packed_only, trainer_for
from helpers.tiny import VOCAB_SIZE, tiny_dataset, tiny_dataset_dict, tiny_iterable, tiny_tokenizer


def test_train_dataset_must_be_a_dataset(tmp_path):
    for wrong, error, text in (
        (None, ValueError, "`train_dataset` is required"),
        (
            tiny_dataset_dict(),
            TypeError,
            "`train_dataset` must be a `Dataset` or `IterableDataset`",
        ),
    ):
        with pytest.raises(error, match=text):
            trainer_for(tmp_path, wrong)


def test_a_stream_needs_max_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        trainer_for(tmp_path, tiny_iterable(), max_steps=-1)


def test_packing_needs_max_length(tmp_path):
    with pytest.raises(ValueError, match="`max_length` can't be `None`"):
        trainer_for(tmp_path, packing=True, max_length=None)


def test_truncation_mode_must_be_known(tmp_path):
    with pytest.raises(ValueError, match=r"(?i)truncation.mode"):
        trainer_for(tmp_path, truncation_mode="keep_middle")


def test_a_tokenizer_without_eos_and_pad_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(pad=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"(?i)pad_token|eos"):
        trainer_for(tmp_path, processing_class=tokenizer)


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


@packed_only
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_batches_cut_by_accelerate_are_refused_by_name(tmp_path, name):
    """Several processes would cut a packed row at the number of its documents."""
    trainer = trainer_for(tmp_path, accelerator_config={name: True})
    from trl_packing.training.arguments import check_arguments

    args = types.SimpleNamespace(accelerator_config=trainer.args.accelerator_config, world_size=2)
    with pytest.raises(ValueError, match=name):
        check_arguments(args, tiny_dataset("language_modeling"))


def _no_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


MISTAKES = {
    "no documents": ([], {}, "empty|no documents|no rows"),
    "an empty document": ([{"input_ids": []}], {}, "empty|no document|trained token"),
    "no completion": ([{"prompt": "a"}], {}, "completion"),
    "no known column": ([{"body": "a"}], {}, "column"),
    "max_length 0": ([{"text": "a b c"}], {"max_length": 0}, "max_length"),
    "max_length −1": ([{"text": "a b c"}], {"max_length": -1}, "max_length"),
    "unknown strategy": ([{"text": "a"}], {"packing_strategy": "best"}, "packing_strategy"),
    "all dropped": (
        [{"prompt": "a long prompt " * 9, "completion": "x"}],
        {"max_length": 4},
        "max_length",
    ),
    "short mask": (
        [{"input_ids": [7, 8, 9], "assistant_masks": [1, 1]}],
        {},
        "assistant_masks",
    ),
    "short labels": ([{"input_ids": [7, 8, 9], "labels": [7, 8]}], {}, "labels"),
    "fractional ids": ([{"input_ids": [7.5, 8.0, 9.0]}], {}, "integer"),
    "text ids": ([{"input_ids": ["a", "b"]}], {}, "integer"),
    "ids beyond the vocabulary": ([{"input_ids": [7, VOCAB_SIZE + 1]}], {}, "vocabulary"),
    "no eos": ([{"text": "a"}], {"processing_class": _no_eos}, "(?i)eos"),
    "a missing text": ([{"text": "a"}, {"text": None}], {}, "text"),
}


@packed_only
@both_modes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_behind(tmp_path, mistake, packing):
    rows, changes, text = MISTAKES[mistake]
    if mistake == "unknown strategy" and not packing:
        pytest.skip("not read without packing")
    dataset = Dataset.from_list(rows) if rows else tiny_dataset().select([])
    if mistake == "an empty document":  # whose ids are integers, though there are none
        dataset = dataset.cast(Features({"input_ids": List(Value("int64"))}))
    changes = {k: v() if callable(v) else v for k, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=text):
        trainer_for(tmp_path / "out", dataset, packing=packing, **changes).train()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
