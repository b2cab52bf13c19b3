"""A setting that no run can use is refused at once, in one sentence."""

import math
import typing

import numpy as np
import pytest
from trl import SFTConfig

from trl_packing import PackedSFTConfig
from trl_packing.config import check_options

HERE = {"use_cpu": True, "bf16": False}
OVERLAP = {"overflow": "overlap", "max_length": 64}

TYPES = {
    "max_length": ["16", 16.0, True],
    "packing": ["yes", 2],
    "response_template": [5, ["### A:"], [1.5]],
    "source_column": [["a"]],
    "max_steps": [3.0],
    "learning_rate": ["1e-4", math.nan],
    "weight_decay": [None],
    "dataset_text_field": [5],
}


@pytest.mark.parametrize("name", TYPES)
def test_a_setting_of_another_type_is_named(tmp_path, name):
    """Also in a config of TRL, and if a recipe or a user sets it later."""
    for value in TYPES[name]:
        with pytest.raises(ValueError, match=rf"^{name}=.* must be"):
            PackedSFTConfig(str(tmp_path), **HERE, **{name: value})
        config = SFTConfig(str(tmp_path), **HERE)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=rf"^{name}=.* must be"):
            check_options(config)


VALUES = [  # settings, and words of the sentence
    ({"per_device_train_batch_size": 0}, "^per_device_train_batch_size=0 must be at least 1$"),
    ({"max_length": 10**20}, "^max_length=10{20} must be at most 2147483647, because"),
    ({"pad_to_multiple_of": "-8"}, "^pad_to_multiple_of=-8 must be at least 1"),
    ({"mixture": "{"}, r"^mixture='{' is not JSON \(Expecting property name"),
    ({"model_init_kwargs": "{a: 1}"}, r"^model_init_kwargs='{a: 1}' is not JSON \("),
    ({"overflow": "cut"}, r"^overflow='cut' is unknown; choose one of \['truncate'"),
    ({"attention": None}, "^attention=None must be a text$"),
    ({"mixture_unit": "tokens"}, "has no effect without mixture;"),
    ({"instruction_template": "Q"}, "has no effect without response_template"),
    (OVERLAP | {"packing_strategy": "wrapped"}, "cut where rows end"),
]


@pytest.mark.parametrize(("settings", "sentence"), VALUES)
def test_a_value_that_no_run_can_use_is_one_sentence(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        check_options(PackedSFTConfig(str(tmp_path), **HERE, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 2**31 - 1, "seed": 0, "data_seed": 0},
        {"packing": False, "max_length": 2**40},
        {"packing": False, "max_length": None, "eval_packing": None, "pad_to_multiple_of": 8},
        {"response_template": [5, 6], "instruction_template": "### Q:"},
        {"max_steps": np.int64(3), "learning_rate": np.float32(1e-4), "max_grad_norm": math.inf},
        {"gradient_checkpointing": 1, "documents_per_step": 4},
    ],
)
def test_values_at_the_edges_and_numbers_that_libraries_make_pass(tmp_path, settings):
    check_options(PackedSFTConfig(str(tmp_path), **HERE, **settings))


def test_every_setting_of_one_type_is_checked(tmp_path):
    """The negative control of the lists above: an object is no value of any of them."""
    for name, kind in typing.get_type_hints(PackedSFTConfig).items():
        if kind in (int, float, bool):
            with pytest.raises(ValueError, match=rf"^{name}="):
                PackedSFTConfig(str(tmp_path), **HERE | {name: object()})


@pytest.mark.parametrize(("value", "read"), [("8", 8), ("auto", None), (8, 8)])
def test_padding_to_a_multiple_is_read_as_trl_reads_it(tmp_path, value, read):
    """The command line passes a text."""
    for config in (PackedSFTConfig, SFTConfig):
        args = config(str(tmp_path), **HERE, pad_to_multiple_of=value)
        assert args.pad_to_multiple_of == read
