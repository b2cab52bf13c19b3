"""The page names the settings that a user has changed, and no secret."""

import pytest
from trl import SFTConfig

from trl_packing import PackedSFTConfig
from trl_packing.training.run_settings import (
    all_settings,
    changed_settings,
    installed_versions,
)

MACHINE = {"use_cpu": True, "bf16": False}


@pytest.mark.parametrize("config", [PackedSFTConfig, SFTConfig])
def test_a_config_without_settings_has_changed_none(config, tmp_path):
    assert changed_settings(config(output_dir=str(tmp_path), **MACHINE)) == ["bf16", "use_cpu"]


def test_changed_settings_are_named_in_the_order_of_the_config(tmp_path):
    args = PackedSFTConfig(
        output_dir=str(tmp_path), packing=False, learning_rate=1e-3, overflow="drop", **MACHINE
    )
    assert set(changed_settings(args)) == {
        "bf16",
        "use_cpu",
        "packing",
        "learning_rate",
        "overflow",
    }


def test_the_first_word_of_a_strategy_counts_and_not_its_class(tmp_path):
    args = PackedSFTConfig(output_dir=str(tmp_path), lr_scheduler_type="linear", **MACHINE)
    assert "lr_scheduler_type" not in changed_settings(args)
    args = PackedSFTConfig(output_dir=str(tmp_path), lr_scheduler_type="cosine", **MACHINE)
    assert "lr_scheduler_type" in changed_settings(args)


def test_secrets_are_left_out_and_tokens_of_text_are_not(tmp_path):
    secret = "hf_" + "a" * 30
    args = PackedSFTConfig(
        output_dir=str(tmp_path),
        hub_token=secret,
        eos_token="<eos>",
        model_init_kwargs={"token": "mine", "deep": [{"api_key": "k"}], "dtype": "float32"},
        run_name=f"with {secret}",
        **MACHINE,
    )
    found = all_settings(args)
    assert "mine" not in str(found)
    assert secret not in str(found)
    assert found["model_init_kwargs"] == {
        "token": "…",
        "deep": [{"api_key": "…"}],
        "dtype": "float32",
    }
    assert found["eos_token"] == "<eos>"
    assert args.hub_token == secret, "the config is as it was"
    assert args.model_init_kwargs["token"] == "mine"
    assert secret in str(vars(args)), "the control"


def test_versions_name_what_is_installed():
    found = installed_versions()
    assert {"python", "torch", "trl", "transformers", "accelerate", "datasets"} <= set(found)
    assert "no-such-package" not in found
