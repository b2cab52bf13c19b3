"""Losses, gradients, logs and parameters equal those of TRL's own run, step by step."""

import pytest
import torch
import transformers
from datasets import Dataset
from harness import make_trainer
from helpers.combinations import fast
from helpers.drop_in import (
    PackedSFTTrainer,
    assert_same_run,
    both_modes,
    packed_only,
    sgd_run,
    unchanged,
)
from helpers.tiny import (
    MODELS,
    VOCAB_SIZE,
    tiny_dataset,
    tiny_iterable,
    tiny_model,
    tiny_rows,
    tiny_tokenizer,
)
from helpers.vision import pack_no_images, tiny_vlm
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling


def both(folder, **options):
    return [sgd_run(folder, cls, **options) for cls in (PackedSFTTrainer, SFTTrainer)]


def test_the_comparison_can_fail(tmp_path):
    """One document more, or one trained token more in each document, is seen."""
    run = sgd_run(tmp_path, SFTTrainer)
    for changes in ({"rows": 23}, {"form": "language_modeling"}):
        with pytest.raises(AssertionError):
            assert_same_run(sgd_run(tmp_path, PackedSFTTrainer, **changes), run, ("loss",))


FAST = fast((n for n in MODELS if n != "gpt2_dropout"), ("llama", "gemma2", "qwen3_moe"))


@pytest.mark.parametrize("name", FAST)
def test_unpacked_run_of_every_model_equals_trl(tmp_path, name):
    """Completion-only, since TRL scales gpt2's full loss by (tokens − documents) / tokens."""
    coefficient = 0.0 if "moe" in name else None
    ours, theirs = both(tmp_path, model=name, rows=8, router_aux_loss_coef=coefficient)
    assert_same_run(ours, theirs)
    assert unchanged(dict(tiny_model(name).named_parameters()), ours) == []


OPTIONS = [
    {"form": "language_modeling"},
    {"form": "tokenized_labels", "gradient_accumulation_steps": 2, "rows": 22},
    {"loss_type": "dft"},
    {"label_smoothing_factor": 0.1},
    {"dataloader_drop_last": True},
    {"max_length": 30},
    {"max_length": None, "completion_only_loss": False},
    {"pad_to_multiple_of": 8},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    {"average_tokens_across_devices": False},
    {"include_num_input_tokens_seen": "non_padding"},
]


@pytest.mark.parametrize("changes", OPTIONS, ids=lambda changes: ",".join(map(str, changes)))
def test_unpacked_run_with_this_option_equals_trl(tmp_path, changes):
    ours, theirs = both(tmp_path, **{"rows": 14, **changes})
    keys = ["loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen"]
    if "pad_to_multiple_of" not in changes:
        keys.append("num_tokens")
    # Of several micro-batches TRL logs the mean of their means.
    if "gradient_accumulation_steps" not in changes:
        keys += ["mean_token_accuracy", "entropy"]
    assert_same_run(ours, theirs, keys)
    assert len(ours.get_train_dataloader()) == len(theirs.get_train_dataloader())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_unpacked_run_over_a_stream_equals_trl_step_by_step(tmp_path, accumulation):
    options = {"num_train_epochs": 3, "max_steps": 4, "gradient_accumulation_steps": accumulation}
    ours, theirs = both(tmp_path, dataset=tiny_iterable("prompt_completion", 22), **options)
    assert_same_run(ours, theirs, ("loss", "grad_norm", "num_tokens"))


CHANGES = [
    {},
    {"loss_type": "dft"},
    {"label_smoothing_factor": 0.1},
    {"completion_only_loss": False},
]


@packed_only
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: ",".join(changes) or "nll")
def test_a_packed_step_over_all_documents_equals_trl_unpacked(tmp_path, changes):
    ours = sgd_run(tmp_path, PackedSFTTrainer, packing=True, max_length=2048, **changes)
    theirs = sgd_run(tmp_path, SFTTrainer, per_device_train_batch_size=22, **changes)
    assert_same_run(ours, theirs)


# --- what a user passes ---------------------------------------------------------------------------


def causal_loss(outputs, labels, num_items_in_batch=None):
    assert outputs.logits.shape[-1] == VOCAB_SIZE
    assert num_items_in_batch is not None
    loss = transformers.loss.loss_utils.ForCausalLMLoss
    return loss(outputs.logits, labels, VOCAB_SIZE, num_items_in_batch=num_items_in_batch)


VIRTUAL = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
EXPERTS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def adapted_model():
    torch.manual_seed(0)
    return get_peft_model(tiny_model("qwen2"), LoraConfig(init_lora_weights=False))


