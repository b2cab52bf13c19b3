"""`packing` of `PackedSFTConfig`: True by default, where a bin can have a capacity."""

import dataclasses

import pytest
from datasets import Dataset
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import HfArgumentParser
from trl import TrlParser

from trl_packing import PackedSFTConfig, PackedSFTTrainer

OPTIONS = {"output_dir": "o", "use_cpu": True, "bf16": False, "report_to": "none"}
NO_CAPACITY = "`max_length` can't be `None`"


def config(**options) -> PackedSFTConfig:
    return PackedSFTConfig(**(OPTIONS | options))


def trainer_of(args) -> PackedSFTTrainer:
    rows = Dataset.from_list(documents_of_lengths([5, 9, 4, 12, 7, 6, 3, 8]))
    return PackedSFTTrainer(
        tiny_model(), args, train_dataset=rows, processing_class=tiny_tokenizer()
    )


def test_the_command_line_tells_the_default_from_what_was_asked():
    parser = HfArgumentParser(PackedSFTConfig)
    fixed = ["--output_dir", "o", "--use_cpu", "true", "--bf16", "false"]
    given = {(): True, ("--packing",): True, ("--packing", "false"): False}
    for arguments, packing in given.items():
        (args,) = parser.parse_args_into_dataclasses([*fixed, *arguments])
        assert args.packing is packing


@pytest.mark.parametrize(("asked", "packing"), [("", False), ("packing: false\n", False)])
def test_a_yaml_file_may_leave_max_length_out(tmp_path, asked, packing):
    path = tmp_path / "run.yaml"
    path.write_text(f"output_dir: o\nuse_cpu: true\nbf16: false\nmax_length: null\n{asked}")
    (args,) = TrlParser(PackedSFTConfig).parse_args_and_config(["--config", str(path)])
    assert args.packing is packing


def test_a_copy_is_packed_as_the_original():
    """`replace` gives every setting a value, so that the copy has no default any more."""
    assert dataclasses.replace(config(), seed=3).packing is True
    assert dataclasses.replace(config(max_length=None), seed=3).packing is False
    assert dataclasses.replace(config(), max_length=None, packing=False).packing is False
    with pytest.raises(ValueError, match=NO_CAPACITY):
        dataclasses.replace(config(), max_length=None)


def test_without_max_length_documents_are_trained_as_without_packing(tmp_path):
    options = {"output_dir": str(tmp_path), "max_steps": 1, "save_strategy": "no"}
    args = config(**options, per_device_train_batch_size=4, max_length=None)
    trainer = trainer_of(args)
    assert args.packing is False
    assert trainer.packing_report.bins is None
    assert trainer.packing_report.documents_per_step == 4
    trainer.train()
    args = config(**options)
    args.max_length = None  # set later: no bin has a capacity
    with pytest.raises(ValueError, match=NO_CAPACITY):
        trainer_of(args)
