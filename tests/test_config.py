"""A setting that no run can use is refused at once, in one sentence; `packing` has a default."""

import dataclasses
import math
import typing

import numpy as np
import pytest
import torch
from harness import make_trainer
from helpers.tiny import documents_of_lengths
from transformers import HfArgumentParser
from trl import SFTConfig, TrlParser

from trl_packing import PackedSFTConfig
from trl_packing.attention.model_facts import loading_options
from trl_packing.config import check_options
from trl_packing.pages.record import changed_settings

HERE = {"output_dir": "o", "use_cpu": True, "bf16": False}
NO_CAPACITY = "`max_length` can't be `None`"

TYPES = {
    "max_length": ["16", 16.0, True],
    "packing": ["yes", 2],
    "response_template": [5, ["### A:"], [1.5]],
    "max_steps": [3.0],
    "learning_rate": ["1e-4", math.nan],
    "weight_decay": [None],
}


@pytest.mark.parametrize("name", TYPES)
def test_a_setting_of_another_type_is_named(name):
    """Also in a config of TRL, and if a recipe or a user sets it later."""
    for value in TYPES[name]:
        with pytest.raises(ValueError, match=rf"^{name}=.* must be"):
            PackedSFTConfig(**HERE | {name: value})
        config = SFTConfig(**HERE)
        setattr(config, name, value)
        with pytest.raises(ValueError, match=rf"^{name}=.* must be"):
            check_options(config)


VALUES = [  # settings, and words of the sentence
    ({"per_device_train_batch_size": 0}, "^per_device_train_batch_size=0 must be at least 1$"),
    ({"max_length": None, "packing": True}, NO_CAPACITY),
    ({"overflow": "cut"}, r"^overflow='cut' is unknown; choose one of \['truncate'"),
    ({"mixture": {"a": 2}}, r"mixture\['a'\]=2 must have"),
    ({"instruction_template": "Q"}, "has no effect without response_template"),
    ({"overflow": "overlap", "packing_strategy": "wrapped"}, "exclude each other; leave one"),
    ({"auto_find_batch_size": True, "documents_per_step": 4}, "=4; set max_tokens_per_micro_batch"),
    ({"max_tokens_per_micro_batch": 0}, "^max_tokens_per_micro_batch=0 must be at least 1$"),
    ({"max_tokens_per_micro_batch": 9, "prefix_sharing": "bin"}, "exclude each other; leave one"),
]


@pytest.mark.parametrize(("settings", "sentence"), VALUES)
def test_a_value_that_no_run_can_use_is_one_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_options(PackedSFTConfig(**HERE | settings))


def test_values_at_the_edges_and_numbers_that_libraries_make_pass():
    for settings in (
        {"max_length": 2**31 - 1, "seed": 0, "packing_strategy": "wrapped"},
        {"packing": False, "max_length": 2**40, "packing_strategy": "wrapped", "curriculum": "a"},
        {"packing": False, "max_length": None, "eval_packing": None, "pad_to_multiple_of": 8},
        {"response_template": [5, 6], "instruction_template": "### Q:"},
        {"max_steps": np.int64(3), "learning_rate": np.float32(1e-4), "max_grad_norm": math.inf},
        {"gradient_checkpointing": 1, "documents_per_step": 4},
        {"auto_find_batch_size": True, "packing": False},
    ):
        check_options(PackedSFTConfig(**HERE | settings))


def test_every_setting_of_one_type_is_checked():
    """The negative control of the lists above: an object is no value of any of them."""
    for name, kind in typing.get_type_hints(PackedSFTConfig).items():
        if kind in (int, float, bool):
            with pytest.raises(ValueError, match=rf"^{name}="):
                PackedSFTConfig(**HERE | {name: object()})


@pytest.mark.parametrize(("value", "read"), [("8", 8), ("auto", None), (8, 8)])
def test_padding_to_a_multiple_is_read_as_trl_reads_it(value, read):
    """The command line passes a text."""
    for config in (PackedSFTConfig, SFTConfig):
        assert config(**HERE, pad_to_multiple_of=value).pad_to_multiple_of == read


# --- packing: True by default, where a bin can have a capacity ------------------------------------


def test_commands_files_and_copies_tell_the_default_from_what_was_asked(tmp_path):
    fixed = ["--output_dir", "o", "--use_cpu", "true", "--bf16", "false"]
    for given, packing in ([], True), (["--packing"], True), (["--packing", "false"], False):
        (args,) = HfArgumentParser(PackedSFTConfig).parse_args_into_dataclasses([*fixed, *given])
        assert args.packing is packing
    (tmp_path / "run.yaml").write_text(
        "output_dir: o\nuse_cpu: true\nbf16: false\nmax_length: null"
    )
    command = ["--config", str(tmp_path / "run.yaml")]
    (args,) = TrlParser(PackedSFTConfig).parse_args_and_config(command)
    assert args.packing is False
    packed = PackedSFTConfig(**HERE)
    assert dataclasses.replace(packed, seed=3).packing is True
    assert dataclasses.replace(packed, max_length=None, packing=False).packing is False
    with pytest.raises(ValueError, match=NO_CAPACITY):
        dataclasses.replace(packed, max_length=None)


def test_without_max_length_documents_are_trained_as_without_packing(tmp_path):
    rows = documents_of_lengths([5, 9, 4, 12, 7, 6, 3, 8])
    options = {"per_device_train_batch_size": 4, "max_steps": 1}
    trainer = make_trainer(tmp_path, rows, max_length=None, **options)
    assert trainer.args.packing is False
    assert trainer.packing_report.bins is None
    assert trainer.packing_report.documents_per_step == 4
    trainer.train()


def test_a_model_is_read_at_the_revision_and_with_the_trust_that_trl_loads_it_with():
    assert loading_options(None) == {"revision": "main", "trust_remote_code": False}
    trusting = SFTConfig(**HERE, trust_remote_code=True)
    assert loading_options(trusting)["trust_remote_code"]
    trusting.model_init_kwargs = {"revision": "v2", "trust_remote_code": False}
    assert loading_options(trusting) == {"revision": "v2", "trust_remote_code": False}


BF16 = [({}, False), ({"bf16": True}, True), ({"fp16": True}, False), ({"bf16": False}, False)]


@pytest.mark.parametrize(("settings", "is_used"), BF16)
def test_a_cpu_without_amx_trains_in_float32_unless_asked(settings, is_used, monkeypatch, tmp_path):
    here = {"output_dir": str(tmp_path), "use_cpu": True} | settings
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False}, raising=False)
    config = PackedSFTConfig(**here)
    assert (config.bf16, config.mixed_precision == "bf16") == (is_used, is_used)
    assert SFTConfig(**here).bf16 == settings.get("bf16", not settings.get("fp16"))
    if not settings:
        report = make_trainer(tmp_path, documents_of_lengths([9]), bf16=None).packing_report
        assert "precision    float32, by default on this CPU" in str(report)
        assert "bf16" not in changed_settings(config)
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert PackedSFTConfig(**here).bf16  # accelerate would use it
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
        assert PackedSFTConfig(**here).bf16
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        assert not PackedSFTConfig(output_dir=str(tmp_path)).bf16  # which transformers refuses
