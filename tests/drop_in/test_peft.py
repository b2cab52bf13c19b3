"""Adapters: LoRA, virtual tokens and QLoRA train the weights that they train in TRL."""

import math

import pytest
from datasets import Dataset
from helpers.drop_in import (
    PackedSFTTrainer,
    assert_same_run,
    both_modes,
    loss_of_one_step,
    packed_only,
    parameters,
    sgd_run,
    trainer_for,
    unchanged,
)
from helpers.tiny import tiny_dataset, tiny_model, tiny_rows, tiny_tokenizer
from trl import SFTTrainer

from trl_packing import PackedSFTConfig
from trl_packing.attention import backends


def _peft():
    return pytest.importorskip("peft")


def _trains_only_the_adapter(trainer, base_names: set[str]) -> None:
    before = parameters(trainer)
    frozen = {n for n in before if n.replace("base_layer.", "") in base_names}
    assert frozen
    assert frozen != {*before}
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert {*unchanged(before, trainer)} == frozen


def _lora_base_names(name: str) -> set[str]:
    return {f"base_model.model.{n}" for n, _ in tiny_model(name).named_parameters()}


@both_modes
@pytest.mark.parametrize(
    "checkpointing", [None, {}, {"use_reentrant": True}, {"use_reentrant": False}]
)
def test_lora_trains_only_the_adapter(tmp_path, packing, checkpointing):
    trainer = trainer_for(
        tmp_path,
        model=tiny_model("qwen2"),
        packing=packing,
        gradient_checkpointing=checkpointing is not None,
        gradient_checkpointing_kwargs=checkpointing,
        arguments={"peft_config": _peft().LoraConfig()},
    )
    _trains_only_the_adapter(trainer, _lora_base_names("qwen2"))


@both_modes
def test_a_peft_model_can_be_passed(tmp_path, packing):
    peft = _peft()
    model = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig())
    trainer = trainer_for(tmp_path, model=model, packing=packing)
    _trains_only_the_adapter(trainer, _lora_base_names("qwen2"))


@both_modes
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # peft 0.18
def test_lora_on_experts(tmp_path, packing):
    lora = _peft().LoraConfig(
        target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    )
    trainer = trainer_for(
        tmp_path, model=tiny_model("gpt_oss"), packing=packing, arguments={"peft_config": lora}
    )
    _trains_only_the_adapter(trainer, _lora_base_names("gpt_oss"))


def _virtual_tokens(kind: str):
    peft = _peft()
    common = {"task_type": peft.TaskType.CAUSAL_LM, "num_virtual_tokens": 4}
    return {
        "prompt_tuning": lambda: peft.PromptTuningConfig(**common),
        "prefix_tuning": lambda: peft.PrefixTuningConfig(**common),
        "prompt_encoder": lambda: peft.PromptEncoderConfig(**common, encoder_hidden_size=32),
    }[kind]()


@packed_only  # TRL's loss is wrong here: 6.18 for 6.76
@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning", "prompt_encoder"])
def test_virtual_tokens_train_packed(tmp_path, kind):
    model = tiny_model("qwen2")
    base_names = {f"base_model.{n}" for n, _ in model.named_parameters()}
    trainer = trainer_for(
        tmp_path,
        model=model,
        packing=True,
        gradient_checkpointing=False,
        logging_steps=10,
        arguments={"peft_config": _virtual_tokens(kind)},
    )
    _trains_only_the_adapter(trainer, base_names)


@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning", "prompt_encoder"])
def test_virtual_tokens_give_the_loss_of_trl(tmp_path, kind):
    """One step over all documents, unpacked."""
    losses = [
        loss_of_one_step(
            tmp_path,
            cls,
            model="qwen2",
            arguments={"peft_config": _virtual_tokens(kind)},
            gradient_checkpointing=False,
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@both_modes
def test_an_activated_adapter_gives_the_steps_of_trl(tmp_path, monkeypatch, packing):
    """An aLoRA adapter starts at the last invocation in each document, not in each packed row."""
    invocation = tiny_tokenizer()(" are", add_special_tokens=False)["input_ids"]
    rows = [f"{pair['question']} are {pair['answer']}" for pair in tiny_rows("question_answer", 8)]

    def run(cls, **changes):
        adapter = _peft().LoraConfig(
            task_type="CAUSAL_LM",
            alora_invocation_tokens=invocation,
            target_modules=["q_proj", "v_proj"],
        )
        return sgd_run(
            tmp_path,
            cls,
            dataset=Dataset.from_dict({"text": rows}),
            model="qwen2",
            per_device_train_batch_size=8,
            num_train_epochs=3,
            learning_rate=10.0,
            gradient_checkpointing=False,
            arguments={"peft_config": adapter},
            **changes,
        )

    options = {"packing": True, "max_length": 512} if packing else {}
    theirs, ours = run(SFTTrainer), run(PackedSFTTrainer, **options)
    assert_same_run(ours, theirs, ("loss", "grad_norm"))
    if PackedSFTTrainer is not SFTTrainer:
        assert ours.attention.backend == "padded"
        monkeypatch.setattr(backends, "invokes_adapter", lambda model: False)
        with pytest.raises(AssertionError):  # in one row, only the last document has an adapter
            assert_same_run(run(PackedSFTTrainer, **options), theirs, ("loss", "grad_norm"))


@packed_only
def test_an_activated_adapter_refuses_attention_over_a_whole_row(tmp_path):
    adapter = _peft().LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    settings = PackedSFTConfig(
        tmp_path, attention="documents", use_cpu=True, bf16=False, report_to="none"
    )
    with pytest.raises(ValueError, match=r"alora_invocation_tokens .*; set attention='auto' or"):
        PackedSFTTrainer(
            model=tiny_model("qwen2"),
            args=settings,
            train_dataset=tiny_dataset(),
            processing_class=tiny_tokenizer(),
            peft_config=adapter,
        )
