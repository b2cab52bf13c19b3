"""A setting with a value of the wrong type is refused at once, in one sentence."""

import math
import typing

import numpy as np
import pytest
from trl import SFTConfig

from trl_packing import PackedSFTConfig
from trl_packing.config import check_options

HERE = {"use_cpu": True, "bf16": False}


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_length", ["16", 16.0, True]),
        ("documents_per_step", ["4", 2.5, True]),
        ("packing", ["yes", 2]),
        ("eval_packing", ["no"]),
        ("append_eos", ["yes", 2]),
        ("static_shapes", ["no", None]),
        ("response_template", [5, ["### A:"], [1.5]]),
        ("prompt_template", [5]),
        ("source_column", [3, ["a"]]),
        ("curriculum", [3, ["a"]]),
        ("overlap_tokens", ["8", 0.5, True]),
        ("attention", [None, 2]),
        ("packing_strategy", [None, 3, ["bfd"]]),
        ("overflow", [3, ["drop"]]),
        ("train_on", [1, True]),
        ("loss_weighting", [None, 1]),
        ("isolation_check", [None, False]),
    ],
)
def test_a_setting_of_another_type_is_one_sentence(tmp_path, name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{name}=.* (must be|is unknown; choose one of)"):
            PackedSFTConfig(str(tmp_path), **HERE, **{name: value})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"per_device_train_batch_size": 0}, "^per_device_train_batch_size=0 must be at least 1$"),
        ({"gradient_accumulation_steps": 0}, "^gradient_accumulation_steps=0 must be at least 1$"),
        ({"seed": -1}, "^seed=-1 must be at least 0$"),
        ({"data_seed": -3}, "^data_seed=-3 must be at least 0$"),
        ({"max_length": 2**31}, "^max_length=2147483648 must be at most 2147483647, because"),
        ({"max_length": 10**20}, "^max_length=10{20} must be at most 2147483647, because"),
        ({"mixture": "{"}, r"^mixture='{' is not JSON \(Expecting property name"),
        ({"model_init_kwargs": "{a: 1}"}, r"^model_init_kwargs='{a: 1}' is not JSON \("),
    ],
)
def test_a_value_that_no_run_can_use_is_one_sentence(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        PackedSFTConfig(str(tmp_path), **HERE, **settings)


def test_values_at_the_edges_pass(tmp_path):
    PackedSFTConfig(str(tmp_path), **HERE, max_length=2**31 - 1, seed=0, data_seed=0)
    PackedSFTConfig(str(tmp_path), **HERE, packing=False, max_length=2**40)
    config = PackedSFTConfig(str(tmp_path), **HERE, lr_scheduler_kwargs="{}")
    assert config.lr_scheduler_kwargs == {}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 16, "documents_per_step": 4, "append_eos": True},
        {"response_template": [5, 6], "instruction_template": "### Q:", "source_column": "web"},
        {"packing": False, "max_length": None, "eval_packing": None, "pad_to_multiple_of": 8},
    ],
)
def test_settings_of_their_type_pass(tmp_path, settings):
    PackedSFTConfig(str(tmp_path), **HERE, **settings)


def test_the_settings_of_trl_are_looked_at_too(tmp_path):
    config = SFTConfig(str(tmp_path), **HERE, max_length="16")
    with pytest.raises(ValueError, match="max_length='16' must be a whole number, or None"):
        check_options(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("per_device_train_batch_size", 2.5),
        ("gradient_accumulation_steps", "2"),
        ("num_train_epochs", float("nan")),
        ("max_steps", "3"),
        ("max_steps", 3.0),
        ("seed", None),
        ("learning_rate", "1e-4"),
        ("learning_rate", float("nan")),
        ("weight_decay", None),
        ("warmup_steps", float("nan")),
        ("remove_unused_columns", "False"),
        ("gradient_checkpointing", "no"),
        ("dataset_text_field", 5),
        ("mixture_temperature", True),
    ],
)
def test_an_inherited_setting_of_another_type_is_named(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"^{name}=\S+ must be"):
        PackedSFTConfig(str(tmp_path), **HERE, **{name: value})
    config = PackedSFTConfig(str(tmp_path), **HERE)
    setattr(config, name, value)  # as a recipe or a user may do later
    with pytest.raises(ValueError, match=rf"^{name}="):
        check_options(config)


def test_numbers_that_libraries_make_and_switches_as_numbers_pass(tmp_path):
    made = {"max_steps": np.int64(3), "learning_rate": np.float32(1e-4), "max_grad_norm": math.inf}
    config = PackedSFTConfig(str(tmp_path), **HERE, **made, gradient_checkpointing=1)
    check_options(config)


def test_every_setting_of_one_type_is_checked(tmp_path):
    """The negative control of the two lists above: an object is no value of any of them."""
    passed = [
        name  # not by the fields, whose types HfArgumentParser changes
        for name, kind in typing.get_type_hints(PackedSFTConfig).items()
        if kind in (int, float, bool)
        and not raises(lambda name=name: PackedSFTConfig(**(HERE | {name: object()})))
    ]
    assert passed == []


def raises(make):
    try:
        make()
    except ValueError:
        return True
    return False


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"overlap_tokens": 8}, "overlap_tokens=8 has no effect without overflow='overlap'"),
        ({"overlap_tokens": 8, "overflow": "split"}, "has no effect without overflow='over"),
        ({"overflow": "overlap", "max_length": None, "packing": False}, "half of max_length=None"),
        ({"overflow": "overlap", "packing_strategy": "wrapped"}, "cut where rows end"),
        ({"overflow": "overlap", "max_length": 64, "overlap_tokens": 33}, "at most half of max_"),
        ({"overflow": "overlap", "max_length": 64, "overlap_tokens": 0}, "must be at least 1"),
    ],
)
def test_an_overlap_that_makes_no_sense_is_refused(settings, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        check_options(PackedSFTConfig(str(tmp_path), **HERE, **settings))


def test_an_overlap_of_half_a_piece_passes(tmp_path):
    settings = {"overflow": "overlap", "max_length": 64, "overlap_tokens": 32}
    PackedSFTConfig(str(tmp_path), **HERE, **settings)


@pytest.mark.parametrize("value", [0, "-8"])
def test_padding_to_a_multiple_that_is_none_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"pad_to_multiple_of=.* must be at least 1"):
        PackedSFTConfig(str(tmp_path), **HERE, pad_to_multiple_of=value)


@pytest.mark.parametrize(("value", "read"), [("8", 8), ("none", None), ("auto", None), (8, 8)])
def test_padding_to_a_multiple_is_read_as_trl_reads_it(tmp_path, value, read):
    """The command line passes a text."""
    for config in (PackedSFTConfig, SFTConfig):
        args = config(str(tmp_path), **HERE, pad_to_multiple_of=value)
        assert args.pad_to_multiple_of == read
