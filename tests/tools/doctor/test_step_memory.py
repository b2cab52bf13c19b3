"""The computed memory of a step against the allocations of a real one on the CPU."""

import pytest
import torch
from datasets import Dataset
from helpers.combinations import combined
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.tools.doctor.step_memory import (
    NotSimulated,
    StepMemory,
    meta_model,
    optimizer_bytes,
    state_memory,
    step_memory,
)
from trl_packing.tools.exactness.tiny_step import tiny_tokenizer

CONFIG = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)
LORA = LoraConfig(r=8, target_modules="all-linear")
MAX_LENGTH, BINS = 512, 2
TOKENS = MAX_LENGTH * BINS


def trainer(folder, **options):
    """Return a trainer of full bins, in which every token is trained."""
    torch.manual_seed(0)
    documents = Dataset.from_dict({"input_ids": torch.randint(10, 2000, (2 * BINS, 512)).tolist()})
    lora = options.pop("lora", None)
    args = PackedSFTConfig(
        **{
            "output_dir": str(folder),
            "max_length": MAX_LENGTH,
            "per_device_train_batch_size": BINS,
            "max_steps": 1,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "isolation_check": "off",
            **options,
        }
    )
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)
    return PackedSFTTrainer(
        get_peft_model(model, lora) if lora else model,
        args,
        train_dataset=documents,
        processing_class=tiny_tokenizer(),
    )


def measured_peak(trained) -> int:
    """Return the most bytes that the forward and backward of the first step allocate at once."""
    step, profiles = trained.training_step, []

    def profiled_step(*args, **kwargs):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            loss = step(*args, **kwargs)
        profiles.append(profiled.profiler.kineto_results.events())
        return loss

    trained.training_step = profiled_step
    trained.train()
    changes = sorted((e.start_ns(), e.nbytes()) for e in profiles[0] if e.name() == "[memory]")
    alive = peak = 0
    for _, nbytes in changes:
        alive += nbytes
        peak = max(peak, alive)
    return peak


def bytes_of(tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(
    ("optim", "lora"), combined(["adamw_torch_fused", "adamw_torch", "sgd"], [None, LORA])
)
def test_parameters_gradients_and_optimizer_states_are_exact(tmp_path, optim, lora):
    trained = trainer(tmp_path, optim=optim, lora=lora)
    trained.train()
    model, optimizer = trained.model, trained.optimizer.optimizer
    gradients = [torch.empty_like(p) for p in model.parameters() if p.requires_grad]
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    found = state_memory(meta_model(CONFIG, lora=lora), optim)
    assert found.parameters == bytes_of(model.parameters())
    assert found.gradients == bytes_of(gradients)
    assert found.optimizer == bytes_of(states)
    assert found.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("lora", "checkpointing", "bf16"),
    combined([None, LORA], [True, False], [True, False]),
)
def test_the_peak_is_that_of_a_real_step_within_a_tenth(tmp_path, lora, checkpointing, bf16):
    trained = trainer(tmp_path, gradient_checkpointing=checkpointing, bf16=bf16, lora=lora)
    measured = measured_peak(trained)
    model = meta_model(CONFIG, lora=lora)
    found = step_memory(
        model,
        TOKENS,
        gradient_checkpointing=checkpointing,
        autocast=torch.bfloat16 if bf16 else None,
        optimizer="sgd",  # has no states
    )
    computed = found.peak - state_memory(model, "sgd").parameters
    assert computed == pytest.approx(measured, rel=0.1)


def test_half_of_the_tokens_is_seen():
    """The negative control of the test above: a wrong number of tokens is outside of a tenth."""
    model = meta_model(CONFIG)
    whole, half = (
        step_memory(model, n, gradient_checkpointing=False) for n in (TOKENS, TOKENS // 2)
    )
    assert half.peak < 0.8 * whole.peak
    assert half.kept < 0.6 * whole.kept


def test_gradients_of_an_earlier_micro_batch_are_counted():
    model = meta_model(CONFIG)
    first, later = (
        step_memory(model, 64, gradient_checkpointing=True, accumulates=a) for a in (False, True)
    )
    assert isinstance(first, StepMemory)
    assert later.peak > first.peak
    assert later.peak - first.peak <= state_memory(model, "sgd").gradients


def test_an_unknown_optimizer_is_not_guessed():
    model = meta_model(CONFIG)
    assert optimizer_bytes(list(model.parameters()), "lomo") is None
    assert state_memory(model, "lomo").optimizer is None


def test_a_model_that_needs_numbers_says_so():
    model = meta_model(CONFIG)
    layer = model.model.layers[0]
    forward = layer.forward

    def reads(hidden, *args, **kwargs):
        assert float(hidden.sum()) != 1
        return forward(hidden, *args, **kwargs)

    layer.forward = reads
    with pytest.raises(NotSimulated, match="DataDependent"):
        step_memory(model, 8, gradient_checkpointing=False)
