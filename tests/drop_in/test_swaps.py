"""TRL code with only the class changed builds, trains, evaluates and saves as in TRL."""

import inspect
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict, IterableDatasetDict
from harness import TWO_RUNS
from helpers.drop_in import (
    TEXT_FORMS,
    PackedSFTTrainer,
    both_modes,
    documents,
    logged,
    packed_only,
    parameters,
    sgd_run,
    tokenizer_for,
    train_moves_all,
    trainer_for,
    unchanged,
)
from helpers.tiny import (
    VOCAB_SIZE,
    documents_of_lengths,
    save_tiny_model,
    tiny_dataset,
    tiny_iterable,
    tiny_model,
    tiny_rows,
    tiny_tokenizer,
)
from helpers.vision import tiny_vlm
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

# --- it trains ------------------------------------------------------------------------------------

OPTIONS = [
    {"remove_unused_columns": False},
    {"optim": "adafactor"},
    {"auto_find_batch_size": True},
    {"full_determinism": True},
    {"gradient_checkpointing_kwargs": {"selective": True}},
    {"accelerator_config": {"even_batches": False}},
    {"packing_strategy": "wrapped", "max_length": 24},
    pytest.param({"use_cpu": False, "activation_offloading": True}, marks=pytest.mark.gpu),
    pytest.param({"torch_compile": True}, marks=pytest.mark.slow),
    pytest.param({"dataloader_num_workers": 2}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def model_id(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models"), "qwen2")


@both_modes
@pytest.mark.parametrize("changes", OPTIONS, ids=str)
def test_option_trains(tmp_path, changes, packing):
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        train_moves_all(trainer_for(tmp_path, "prompt_completion", packing=packing, **changes))
    finally:
        torch.use_deterministic_algorithms(deterministic)


@both_modes
def test_text_trains_a_vision_model(tmp_path, packing):
    model, processor = tiny_vlm("qwen2_5_vl")
    options = {"packing": packing, "gradient_checkpointing": False, "processing_class": processor}
    rows = tiny_dataset("conversational_language_modeling")
    trainer = trainer_for(tmp_path, rows, model=model, **options)
    before = parameters(trainer)
    trainer.train()
    still = unchanged(before, trainer)
    assert still
    assert all("vis" in name for name in still)


# --- the constructor ------------------------------------------------------------------------------


def test_constructor_takes_the_arguments_of_sft_trainer():
    both = (PackedSFTTrainer, SFTTrainer)
    ours, theirs = (inspect.signature(each.__init__).parameters for each in both)
    named = [p for p in ours.values() if p.kind is not p.VAR_KEYWORD]
    assert [(p.name, p.default) for p in named] == [(p.name, p.default) for p in theirs.values()]
    assert all(p.annotation is not p.empty for p in named[1:])


@both_modes
def test_a_model_id_brings_its_tokenizer_and_trls_defaults_train(tmp_path, model_id, packing):
    """Most of TRL's own tests run this: 17 documents, 8 a batch, bf16, a learning rate of 2e-5."""
    trainer = PackedSFTTrainer(
        model=model_id,
        args=SFTConfig(output_dir=str(tmp_path), packing=packing, use_cpu=True),
        train_dataset=tiny_dataset(rows=17),
    )
    assert (trainer.args.bf16, trainer.model.dtype) == (True, torch.float32)
    assert trainer.processing_class.eos_token == "<|im_end|>"
    assert {"trl", "sft"} <= {*trainer.model.model_tags}
    train_moves_all(trainer)
    assert trainer.state.global_step == (3 if packing else 9)
    assert {"mean_token_accuracy", "entropy", "num_tokens"} <= {*trainer.state.log_history[-1]}


def test_args_may_be_none_or_plain(tmp_path, model_id, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the default, bf16, asks for a GPU that has it; autocast on a CPU does too
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    trainer = PackedSFTTrainer(model=model_id, train_dataset=tiny_dataset())
    assert Path(trainer.args.output_dir).name == "tiny-qwen2-SFT"
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=2, use_cpu=True)
    trainer = PackedSFTTrainer(model=model_id, args=args, train_dataset=tiny_dataset())
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.packing is False
    train_moves_all(trainer)


@both_modes
def test_the_config_is_left_as_trl_leaves_it(tmp_path, packing):
    ours = trainer_for(tmp_path, packing=packing).args
    theirs = trainer_for(tmp_path, cls=SFTTrainer, packing=packing).args
    assert ours.to_dict() == theirs.to_dict()
    assert ours.packing is packing


# --- documents and trained tokens -----------------------------------------------------------------

ROLES = {"human": "user", "gpt": "assistant"}
MESSAGES = [
    {"messages": [{"role": ROLES[t["from"]], "content": t["value"]} for t in row["conversations"]]}
    for row in tiny_rows("conversations")
]
MASKED = {"input_ids": [[7, 8], [20, 21]], "labels": [[-100] * 2, [-100, 21]]}
FUNCTION = {"formatting_func": lambda row: f"Q: {row['question']} A: {row['answer']}"}
RENAMED = tiny_dataset("language_modeling").rename_column("text", "body")
PREPARED = {  # rows or their form, settings
    **{f"{form} {n}": (form, {"max_length": n}) for form in TEXT_FORMS for n in (128, 30)},
    "the end": ("language_modeling", {"max_length": 30, "truncation_mode": "keep_end"}),
    "a function": ("question_answer", {"arguments": FUNCTION}),
    "another column": (RENAMED, {"dataset_text_field": "body"}),
    "nothing trained": (Dataset.from_dict(MASKED), {"max_length": 3}),
}


@pytest.mark.parametrize("name", PREPARED)
def test_documents_are_the_rows_that_trl_prepares(tmp_path, name):
    rows, options = PREPARED[name]
    # TRL leaves the roles human and gpt as they are.
    same = Dataset.from_list(MESSAGES) if rows == "conversations" else rows
    rows = same if PackedSFTTrainer is SFTTrainer else rows
    options = options | {"processing_class": tokenizer_for(rows if type(rows) is str else "")}
    theirs = documents(trainer_for(tmp_path, same, cls=SFTTrainer, **options).train_dataset)
    for packing in (False, True)[: 1 + (PackedSFTTrainer is not SFTTrainer)]:
        ours = trainer_for(tmp_path, rows, packing=packing, **options)
        assert documents(ours.train_dataset) == theirs


@both_modes
def test_rows_as_they_are_and_transforms_train_where_preparation_is_skipped(tmp_path, packing):
    calls = []

    def tokenize(batch):
        calls.append(len(batch["text"]))
        ids = tiny_tokenizer()(batch["text"])["input_ids"]
        return {"input_ids": ids, "labels": ids}

    options = {"packing": packing, "dataset_kwargs": {"skip_prepare_dataset": True}}
    trainer = trainer_for(tmp_path, "tokenized_labels", **options)
    assert documents(trainer.train_dataset) == documents(tiny_dataset("tokenized_labels"))
    train_moves_all(trainer)
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        trainer.evaluate(tiny_dataset("tokenized_assistant_masks", 4))
    rows = tiny_dataset("language_modeling").with_transform(tokenize)
    trainer = trainer_for(tmp_path, rows, remove_unused_columns=False, **options)
    before = sum(calls)
    train_moves_all(trainer)
    assert sum(calls) > before


# --- evaluation -----------------------------------------------------------------------------------

WRAPS = {"one": None, "DatasetDict": DatasetDict, "streams": IterableDatasetDict}


@both_modes
@pytest.mark.parametrize("kind", WRAPS)
def test_every_kind_of_eval_dataset(tmp_path, kind, packing):
    """At construction and passed raw to `evaluate`: the same keys and the same losses."""
    make = tiny_iterable if kind == "streams" else tiny_dataset
    given = {"a": make(rows=5), "b": make(rows=6)}
    given = given["a"] if kind == "one" else WRAPS[kind](given)
    options = {"packing": packing, "eval_strategy": "steps", "eval_steps": 1}
    trainer = trainer_for(tmp_path, arguments={"eval_dataset": given}, **options)
    trainer.train()
    keys = ["eval_loss"] if kind == "one" else ["eval_a_loss", "eval_b_loss"]
    assert all(len(logged(trainer, key)) == 2 for key in keys)
    prepared, raw = trainer.evaluate(), trainer.evaluate(given)
    for key in keys:
        assert math.isfinite(prepared[key])
        if not packing or PackedSFTTrainer is not SFTTrainer:  # TRL packs a prepared set again
            assert raw[key] == pytest.approx(prepared[key], rel=TWO_RUNS)


@packed_only
@both_modes
def test_metrics_and_predictions_see_one_padded_row_a_document(tmp_path, packing):
    rows = documents_of_lengths([5, 17, 3, 9], prompt=2)
    model = tiny_model("llama")
    seen = []
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    options = {"per_device_eval_batch_size": 3, "include_for_metrics": ["inputs", "loss"]}
    arguments = {
        "eval_dataset": Dataset.from_list(rows),
        "compute_metrics": lambda found: seen.append(found) or {"mine": 0.5},
    }
    options |= {"model": model, "packing": packing, "arguments": arguments}
    trainer = trainer_for(tmp_path, **options)
    assert trainer.evaluate()["eval_mine"] == 0.5
    with pytest.warns(FutureWarning, match="`return_outputs=True`"):  # as TRL's trainer does
        predicted = trainer.predict(Dataset.from_list(rows))
    assert math.isfinite(predicted.metrics["test_loss"])
    assert len(seen[0].inputs) == len(seen[0].losses) == 4
    for found in (seen[0], predicted):
        assert found.predictions.shape == (4, 17, VOCAB_SIZE)
        for i, row in enumerate(rows):
            length = len(row["input_ids"])
            logits = torch.tensor(found.predictions[i])
            # two fp32 attention kernels
            torch.testing.assert_close(logits[:length], alone[i], atol=1e-4, rtol=1e-4)
            assert found.label_ids[i].tolist() == row["labels"] + [-100] * (17 - length)


OF_METRICS = ["eval_accumulation_steps", "eval_do_concat_batches", "eval_on_start"]


@both_modes
@pytest.mark.parametrize("name", [*OF_METRICS, "batch_eval_metrics"])
def test_options_of_metrics(tmp_path, name, packing):
    arguments = {
        "eval_dataset": tiny_dataset(rows=9),
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "compute_metrics": lambda p, compute_result=True: {"batches": len(p.predictions)},
    }
    options = {"packing": packing, "eval_strategy": "steps", "eval_steps": 1}
    options[name] = int(name != "eval_do_concat_batches")
    trainer = trainer_for(tmp_path, arguments=arguments, **options)
    trainer.train()
    assert len(logged(trainer, "eval_batches")) == 2 + (name == "eval_on_start")


# --- saving ---------------------------------------------------------------------------------------


@both_modes
def test_a_checkpoint_holds_what_trl_writes(tmp_path, packing):
    options = {"packing": packing, "max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    mine, others = (tmp_path / cls.__name__ for cls in (PackedSFTTrainer, SFTTrainer))
    ours = sgd_run(mine, PackedSFTTrainer, **options)
    sgd_run(others, SFTTrainer, **options)
    files = [{p.relative_to(f) for p in f.rglob("*")} for f in (mine, others)]
    assert files[1] <= files[0]
    configs = [json.loads((f / "checkpoint-2/config.json").read_text()) for f in (mine, others)]
    assert configs[0] == configs[1]
    saved = transformers.AutoModelForCausalLM.from_pretrained(mine / "checkpoint-2")
    assert all(torch.equal(p, ours.model.get_parameter(n)) for n, p in saved.named_parameters())
