"""An option of `SFTConfig` does here what it does in TRL, packed and unpacked."""

import math
import types

import pytest
import torch
import transformers
from helpers.drop_in import (
    PackedSFTTrainer,
    both_modes,
    config,
    logged,
    packed_only,
    parameters,
    sgd_run,
    train_moves_all,
    trainer_for,
)
from helpers.tiny import tiny_dataset, tiny_model, tiny_tokenizer

IN_ANY_MODE = [
    {"neftune_noise_alpha": 5.0},
    {"train_sampling_strategy": "group_by_length"},
    {"train_sampling_strategy": "batch_rebalance"},
    {"include_num_input_tokens_seen": "all"},
    {"remove_unused_columns": False},
    {"optim": "adafactor"},
    {"auto_find_batch_size": True},
    {"full_determinism": True},
]

WHEN_PACKED = [  # unpacked they are compared with TRL above
    {"loss_type": "dft"},
    {"label_smoothing_factor": 0.1},
    {"gradient_checkpointing": False},
    {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    {"gradient_checkpointing_kwargs": {"selective": True}},
    {"gradient_accumulation_steps": 2},
    {"include_num_input_tokens_seen": "non_padding"},
    {"dataloader_drop_last": True},
    {"dataloader_pin_memory": False},
    {"accelerator_config": {"even_batches": False}},
]


@pytest.mark.parametrize(
    ("changes", "packing"),
    [(changes, packing) for changes in IN_ANY_MODE for packing in (True, False)]
    + [(changes, True) for changes in WHEN_PACKED],
    ids=str,
)
def test_option_trains(tmp_path, changes, packing):
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        train_moves_all(trainer_for(tmp_path, "prompt_completion", packing=packing, **changes))
    finally:
        torch.use_deterministic_algorithms(deterministic)


@pytest.mark.slow
@both_modes
@pytest.mark.parametrize(
    "changes",
    [
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
        {"skip_memory_metrics": False},
    ],
    ids=str,
)
def test_slow_option_trains(tmp_path, changes, packing):
    train_moves_all(trainer_for(tmp_path, "prompt_completion", packing=packing, **changes))


@pytest.mark.gpu
@both_modes
def test_activation_offloading_trains(tmp_path, packing):
    train_moves_all(
        trainer_for(tmp_path, packing=packing, use_cpu=False, activation_offloading=True)
    )


def test_neftune_noise_changes_the_run_and_leaves_with_it(tmp_path):
    plain, noisy = (
        sgd_run(tmp_path, PackedSFTTrainer, max_steps=1, neftune_noise_alpha=alpha)
        for alpha in (None, 50.0)
    )
    assert logged(plain, "loss") != pytest.approx(logged(noisy, "loss"), abs=1e-3)
    hooks = [len(t.model.get_input_embeddings()._forward_hooks) for t in (plain, noisy)]
    assert hooks[0] == hooks[1]


@both_modes
def test_dropout_is_on_in_training_and_off_in_evaluation(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        model=tiny_model("gpt2_dropout"),
        packing=packing,
        arguments={"eval_dataset": tiny_dataset(rows=5)},
    )
    train_moves_all(trainer)
    assert trainer.evaluate()["eval_loss"] == trainer.evaluate()["eval_loss"]


@both_modes
def test_a_seed_names_a_run(tmp_path, packing):
    def run(seed):
        return parameters(
            sgd_run(
                tmp_path,
                PackedSFTTrainer,
                packing=packing,
                max_length=64,
                seed=seed,
                train_sampling_strategy="random",
                model="gpt2_dropout",
            )
        )

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not all(torch.equal(first[n], other[n]) for n in first)


def test_tensorboard_gets_the_logs(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer_for(tmp_path, report_to="tensorboard", packing=True).train()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_chunked_nll_is_nll(tmp_path):
    with pytest.warns(FutureWarning, match="chunked_nll"):
        assert config(tmp_path, loss_type="chunked_nll").loss_type == "nll"


def test_loss_settings_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="loss_type"):
        trainer_for(tmp_path, loss_type="hinge")
    with pytest.raises(ValueError, match="`compute_loss_func` together with `loss_type='dft'`"):
        trainer_for(tmp_path, loss_type="dft", arguments={"compute_loss_func": lambda *a, **k: 0.0})


def test_selective_checkpointing_that_cannot_be(tmp_path):
    for changes in (
        {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": {"selective": True}},
        {"gradient_checkpointing_kwargs": {"selective": True, "use_reentrant": True}},
    ):
        with pytest.raises(ValueError, match="selective"):
            trainer_for(tmp_path, **changes)


@both_modes
def test_auxiliary_loss_is_logged_with_the_summary(tmp_path, packing):
    trainer = trainer_for(
        tmp_path, model=tiny_model("qwen3_moe"), packing=packing, logging_steps=10
    )
    train_moves_all(trainer)
    assert math.isfinite(trainer.state.log_history[-1]["aux_loss"])


@pytest.mark.parametrize(
    ("name", "coefficient", "enabled"),
    [
        ("qwen3_moe", 0.001, True),
        ("gpt_oss", 0.001, True),
        ("deepseek_v3", 0.0, False),
        ("llama", 0.0, False),
    ],
)
def test_router_coefficient_defaults_to_the_architecture(tmp_path, name, coefficient, enabled):
    trainer = trainer_for(tmp_path, model=tiny_model(name))
    assert trainer.router_aux_loss_coef == coefficient
    assert trainer.aux_loss_enabled is enabled


@both_modes
def test_router_coefficient_can_be_set(tmp_path, packing):
    trainer = trainer_for(
        tmp_path, model=tiny_model("qwen3_moe"), router_aux_loss_coef=0.5, packing=packing
    )
    assert trainer.router_aux_loss_coef == 0.5
    train_moves_all(trainer)
    assert all(math.isfinite(value) for value in logged(trainer, "aux_loss"))
    off = trainer_for(tmp_path, model=tiny_model("qwen3_moe"), router_aux_loss_coef=0.0)
    assert not off.aux_loss_enabled
    with pytest.raises(ValueError, match="not a Mixture-of-Experts model"):
        trainer_for(tmp_path, router_aux_loss_coef=0.5)


@pytest.mark.slow
def test_liger_layer_kernels(tmp_path):
    pytest.importorskip("liger_kernel")
    with pytest.warns(FutureWarning, match="use_liger_kernel"):
        trainer = trainer_for(tmp_path, use_liger_kernel=True)
    assert trainer.args.liger_kernel_config["fused_linear_cross_entropy"] is False
    train_moves_all(trainer)


def test_liger_fused_loss_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(
        transformers.trainer, "is_liger_kernel_available", lambda: True, raising=False
    )
    with (
        pytest.raises(ValueError, match="fused_linear_cross_entropy"),
        pytest.warns(FutureWarning, match="use_liger_kernel"),
    ):
        trainer_for(
            tmp_path,
            use_liger_kernel=True,
            liger_kernel_config={"fused_linear_cross_entropy": True},
        )


@packed_only
@both_modes
def test_context_parallelism_refuses_packing(tmp_path, packing):
    args = config(tmp_path, packing=packing, eval_packing=True)
    args.parallelism_config = types.SimpleNamespace(cp_enabled=True, sp_enabled=False)
    with pytest.raises(ValueError, match="not compatible with context parallelism"):
        PackedSFTTrainer(
            tiny_model(), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
        )