PASSED = {
    "collator": lambda: {"data_collator": DataCollatorForSeq2Seq(tokenizer=tiny_tokenizer())},
    "optimizer": lambda: {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.05})},
    "loss": lambda: {"compute_loss_func": causal_loss},
    "lora": lambda: {"peft_config": LoraConfig(init_lora_weights=False)},
    "lora of experts": lambda: {"peft_config": LoraConfig(target_parameters=EXPERTS)},
    "peft model": dict,
    "prompt tuning": lambda: {"peft_config": PromptTuningConfig(**VIRTUAL)},
    "prefix tuning": lambda: {"peft_config": PrefixTuningConfig(**VIRTUAL)},
}
OF_MODELS = {"lora of experts": lambda: "gpt_oss", "peft model": adapted_model}


@pytest.mark.filterwarnings("ignore:.*compute_loss_func:FutureWarning")
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # peft 0.18
@pytest.mark.parametrize("name", PASSED)
def test_what_a_user_passes_trains_as_in_trl(tmp_path, name):
    ours, theirs = (
        sgd_run(
            tmp_path,
            cls,
            model=OF_MODELS.get(name, lambda: "llama")(),
            gradient_checkpointing=False,
            router_aux_loss_coef=0.0 if "experts" in name else None,
            arguments=PASSED[name](),
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, theirs, ("loss", "grad_norm"))
    if name == "collator":
        assert isinstance(ours.data_collator, DataCollatorForSeq2Seq)


@pytest.mark.parametrize("checkpointing", [False, True])
@both_modes
def test_an_activated_adapter_gives_the_steps_of_trl(tmp_path, monkeypatch, packing, checkpointing):
    """An aLoRA adapter starts at the last invocation in each document, not in each packed row."""
    invocation = tiny_tokenizer()(" are", add_special_tokens=False)["input_ids"]
    adapter = {"task_type": "CAUSAL_LM", "alora_invocation_tokens": invocation}
    rows = [f"{pair['question']} are {pair['answer']}" for pair in tiny_rows("question_answer", 8)]
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 10.0}
    settings |= {"per_device_eval_batch_size": 8, "gradient_checkpointing": False, "model": "qwen2"}

    def run(cls, **changes):
        config = LoraConfig(target_modules=["q_proj", "v_proj"], **adapter)
        options = settings | changes | {"arguments": {"peft_config": config}}
        return sgd_run(tmp_path, cls, dataset=Dataset.from_dict({"text": rows}), **options)

    options = {"packing": True, "max_length": 512} if packing else {}
    options["gradient_checkpointing"] = checkpointing
    theirs, ours = run(SFTTrainer), run(PackedSFTTrainer, **options)
    assert_same_run(ours, theirs, ("loss", "grad_norm"))
    for _ in range(2):  # forwards without a backward
        losses = [one.evaluate(one.train_dataset)["eval_loss"] for one in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    if PackedSFTTrainer is not SFTTrainer:
        assert ours.attention.backend == "padded"
        seen = "trl_packing.attention.backends.invokes_adapter"
        monkeypatch.setattr(seen, lambda model: False)
        with pytest.raises(AssertionError):  # in one row, only the last document has an adapter
            assert_same_run(run(PackedSFTTrainer, **options), theirs, ("loss", "grad_norm"))


@packed_only
def test_an_activated_adapter_refuses_attention_over_a_whole_row(tmp_path):
    adapter = LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    options = {"attention": "documents", "arguments": {"peft_config": adapter}}
    with pytest.raises(ValueError, match=r"alora_invocation_tokens .*; set attention='auto'"):
        make_trainer(tmp_path, tiny_dataset(), "qwen2", **options)


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "TRL's path"])
def test_images_train_as_in_trl(tmp_path, monkeypatch, is_packed):
    pytest.importorskip("PIL")
    if is_packed:
        pytest.importorskip("transformers", "5.23")  # older ones take TRL's path
    else:
        pack_no_images(monkeypatch)
    options = {"per_device_train_batch_size": 3, "max_length": None, "max_steps": 2}
    options |= {"gradient_checkpointing": False, "dataset": tiny_dataset("images", 6)}

    def run(cls):
        model, processor = tiny_vlm("llava")
        arguments = {"eval_dataset": tiny_dataset("images", 3)}
        given = {"model": model, "processing_class": processor, "arguments": arguments}
        return sgd_run(tmp_path, cls, **options, **given)

    ours, theirs = run(PackedSFTTrainer), run(SFTTrainer)
    if PackedSFTTrainer is not SFTTrainer:
        vision = DataCollatorForVisionLanguageModeling
        assert isinstance(ours.data_collator, vision) != is_packed
    assert_same_run(ours, theirs)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)
