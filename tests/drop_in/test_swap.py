"""TRL code keeps its behavior when `SFTTrainer` becomes `PackedSFTTrainer`, nothing else changed.

Every test here states something that TRL 1.16's own `SFTTrainer` does. To see that, run this file
against TRL's class:

    TRAINER=trl pytest tests/drop_in/test_swap.py

Only tests marked `packed_only` are skipped then: they cover what is different on purpose (documents
instead of packed rows in `train_dataset`, an enforced `max_length`, errors for bad input).
"""

import contextlib
import inspect
import json
import math
import os
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import trl
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
)
from helpers.tiny import (
    CHATML,
    CHATML_GENERATION,
    FORMS,
    MODELS,
    QUESTIONS_AND_ANSWERS,
    VOCAB_SIZE,
    documents_of_lengths,
    save_tiny_model,
    tiny_dataset,
    tiny_dataset_dict,
    tiny_iterable,
    tiny_model,
    tiny_rows,
    tiny_tokenizer,
    tiny_vlm,
)
from transformers import TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import (
    DataCollatorForLanguageModeling,
    DataCollatorForVisionLanguageModeling,
)

if os.environ.get("TRAINER") == "trl":
    from trl import SFTTrainer as PackedSFTTrainer
else:
    from trl_packing import PackedSFTTrainer

packed_only = pytest.mark.skipif(
    PackedSFTTrainer is SFTTrainer, reason="on purpose different from TRL's SFTTrainer"
)
both_modes = pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])

CONVERSATIONAL = [
    "conversational_language_modeling",
    "conversational_prompt_completion",
    "conversations",
    "tools",
]
TEXT_FORMS = [form for form in FORMS if form not in ("question_answer", "packed", "images")]


# ------------------------------------------------------------------------------------- helpers


def config(folder, **changes) -> SFTConfig:
    """A plain SFTConfig for two short fp32 steps."""
    settings = {
        "output_dir": str(folder),
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "max_steps": 2,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "max_length": 128,
    }
    if "num_train_epochs" in changes:
        settings["max_steps"] = -1
    return SFTConfig(**{**settings, **changes})


def tokenizer_for(form: str):
    return tiny_tokenizer(chat=True) if form in (*CONVERSATIONAL, "images") else tiny_tokenizer()


def trainer_for(
    folder,
    dataset="language_modeling",
    *,
    cls=None,
    model=None,
    processing_class=None,
    arguments=None,
    **config_changes,
):
    """A trainer of `cls` on a form of `tiny` or a data set; `arguments` go to the constructor."""
    cls = PackedSFTTrainer if cls is None else cls
    if isinstance(dataset, str):
        processing_class = processing_class or tokenizer_for(dataset)
        dataset = tiny_dataset(dataset)
    return cls(
        model=tiny_model("llama") if model is None else model,
        args=config(folder, **config_changes),
        train_dataset=dataset,
        processing_class=processing_class or tiny_tokenizer(),
        **(arguments or {}),
    )


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def unchanged(before: dict[str, torch.Tensor], trainer) -> list[str]:
    return [
        name
        for name, value in before.items()
        if torch.equal(value, trainer.model.get_parameter(name))
    ]


def train_moves_all(trainer) -> None:
    """Train; a finite loss is logged and no parameter has stayed what it was."""
    before = parameters(trainer)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert unchanged(before, trainer) == []


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def documents(dataset) -> list[tuple[list[int], list[int]]]:
    return [(row["input_ids"], row["labels"]) for row in dataset]


def trained_text(trainer, row: int | None = None) -> str:
    """The trained part of a prepared document, or of all of them, as text."""
    rows = list(trainer.train_dataset)
    labels = [label for one in (rows if row is None else [rows[row]]) for label in one["labels"]]
    return trainer.processing_class.decode([label for label in labels if label != -100])


# ----------------------------------------------------------------------------------- data forms


def test_constructor_takes_the_arguments_of_sft_trainer():
    ours, theirs = (
        inspect.signature(c.__init__).parameters for c in (PackedSFTTrainer, SFTTrainer)
    )
    assert issubclass(PackedSFTTrainer, SFTTrainer)
    if not any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        assert [*ours][: len(theirs)] == [*theirs]


@both_modes
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_every_form_trains_and_evaluates(tmp_path, form, packing):
    trainer = trainer_for(
        tmp_path, form, packing=packing, arguments={"eval_dataset": tiny_dataset(form, 5)}
    )
    train_moves_all(trainer)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@both_modes
@pytest.mark.parametrize(
    "form",
    [
        form
        if form in ("language_modeling", "conversational_prompt_completion", "tokenized_labels")
        else pytest.param(form, marks=pytest.mark.slow)
        for form in TEXT_FORMS
    ],
)
def test_every_form_trains_as_a_stream(tmp_path, form, packing):
    trainer = trainer_for(
        tmp_path,
        tiny_iterable(form),
        processing_class=tokenizer_for(form),
        packing=packing,
        arguments={"eval_dataset": tiny_iterable(form, 5)},
    )
    train_moves_all(trainer)
    assert math.isfinite(trainer.evaluate()["eval_loss"])


@both_modes
def test_a_stream_may_not_know_its_columns(tmp_path, packing):
    dataset = IterableDataset.from_generator(lambda: iter(tiny_rows("prompt_completion")))
    assert dataset.column_names is None
    train_moves_all(trainer_for(tmp_path, dataset, packing=packing))


CONVERSATIONS_AS_MESSAGES = Dataset.from_list(
    [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in (
            (turn["value"] for turn in row["conversations"]) for row in tiny_rows("conversations")
        )
    ]
)


@pytest.mark.parametrize("max_length", [128, 30])
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_documents_are_the_rows_that_trl_prepares(tmp_path, form, max_length):
    ours = trainer_for(tmp_path, form, max_length=max_length)
    # On purpose different: TRL leaves "human" and "gpt" as they are, which few templates know.
    same = CONVERSATIONS_AS_MESSAGES if form == "conversations" else form
    theirs = trainer_for(
        tmp_path,
        same,
        processing_class=tokenizer_for(form),
        max_length=max_length,
        cls=SFTTrainer,
    )
    assert documents(ours.train_dataset) == documents(theirs.train_dataset)


@packed_only
@pytest.mark.parametrize("form", TEXT_FORMS)
def test_train_dataset_holds_documents_in_their_order_when_packing(tmp_path, form):
    packed = trainer_for(tmp_path, form, packing=True, max_length=256)
    unpacked = trainer_for(tmp_path, form, packing=False, max_length=256)
    assert documents(packed.train_dataset) == documents(unpacked.train_dataset)
    assert not {"completion_mask", "assistant_masks"} & {*packed.train_dataset.column_names}


@both_modes
def test_formatting_func_makes_the_text(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        "question_answer",
        packing=packing,
        arguments={"formatting_func": lambda row: f"Q: {row['question']} A: {row['answer']}"},
    )
    question, answer = QUESTIONS_AND_ANSWERS[0]
    assert f"Q: {question} A: {answer}<eos>" in trained_text(trainer)
    train_moves_all(trainer)


def test_formatting_func_is_refused_with_completion_only_loss(tmp_path):
    with pytest.raises(ValueError, match="formatting function"):
        trainer_for(
            tmp_path,
            "prompt_completion",
            arguments={"formatting_func": lambda row: row["prompt"]},
        )


def test_formatting_func_is_ignored_for_tokens(tmp_path):
    plain = trainer_for(tmp_path, "tokenized")
    formatted = trainer_for(
        tmp_path, "tokenized", arguments={"formatting_func": lambda row: "something else"}
    )
    assert documents(formatted.train_dataset) == documents(plain.train_dataset)


@both_modes
def test_dataset_text_field_names_the_column(tmp_path, packing):
    dataset = tiny_dataset("language_modeling").rename_column("text", "body")
    trainer = trainer_for(tmp_path, dataset, packing=packing, dataset_text_field="body")
    assert QUESTIONS_AND_ANSWERS[0][0] in trained_text(trainer)
    train_moves_all(trainer)


def test_eos_is_added_once(tmp_path):
    rows = [{"text": "with<eos>"}, {"text": "without"}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows))
    assert [trained_text(trainer, i) for i in (0, 1)] == ["with<eos>", "without<eos>"]


def test_tokens_get_no_eos(tmp_path):
    trainer = trainer_for(tmp_path, Dataset.from_list([{"input_ids": [7, 8, 9]}]))
    assert documents(trainer.train_dataset) == [([7, 8, 9], [7, 8, 9])]


def test_conversations_get_no_eos_beyond_their_template(tmp_path):
    trainer = trainer_for(tmp_path, "conversational_language_modeling")
    messages = tiny_dataset("conversational_language_modeling")[0]["messages"]
    text = tiny_tokenizer(chat=True).apply_chat_template(messages, tokenize=False)
    assert trained_text(trainer, 0) == text


def test_tools_may_be_json(tmp_path):
    dataset = tiny_dataset("tools")
    as_json = dataset.remove_columns("tools").add_column(
        "tools", [json.dumps(tools) for tools in dataset["tools"]]
    )
    tokenizer = tiny_tokenizer(chat=True)
    prepared = [
        documents(trainer_for(tmp_path, d, processing_class=tokenizer).train_dataset)
        for d in (dataset, as_json)
    ]
    assert "Tools: " in tokenizer.decode(prepared[0][0][0])
    assert prepared[0] == prepared[1]


def test_chat_template_kwargs_of_each_row_reach_the_template(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{{ '<|im_start|>' if loud else '' }}" + CHATML
    dataset = tiny_dataset("conversational_language_modeling", 4).add_column(
        "chat_template_kwargs", [{"loud": i % 2 == 1} for i in range(4)]
    )
    trainer = trainer_for(tmp_path, dataset, processing_class=tokenizer)
    starts = [
        tokenizer.decode(ids).count("<|im_start|>") % 2
        for ids, _ in documents(trainer.train_dataset)
    ]
    assert starts == [0, 1, 0, 1]


@both_modes
def test_rows_packed_by_trl_are_accepted(tmp_path, packing):
    trainer = trainer_for(tmp_path, "packed", packing=packing, max_length=128)
    train_moves_all(trainer)


@packed_only
@both_modes
def test_rows_packed_by_trl_keep_their_documents_apart(tmp_path, packing):
    """The loss over a packed row is that of its documents, each as a row of its own."""
    row = tiny_dataset("packed", 1)[0]
    first = row["seq_lengths"][0]
    apart = [
        {k: row[k][s] for k in ("input_ids", "labels")} for s in (slice(first), slice(first, None))
    ]
    losses = []
    for rows in ([row], apart):
        eval_dataset = Dataset.from_list(rows)
        trainer = trainer_for(
            tmp_path, "packed", packing=packing, arguments={"eval_dataset": eval_dataset}
        )
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@both_modes
def test_shuffle_dataset_keeps_the_documents(tmp_path, packing):
    plain = trainer_for(tmp_path, "tokenized", packing=packing, max_length=64)
    shuffled = trainer_for(
        tmp_path, "tokenized", packing=packing, max_length=64, shuffle_dataset=True
    )
    tokens = [
        sorted(i for ids, _ in documents(t.train_dataset) for i in ids) for t in (plain, shuffled)
    ]
    assert tokens[0] == tokens[1]
    train_moves_all(shuffled)


@pytest.mark.slow
def test_dataset_num_proc_prepares_the_same_documents(tmp_path):
    one = trainer_for(tmp_path, "prompt_completion")
    two = trainer_for(tmp_path, "prompt_completion", dataset_num_proc=2)
    assert documents(one.train_dataset) == documents(two.train_dataset)


# ---------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(
    ("form", "completion_only_loss", "trained"),
    [
        ("prompt_completion", None, "Beautiful.<eos>"),
        ("prompt_completion", True, "Beautiful.<eos>"),
        ("prompt_completion", False, "What is better than ugly? Beautiful.<eos>"),
        ("conversational_prompt_completion", None, "Beautiful.<|im_end|>\n"),
        ("tokenized_completion_mask", True, "Beautiful.<eos>"),
        ("tokenized_completion_mask", None, "What is better than ugly? Beautiful.<eos>"),
        ("tokenized_assistant_masks", None, "Beautiful.<eos>"),
        ("tokenized_labels", None, "Beautiful.<eos>"),
        ("tokenized_labels", False, "Beautiful.<eos>"),
    ],
)
@both_modes
def test_only_these_tokens_are_trained(tmp_path, form, completion_only_loss, trained, packing):
    trainer = trainer_for(
        tmp_path, form, completion_only_loss=completion_only_loss, packing=packing, max_length=500
    )
    if packing and PackedSFTTrainer is SFTTrainer:  # rows hold several documents
        assert trained in trained_text(trainer)
    else:
        assert trained_text(trainer, 0) == trained


def test_labels_win_over_masks(tmp_path):
    rows = [{"input_ids": [7, 8, 9], "labels": [-100, 8, -100], "assistant_masks": [1, 1, 1]}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows))
    assert documents(trainer.train_dataset) == [([7, 8, 9], [-100, 8, -100])]


def test_both_masks_apply_together(tmp_path):
    rows = [
        {
            "input_ids": [7, 8, 9, 10],
            "completion_mask": [0, 1, 1, 1],
            "assistant_masks": [1, 1, 0, 1],
        }
    ]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), completion_only_loss=True)
    assert documents(trainer.train_dataset) == [([7, 8, 9, 10], [-100, 8, -100, 10])]


def test_completion_starts_where_the_prompt_tokens_end_alike(tmp_path):
    """A token across the boundary belongs to the completion, as TRL has it."""
    rows = [{"prompt": "What is better th", "completion": "an ugly?"}]
    ours, theirs = (
        trainer_for(tmp_path, Dataset.from_list(rows), cls=c) for c in (None, SFTTrainer)
    )
    assert documents(ours.train_dataset) == documents(theirs.train_dataset)
    assert trained_text(ours, 0).endswith("ugly?<eos>")


@both_modes
def test_assistant_only_loss_trains_the_answers(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        "conversational_language_modeling",
        processing_class=tiny_tokenizer(chat="generation"),
        assistant_only_loss=True,
        packing=packing,
        max_length=128,
    )
    text = trained_text(trainer)
    assert "Beautiful.<|im_end|>" in text
    assert "Quite sure.<|im_end|>" in text
    assert "What is" not in text
    train_moves_all(trainer)


def test_assistant_only_loss_of_a_stream(tmp_path):
    trainer = trainer_for(
        tmp_path,
        tiny_iterable("conversational_language_modeling"),
        processing_class=tiny_tokenizer(chat="generation"),
        assistant_only_loss=True,
    )
    train_moves_all(trainer)


@both_modes
def test_assistant_and_completion_only_loss_together(tmp_path, packing):
    def add_turns(row):
        row["completion"] += [{"role": "user", "content": "Not this."}, row["completion"][0]]
        return row

    trainer = trainer_for(
        tmp_path,
        tiny_dataset("conversational_prompt_completion").map(add_turns),
        processing_class=tiny_tokenizer(chat="generation"),
        assistant_only_loss=True,
        completion_only_loss=True,
        packing=packing,
    )
    assert "Beautiful.<|im_end|>Beautiful.<|im_end|>" in trained_text(trainer)
    assert "Not this." not in trained_text(trainer)
    train_moves_all(trainer)


def test_assistant_only_loss_patches_a_template_that_trl_knows(tmp_path):
    """Qwen3's own template has no generation marks; TRL renders with one that has."""
    tokenizer = tiny_tokenizer(chat=True)
    templates = Path(trl.__file__).parent / "chat_templates"
    tokenizer.chat_template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
    trainer = trainer_for(
        tmp_path,
        "conversational_prompt_completion",
        processing_class=tokenizer,
        assistant_only_loss=True,
    )
    assert "generation" in trainer.chat_template
    assert "{% generation %}" not in trainer.processing_class.chat_template
    assert "Beautiful.<|im_end|>" in trained_text(trainer, 0)
    assert "ugly" not in trained_text(trainer, 0)


def test_assistant_only_loss_needs_a_template_with_marks(tmp_path):
    with pytest.raises(ValueError, match="generation"):
        trainer_for(tmp_path, "conversational_language_modeling", assistant_only_loss=True)


def test_assistant_only_loss_needs_conversations(tmp_path):
    with pytest.raises(ValueError, match="not conversational"):
        trainer_for(tmp_path, "language_modeling", assistant_only_loss=True)


def test_a_conversation_without_assistant_is_refused(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Anyone?"}]}]
    with pytest.raises(RuntimeError, match="no assistant tokens"):
        trainer_for(
            tmp_path,
            Dataset.from_list(rows),
            processing_class=tiny_tokenizer(chat="generation"),
            assistant_only_loss=True,
        )


def test_an_untrained_stop_token_is_warned_about(tmp_path, caplog, monkeypatch):
    tokenizer = tiny_tokenizer(chat=True)
    marked = "{%- generation %}{{- body + '<|im_end|>' }}{%- endgeneration %}"
    assert marked in CHATML_GENERATION
    tokenizer.chat_template = CHATML_GENERATION.replace(
        marked, "{%- generation %}{{- body }}{%- endgeneration %}{{- '<|im_end|>' }}"
    )
    monkeypatch.setattr(transformers.utils.logging.get_logger("trl"), "propagate", True)
    with caplog.at_level("WARNING"):
        trainer_for(
            tmp_path,
            "conversational_language_modeling",
            processing_class=tokenizer,
            assistant_only_loss=True,
        )
    assert "may not learn to stop" in caplog.text


# ---------------------------------------------------------------------------------------- length


@pytest.mark.parametrize(("mode", "kept"), [("keep_start", [7, 8, 9]), ("keep_end", [9, 10, 11])])
def test_truncation_keeps_one_end(tmp_path, mode, kept):
    rows = [{"input_ids": [7, 8, 9, 10, 11]}, {"input_ids": [20, 21]}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=3, truncation_mode=mode)
    assert [ids for ids, _ in documents(trainer.train_dataset)] == [kept, [20, 21]]


def test_documents_masked_by_truncation_are_dropped(tmp_path):
    rows = [
        {"input_ids": [7, 8, 9, 10, 11], "assistant_masks": [0, 0, 0, 1, 1]},
        {"input_ids": [20, 21, 22], "assistant_masks": [1, 1, 1]},
    ]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=3)
    assert [labels for _, labels in documents(trainer.train_dataset)] == [[20, 21, 22]]


@packed_only
def test_masked_documents_are_dropped_when_packing(tmp_path):
    rows = [
        {"input_ids": [7, 8, 9, 10, 11], "labels": [-100, -100, -100, -100, -100]},
        {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]},
    ]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=3, packing=True)
    assert [ids for ids, _ in documents(trainer.train_dataset)] == [[20, 21, 22]]


@pytest.mark.parametrize("max_length", [3, None])
def test_masked_documents_keep_their_place_without_max_length(tmp_path, max_length):
    rows = [
        {"input_ids": [7, 8, 9], "labels": [-100, -100, -100]},
        {"input_ids": [20, 21, 22], "labels": [-100, 21, 22]},
    ]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows), max_length=max_length)
    kept = [ids for ids, _ in documents(trainer.train_dataset)]
    assert kept == ([[7, 8, 9]] if max_length is None else []) + [[20, 21, 22]]


def test_an_empty_document_is_dropped(tmp_path):
    rows = [{"input_ids": [7, 8, 9]}, {"input_ids": []}]
    trainer = trainer_for(tmp_path, Dataset.from_list(rows))
    assert documents(trainer.train_dataset) == [([7, 8, 9], [7, 8, 9])]


def test_unlimited_length(tmp_path):
    trainer = trainer_for(tmp_path, "tokenized", max_length=None)
    assert documents(trainer.train_dataset)[3][0] == tiny_dataset("tokenized")[3]["input_ids"]
    train_moves_all(trainer)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped", "bfd-requeue"])
def test_packing_strategies_of_trl(tmp_path, strategy):
    with pytest.warns(FutureWarning) if strategy == "bfd-requeue" else contextlib.nullcontext():
        trainer = trainer_for(
            tmp_path,
            "language_modeling",
            packing=True,
            packing_strategy=strategy,
            max_length=24,  # leaves no piece of one token, which would have nothing to train
            num_train_epochs=1,
        )
    assert all(len(ids) <= 24 for ids, _ in documents(trainer.train_dataset))
    total = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    everything = sum(
        len(tiny_tokenizer()(row["text"] + "<eos>")["input_ids"]) for row in tiny_dataset()
    )
    if strategy == "bfd":  # cuts
        assert total < everything
    else:
        assert total == everything
    train_moves_all(trainer)


@packed_only
def test_packing_works_with_the_padding_free_flag(tmp_path):
    trainer = trainer_for(tmp_path, "language_modeling", packing=True, padding_free=True)
    train_moves_all(trainer)


def test_padding_free_without_a_length(tmp_path):
    trainer = trainer_for(tmp_path, "language_modeling", padding_free=True, max_length=None)
    train_moves_all(trainer)


@packed_only
def test_padding_free_enforces_max_length(tmp_path):
    trainer = trainer_for(tmp_path, "tokenized", padding_free=True, max_length=10)
    assert {len(ids) for ids, _ in documents(trainer.train_dataset)} == {10}
    train_moves_all(trainer)


@both_modes
def test_pad_to_multiple_of(tmp_path, packing):
    widths = []
    model = tiny_model("llama")
    model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    trainer = trainer_for(
        tmp_path, "language_modeling", model=model, packing=packing, pad_to_multiple_of=16
    )
    arguments = trainer.get_train_dataloader()
    assert all(batch["input_ids"].shape[1] % 16 == 0 for batch in arguments)
    train_moves_all(trainer)


# ----------------------------------------------------------------------------- prepared data sets


@both_modes
def test_skip_prepare_dataset_takes_rows_as_they_are(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        "tokenized_labels",
        packing=packing,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    assert documents(trainer.train_dataset) == documents(tiny_dataset("tokenized_labels"))
    train_moves_all(trainer)


def test_skip_prepare_dataset_refuses_masks_without_labels(tmp_path):
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        trainer_for(
            tmp_path, "tokenized_assistant_masks", dataset_kwargs={"skip_prepare_dataset": True}
        )


def test_evaluate_refuses_masks_without_labels_where_preparation_is_skipped(tmp_path):
    trainer = trainer_for(
        tmp_path, "tokenized_labels", dataset_kwargs={"skip_prepare_dataset": True}
    )
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        trainer.evaluate(tiny_dataset("tokenized_assistant_masks", 4))


def test_a_transformed_dataset_is_refused_unless_preparation_is_skipped(tmp_path):
    dataset = tiny_dataset("language_modeling").with_transform(lambda batch: batch)
    with pytest.raises(
        ValueError, match=r"Dataset\.with_transform\(\).*skip_prepare_dataset.*trainer-ready"
    ):
        trainer_for(tmp_path, dataset)


@both_modes
def test_a_transform_runs_while_training_where_preparation_is_skipped(tmp_path, packing):
    tokenizer = tiny_tokenizer()
    calls = []

    def tokenize(batch):
        calls.append(len(batch["text"]))
        ids = tokenizer(batch["text"])["input_ids"]
        return {"input_ids": ids, "labels": ids}

    trainer = trainer_for(
        tmp_path,
        tiny_dataset("language_modeling").with_transform(tokenize),
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        packing=packing,
    )
    before = sum(calls)
    train_moves_all(trainer)
    assert sum(calls) > before


# ------------------------------------------------------------------------------- evaluation sets


def _eval_dataset(kind: str):
    one = tiny_iterable(rows=5) if "iterable" in kind else tiny_dataset(rows=5)
    two = tiny_iterable(rows=6) if "iterable" in kind else tiny_dataset(rows=6)
    if kind in ("dataset", "iterable_dataset"):
        return one
    wrap = {"dataset_dict": DatasetDict, "iterable_dataset_dict": IterableDatasetDict}.get(
        kind, dict
    )
    return wrap({"a": one, "b": two})


EVAL_KINDS = [
    "dataset",
    "iterable_dataset",
    "dataset_dict",
    "iterable_dataset_dict",
    "dict_of_dataset",
    "dict_of_iterable_dataset",
]


@both_modes
@pytest.mark.parametrize("kind", EVAL_KINDS)
def test_every_kind_of_eval_dataset(tmp_path, kind, packing):
    """At construction and passed raw to `evaluate`: the same keys and the same losses."""
    trainer = trainer_for(
        tmp_path, packing=packing, arguments={"eval_dataset": _eval_dataset(kind)}
    )
    several = "dict" in kind
    assert isinstance(trainer.eval_dataset, dict) is several
    sets = trainer.eval_dataset.values() if several else [trainer.eval_dataset]
    assert all("input_ids" in next(iter(one)) for one in sets)

    keys = ["eval_a_loss", "eval_b_loss"] if several else ["eval_loss"]
    prepared, raw = trainer.evaluate(), trainer.evaluate(_eval_dataset(kind))
    for key in keys:
        assert math.isfinite(prepared[key])
        if packing and several and PackedSFTTrainer is SFTTrainer:
            continue  # TRL packs a prepared set again
        assert raw[key] == pytest.approx(prepared[key], abs=1e-6)


@packed_only
@both_modes
@pytest.mark.parametrize("eval_packing", [True, False, None])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_eval_loss_is_the_exact_mean_over_trained_tokens(
    tmp_path, packing, eval_packing, batch_size
):
    rows = documents_of_lengths([5, 17, 3, 30, 9], prompt=2)
    model = tiny_model("llama")
    total = sum(
        model(
            input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])
        ).loss.item()
        * (len(row["input_ids"]) - 2)
        for row in rows
    )
    trainer = trainer_for(
        tmp_path,
        model=model,
        packing=packing,
        eval_packing=eval_packing,
        per_device_eval_batch_size=batch_size,
        max_length=32,
        arguments={"eval_dataset": Dataset.from_list(rows)},
    )
    exact = total / sum(len(row["input_ids"]) - 2 for row in rows)
    # fp32 sums of 54 log-probabilities in another order
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, abs=1e-5)


@packed_only
def test_a_prepared_eval_dataset_can_be_passed_again(tmp_path):
    trainer = trainer_for(tmp_path, packing=True, arguments={"eval_dataset": tiny_dataset(rows=5)})
    assert len(trainer.eval_dataset) == 5
    first = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(first, abs=1e-6)


def test_evaluate_takes_the_name_of_a_set_and_a_prefix(tmp_path):
    trainer = trainer_for(tmp_path, arguments={"eval_dataset": dict(tiny_dataset_dict())})
    by_name = trainer.evaluate("test")
    assert math.isfinite(by_name["eval_loss"])
    assert math.isfinite(trainer.evaluate("test", metric_key_prefix="held_out")["held_out_loss"])


@both_modes
def test_evaluation_during_training_is_logged_by_name(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        eval_steps=1,
        arguments={"eval_dataset": dict(tiny_dataset_dict())},
    )
    trainer.train()
    keys = [key for entry in trainer.state.log_history for key in entry if key.endswith("_loss")]
    assert keys == ["eval_train_loss", "eval_test_loss"] * 2 + ["train_loss"]


@both_modes
def test_evaluation_logs_trl_metrics(tmp_path, packing):
    trainer = trainer_for(
        tmp_path, packing=packing, arguments={"eval_dataset": tiny_dataset(rows=5)}
    )
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens"} <= {
        *metrics
    }
    # a random model over 320 tokens is nearly as unsure as can be
    assert 0.5 * math.log(VOCAB_SIZE) < metrics["eval_entropy"] < math.log(VOCAB_SIZE)
    assert 0 <= metrics["eval_mean_token_accuracy"] < 0.2


@both_modes
@pytest.mark.parametrize("metric", ["eval_loss", "eval_mean_token_accuracy"])
def test_the_best_model_is_loaded_at_the_end(tmp_path, packing, metric):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
        arguments={"eval_dataset": tiny_dataset(rows=5)},
    )
    trainer.train()
    values = logged(trainer, metric)
    best = min(values) if metric == "eval_loss" else max(values)
    assert trainer.state.best_metric == pytest.approx(best, abs=1e-7)
    assert trainer.evaluate()[metric] == pytest.approx(best, abs=1e-6)


# ---------------------------------------------------------------------------- metrics from logits


def _forward_alone(model, rows) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]


@both_modes
def test_compute_metrics_sees_one_padded_row_a_document(tmp_path, packing):
    rows = documents_of_lengths([5, 17, 3, 9], prompt=2)
    model = tiny_model("llama")
    alone = _forward_alone(model, rows)
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction)
        return {"mine": 0.5}

    if packing and PackedSFTTrainer is SFTTrainer:
        pytest.skip("TRL passes packed rows to compute_metrics")
    trainer = trainer_for(
        tmp_path,
        model=model,
        packing=packing,
        arguments={"eval_dataset": Dataset.from_list(rows), "compute_metrics": compute_metrics},
    )
    assert trainer.evaluate()["eval_mine"] == 0.5
    (prediction,) = seen
    assert prediction.predictions.shape == (4, 17, VOCAB_SIZE)
    assert prediction.label_ids.shape == (4, 17)
    for i, row in enumerate(rows):
        length = len(row["input_ids"])
        # two fp32 attention kernels
        torch.testing.assert_close(
            torch.tensor(prediction.predictions[i, :length]), alone[i], atol=1e-4, rtol=1e-4
        )
        labels = prediction.label_ids[i].tolist()
        assert labels == row["labels"] + [-100] * (17 - length)


@both_modes
def test_compute_metrics_during_training(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        eval_steps=1,
        arguments={
            "eval_dataset": tiny_dataset(rows=5),
            "compute_metrics": lambda p: {"width": p.predictions.shape[-1]},
        },
    )
    with pytest.warns(FutureWarning, match="`return_outputs=True`"):
        trainer.train()
    assert logged(trainer, "eval_width") == [VOCAB_SIZE, VOCAB_SIZE]
    assert all(math.isfinite(loss) for loss in logged(trainer, "eval_loss"))


def test_preprocess_logits_for_metrics(tmp_path):
    trainer = trainer_for(
        tmp_path,
        arguments={
            "eval_dataset": tiny_dataset(rows=5),
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
            "compute_metrics": lambda p: {"dimensions": p.predictions.ndim},
        },
    )
    assert trainer.evaluate()["eval_dimensions"] == 2


def test_batch_eval_metrics(tmp_path):
    seen = []

    def compute_metrics(prediction, compute_result):
        seen.append((prediction.predictions.shape[0], compute_result))
        return {"rows": sum(n for n, _ in seen)} if compute_result else {}

    trainer = trainer_for(
        tmp_path,
        batch_eval_metrics=True,
        per_device_eval_batch_size=2,
        arguments={"eval_dataset": tiny_dataset(rows=5), "compute_metrics": compute_metrics},
    )
    assert trainer.evaluate()["eval_rows"] == 5
    assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]


@both_modes
def test_predict_returns_logits(tmp_path, packing):
    trainer = trainer_for(tmp_path, packing=packing)
    with pytest.warns(FutureWarning, match="`return_outputs=True`"):
        output = trainer.predict(trainer.train_dataset)
    assert output.predictions.shape[-1] == VOCAB_SIZE
    assert math.isfinite(output.metrics["test_loss"])
    if not packing:
        longest = max(len(ids) for ids, _ in documents(trainer.train_dataset))
        assert output.predictions.shape[:2] == (16, longest)


def test_metrics_can_include_inputs_and_losses(tmp_path):
    trainer = trainer_for(
        tmp_path,
        include_for_metrics=["inputs", "loss"],
        arguments={
            "eval_dataset": tiny_dataset(rows=5),
            "compute_metrics": lambda p: {"inputs": len(p.inputs), "losses": len(p.losses)},
        },
    )
    metrics = trainer.evaluate()
    assert metrics["eval_inputs"] == metrics["eval_losses"] == 5


@both_modes
@pytest.mark.parametrize(
    "changes",
    [{"eval_accumulation_steps": 1}, {"eval_do_concat_batches": False}, {"eval_on_start": True}],
    ids=str,
)
def test_evaluation_option_works(tmp_path, changes, packing):
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        eval_strategy="steps",
        eval_steps=1,
        arguments={
            "eval_dataset": tiny_dataset(rows=9),
            "compute_metrics": lambda p: {"batches": len(p.predictions)},
        },
        **changes,
    )
    trainer.train()
    assert len(logged(trainer, "eval_batches")) == 2 + ("eval_on_start" in changes)


# ---------------------------------------------------------------------------------------- models


@packed_only
@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_packed(tmp_path, name):
    """Those that carry a state from token to token too: rows are padded inside the model."""
    trainer = trainer_for(
        tmp_path, model=tiny_model(name), packing=True, num_train_epochs=1, max_length=64
    )
    train_moves_all(trainer)


@pytest.fixture(scope="module")
def model_id(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models"), "qwen2")


def _from_id(model_id, folder, arguments=None, dataset="language_modeling", **changes):
    return PackedSFTTrainer(
        model=model_id,
        args=config(folder, **changes),
        train_dataset=tiny_dataset(dataset),
        **(arguments or {}),
    )


@both_modes
def test_a_model_id_brings_its_tokenizer(tmp_path, model_id, packing):
    trainer = _from_id(model_id, tmp_path, packing=packing)
    assert trainer.processing_class.eos_token == "<|im_end|>"
    assert trainer.model.dtype == torch.float32
    train_moves_all(trainer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_model_init_kwargs_set_the_dtype(tmp_path, model_id, dtype):
    trainer = _from_id(
        model_id,
        tmp_path,
        model_init_kwargs={"dtype": getattr(torch, dtype)},
        bf16=True,
        learning_rate=0.1,
    )
    train_moves_all(trainer)
    assert {p.dtype for p in trainer.model.parameters()} == {getattr(torch, dtype)}


@both_modes
def test_bf16_is_the_default_and_trains_fp32_weights(tmp_path, packing):
    args = SFTConfig(output_dir=str(tmp_path), packing=packing, num_train_epochs=1, use_cpu=True)
    assert args.bf16
    trainer = PackedSFTTrainer(
        tiny_model("qwen2"), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    train_moves_all(trainer)
    assert trainer.model.dtype == torch.float32


@both_modes
def test_three_epochs_of_trl_defaults(tmp_path, model_id, packing):
    """What most of TRL's own tests run: 17 documents, 8 a batch, bf16, a learning rate of 2e-5."""
    trainer = PackedSFTTrainer(
        model=model_id,
        args=SFTConfig(output_dir=str(tmp_path), packing=packing, use_cpu=True),
        train_dataset=tiny_dataset(rows=17),
    )
    train_moves_all(trainer)
    assert trainer.state.global_step == (3 if packing else 9)
    assert {"mean_token_accuracy", "entropy", "num_tokens"} <= {*trainer.state.log_history[-1]}
    assert (tmp_path / f"checkpoint-{trainer.state.global_step}" / "model.safetensors").exists()


def test_attn_implementation_can_be_named(tmp_path, model_id):
    for name in ("sdpa", "eager"):
        trainer = _from_id(model_id, tmp_path, model_init_kwargs={"attn_implementation": name})
        train_moves_all(trainer)


def test_args_may_be_none(tmp_path, model_id, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # the default, bf16, asks for a GPU that has it; autocast on a CPU does too
    monkeypatch.setattr(transformers.training_args, "is_torch_bf16_gpu_available", lambda: True)
    trainer = PackedSFTTrainer(model=model_id, train_dataset=tiny_dataset())
    assert Path(trainer.args.output_dir).name == "tiny-qwen2-SFT"


@pytest.mark.parametrize("kind", ["plain", "peft"])
def test_tags_are_added(tmp_path, model_id, kind):
    peft_config = None
    if kind == "peft":
        peft_config = pytest.importorskip("peft").LoraConfig()
    trainer = _from_id(model_id, tmp_path, {"peft_config": peft_config})
    assert {"trl", "sft"} <= {*trainer.model.model_tags}


def test_plain_training_arguments_are_taken(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=4, use_cpu=True
    )
    trainer = PackedSFTTrainer(
        tiny_model(), args, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    assert isinstance(trainer.args, SFTConfig)
    assert trainer.args.packing is False
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_init_kwargs": {"dtype": "float32"}}, "`model_init_kwargs` will be ignored"),
        ({"packing": False}, ""),
    ],
)
def test_model_init_kwargs_with_a_model_only_warn(tmp_path, caplog, change, text):
    with caplog.at_level("WARNING"):
        trainer_for(tmp_path, **change)
    assert text in caplog.text


def test_quantization_config_in_two_places_is_refused(tmp_path, model_id):
    quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ValueError, match="`quantization_config` both"):
        _from_id(
            model_id,
            tmp_path,
            {"quantization_config": quantization_config},
            model_init_kwargs={"quantization_config": quantization_config},
        )


@pytest.mark.slow
def test_qlora_trains(tmp_path, model_id):
    peft = pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    quantization_config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
    )
    trainer = _from_id(
        model_id,
        tmp_path,
        {"quantization_config": quantization_config, "peft_config": peft.LoraConfig()},
        model_init_kwargs={"device_map": "cpu"},
        bf16=True,
    )
    assert trainer.model.base_model.model.is_loaded_in_4bit
    before = {n: p for n, p in parameters(trainer).items() if "lora" in n}
    assert {p.dtype for p in before.values()} == {torch.bfloat16}
    trainer.train()
    assert unchanged(before, trainer) == []


def test_a_processing_class_must_be_one(tmp_path):
    with pytest.raises(TypeError, match="processing_class"):
        PackedSFTTrainer(
            tiny_model(), config(tmp_path), train_dataset=tiny_dataset(), processing_class=object()
        )


REMOTE_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class TinyRemoteConfig(LlamaConfig):
    model_type = "tiny_remote"

class TinyRemoteForCausalLM(LlamaForCausalLM):
    config_class = TinyRemoteConfig
"""


def test_remote_code_needs_trust(tmp_path, monkeypatch):
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "hub")
    )
    folder = Path(save_tiny_model(tmp_path, "llama"))
    (folder / "modeling_tiny_remote.py").write_text(REMOTE_CODE)
    written = json.loads((folder / "config.json").read_text())
    written |= {
        "model_type": "tiny_remote",
        "architectures": ["TinyRemoteForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_tiny_remote.TinyRemoteConfig",
            "AutoModelForCausalLM": "modeling_tiny_remote.TinyRemoteForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match="custom code"):
        _from_id(str(folder), tmp_path)
    trainer = _from_id(str(folder), tmp_path, trust_remote_code=True)
    assert type(trainer.model).__name__ == "TinyRemoteForCausalLM"
    train_moves_all(trainer)


# ------------------------------------------------------------------------- tokens and templates


@pytest.mark.parametrize(
    ("before", "after"), [([2, 4], [3, 2, 4]), (2, [3, 2]), (None, [3]), ([2, 3], [2, 3])]
)
def test_eos_token_is_mirrored_onto_the_model(tmp_path, before, after):
    model = tiny_model()
    model.generation_config.eos_token_id = before
    trainer = trainer_for(tmp_path, model=model, eos_token="<|im_start|>")
    assert trainer.processing_class.eos_token_id == 3
    assert trainer.model.config.eos_token_id == 3
    assert trainer.model.generation_config.eos_token_id == after
    assert trained_text(trainer, 0).endswith("<|im_start|>")


def test_eos_token_must_be_known(tmp_path):
    with pytest.raises(ValueError, match="eos_token"):
        trainer_for(tmp_path, eos_token="<nothing>")


@pytest.mark.parametrize(("pad", "pad_token_id"), [(None, 2), ("<|other|>", 5)])
def test_pad_token_is_mirrored_onto_the_model(tmp_path, pad, pad_token_id):
    trainer = trainer_for(tmp_path, processing_class=tiny_tokenizer(pad=pad), packing=True)
    assert trainer.processing_class.pad_token_id == pad_token_id
    assert trainer.model.config.pad_token_id == pad_token_id
    assert trainer.model.generation_config.pad_token_id == pad_token_id


def test_pad_token_of_the_config_is_deprecated_but_works(tmp_path):
    with pytest.warns(FutureWarning, match="pad_token"):
        trainer = trainer_for(tmp_path, pad_token="<|other|>")
    assert trainer.processing_class.pad_token == "<|other|>"
    with pytest.raises(ValueError, match="pad_token"), pytest.warns(FutureWarning):
        trainer_for(tmp_path, pad_token="<nothing>")


@pytest.mark.parametrize("source", ["file", "folder"])
def test_chat_template_path(tmp_path, source):
    if source == "file":
        path = tmp_path / "template.jinja"
        path.write_text(CHATML, encoding="utf-8")
    else:
        path = tmp_path / "other"
        tiny_tokenizer(chat=True).save_pretrained(path)
    trainer = trainer_for(
        tmp_path / "out",
        tiny_dataset("conversational_language_modeling"),
        model=tiny_model("gpt_neox"),
        chat_template_path=str(path),
        save_strategy="steps",
        save_steps=2,
    )
    assert trainer.processing_class.chat_template == CHATML
    train_moves_all(trainer)
    assert (tmp_path / "out/checkpoint-2/chat_template.jinja").read_text(encoding="utf-8") == CHATML


# ------------------------------------------------------------------------------------------ peft


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


def test_lora_by_model_id(tmp_path, model_id):
    trainer = _from_id(model_id, tmp_path, {"peft_config": _peft().LoraConfig()})
    _trains_only_the_adapter(trainer, _lora_base_names("qwen2"))


@both_modes
def test_a_peft_model_can_be_passed(tmp_path, packing):
    peft = _peft()
    model = peft.get_peft_model(tiny_model("qwen2"), peft.LoraConfig())
    trainer = trainer_for(tmp_path, model=model, packing=packing)
    _trains_only_the_adapter(trainer, _lora_base_names("qwen2"))


@both_modes
def test_lora_on_experts(tmp_path, packing):
    lora = _peft().LoraConfig(
        target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    )
    trainer = trainer_for(
        tmp_path, model=tiny_model("gpt_oss"), packing=packing, arguments={"peft_config": lora}
    )
    _trains_only_the_adapter(trainer, _lora_base_names("gpt_oss"))


def test_adapters_start_the_same_from_the_same_seed(tmp_path):
    starts = []
    for state in (1, 2):
        torch.manual_seed(state)
        trainer = trainer_for(tmp_path, arguments={"peft_config": _peft().LoraConfig()})
        starts.append({n: p for n, p in parameters(trainer).items() if "lora_A" in n})
    assert starts[0].keys() == starts[1].keys()
    assert all(torch.equal(starts[0][n], starts[1][n]) for n in starts[0])


def _virtual_tokens(kind: str):
    peft = _peft()
    common = {"task_type": peft.TaskType.CAUSAL_LM, "num_virtual_tokens": 4}
    return {
        "prompt_tuning": lambda: peft.PromptTuningConfig(**common),
        "prefix_tuning": lambda: peft.PrefixTuningConfig(**common),
        "prompt_encoder": lambda: peft.PromptEncoderConfig(**common, encoder_hidden_size=32),
    }[kind]()


@pytest.mark.parametrize("converted", [False, True], ids=["config", "model"])
@pytest.mark.parametrize("kind", ["prompt_tuning", "prefix_tuning", "prompt_encoder"])
def test_virtual_tokens_train(tmp_path, kind, converted):
    model, peft_config = tiny_model("qwen2"), _virtual_tokens(kind)
    base_names = {f"base_model.{n}" for n, _ in model.named_parameters()}
    if converted:
        model, peft_config = _peft().get_peft_model(model, peft_config), None
    trainer = trainer_for(
        tmp_path,
        model=model,
        gradient_checkpointing=kind == "prompt_encoder",
        logging_steps=10,
        arguments={"peft_config": peft_config},
    )
    _trains_only_the_adapter(trainer, base_names)
    assert "mean_token_accuracy" in trainer.state.log_history[-1]


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
        _one_step(
            tmp_path,
            cls,
            model="qwen2",
            arguments={"peft_config": _virtual_tokens(kind)},
            gradient_checkpointing=False,
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_peft_mistakes_are_refused(tmp_path):
    peft = _peft()
    with pytest.raises(TypeError, match="peft_config"):
        trainer_for(tmp_path, arguments={"peft_config": {"r": 8}})
    with pytest.raises(ValueError, match="`PeftModel` instance together with a `peft_config`"):
        trainer_for(
            tmp_path,
            model=peft.get_peft_model(tiny_model(), peft.LoraConfig()),
            arguments={"peft_config": peft.LoraConfig()},
        )
    with pytest.raises(ValueError, match="`lm_head` is not supported"):
        trainer_for(
            tmp_path, arguments={"peft_config": peft.LoraConfig(target_modules=["lm_head"])}
        )


# ------------------------------------------------------------------------- the same run as TRL's


def _run(
    folder,
    cls,
    form="prompt_completion",
    *,
    rows=22,
    model="llama",
    dataset=None,
    arguments=None,
    **changes,
):
    """Train with plain SGD, so that parameters show gradients and not their signs."""
    settings = {
        "optim": "sgd",
        "learning_rate": 0.1,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        **changes,
    }
    trainer = trainer_for(
        folder,
        tiny_dataset(form, rows) if dataset is None else dataset,
        cls=cls,
        model=tiny_model(model),
        processing_class=tokenizer_for(form),
        arguments=arguments,
        **settings,
    )
    trainer.train()
    return trainer


def _one_step(folder, cls, **changes) -> float:
    """The loss of one optimizer step over all documents of a small set."""
    settings = {"rows": 6, "per_device_train_batch_size": 6, "max_steps": 1, **changes}
    return logged(_run(folder, cls, **settings), "loss")[0]


def assert_same_run(ours, theirs, keys=("loss", "grad_norm", "num_tokens", "mean_token_accuracy")):
    """fp32, other attention kernels and summation orders: 1e-5 of values of the order of 1."""
    assert ours.state.global_step == theirs.state.global_step
    for key in keys:
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=1e-4, abs=1e-5), key
    for name, value in parameters(theirs).items():
        mine = ours.model.get_parameter(name)
        torch.testing.assert_close(
            mine, value, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_comparison_can_fail(tmp_path):
    """One document more, or one trained token more in each document, is seen."""
    run = _run(tmp_path, SFTTrainer)
    for changes in ({"rows": 23}, {"form": "language_modeling"}):
        with pytest.raises(AssertionError):
            assert_same_run(_run(tmp_path, PackedSFTTrainer, **changes), run, ("loss",))


@pytest.mark.parametrize("form", ["language_modeling", "prompt_completion", "tokenized_labels"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_unpacked_run_equals_trl_step_by_step(tmp_path, form, accumulation):
    """22 documents, 4 a batch: the last step is a short one."""
    ours, theirs = (
        _run(tmp_path, cls, form=form, gradient_accumulation_steps=accumulation)
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    # TRL's accuracy is a mean of micro-batch means, and ours cuts a step into other micro-batches
    metrics = ("mean_token_accuracy", "entropy") if accumulation == 1 else ()
    assert_same_run(ours, theirs, ("loss", "grad_norm", "num_tokens", "epoch", *metrics))
    assert ours.state.global_step == math.ceil(22 / (4 * accumulation))


@pytest.mark.parametrize("name", [n for n in MODELS if n != "gpt2_dropout"])
def test_unpacked_run_of_every_model_equals_trl(tmp_path, name):
    """Completion-only, since TRL scales gpt2's full loss by (tokens − documents) / tokens."""
    ours, theirs = (
        _run(tmp_path, cls, model=name, rows=8, router_aux_loss_coef=0.0 if "moe" in name else None)
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, theirs)
    assert unchanged(dict(tiny_model(name).named_parameters()), ours) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dft"},
        {"label_smoothing_factor": 0.1},
        {"gradient_checkpointing": False},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"gradient_checkpointing_kwargs": {"selective": True}},
        {"max_grad_norm": 0.01},
        {"weight_decay": 0.1},
        {"warmup_steps": 3, "lr_scheduler_type": "cosine"},
        {"dataloader_drop_last": True},
        {"num_train_epochs": 2},
        {"max_steps": 3},
        {"max_length": 30},
        {"max_length": None},
        {"completion_only_loss": False},
        {"logging_steps": 2},
        {"pad_to_multiple_of": 8},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
        {"per_device_train_batch_size": 64},
        {"torch_empty_cache_steps": 1},
        {"average_tokens_across_devices": False},
        {"include_num_input_tokens_seen": "non_padding"},
        {"shuffle_dataset": True},
        {"accelerator_config": {"even_batches": False}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_unpacked_run_with_this_option_equals_trl(tmp_path, changes):
    ours, theirs = (
        _run(tmp_path, cls, **{"rows": 14, **changes}) for cls in (PackedSFTTrainer, SFTTrainer)
    )
    keys = ["loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen"]
    if "pad_to_multiple_of" not in changes:
        keys.append("num_tokens")
    # Of several micro-batches TRL logs the mean of their means; see the test below.
    if not {"gradient_accumulation_steps", "logging_steps"} & set(changes):
        keys += ["mean_token_accuracy", "entropy"]
    assert_same_run(ours, theirs, keys)
    assert len(ours.get_train_dataloader()) == len(theirs.get_train_dataloader())


def test_entropy_of_several_steps_is_trls_weighed_by_their_trained_tokens(tmp_path):
    ours, theirs = (
        _run(tmp_path, cls, rows=14, logging_steps=2) for cls in (PackedSFTTrainer, SFTTrainer)
    )
    each = _run(tmp_path, SFTTrainer, rows=14, logging_steps=1)
    targets = [labels[1:] for labels in each.train_dataset["labels"]]
    by_document = [sum(label != -100 for label in labels) for labels in targets]
    trained = [sum(by_document[i : i + 4]) for i in range(0, 14, 4)]
    by_step = logged(each, "entropy")
    assert len(by_step) == len(trained) == 4
    expected = [np.average(by_step[i : i + 2], weights=trained[i : i + 2]) for i in (0, 2)]
    assert logged(ours, "entropy") == pytest.approx(expected, rel=1e-4)
    with pytest.raises(AssertionError):
        assert logged(theirs, "entropy") == pytest.approx(expected, rel=1e-4)


def test_unpacked_moe_auxiliary_loss_equals_trl_in_one_step(tmp_path):
    """The same documents in one micro-batch; padding is not routed in either."""
    for changes in ({}, {"router_aux_loss_coef": 0.1}):
        trainers = [
            _run(tmp_path, cls, model="qwen3_moe", rows=1, per_device_train_batch_size=1, **changes)
            for cls in (PackedSFTTrainer, SFTTrainer)
        ]
        assert_same_run(*trainers, keys=("loss", "aux_loss"))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_unpacked_run_over_a_stream_equals_trl_step_by_step(tmp_path, accumulation):
    ours, theirs = (
        _run(
            tmp_path,
            cls,
            dataset=tiny_iterable("prompt_completion", 22),
            num_train_epochs=3.0,
            max_steps=4,
            gradient_accumulation_steps=accumulation,
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert_same_run(ours, theirs, ("loss", "grad_norm", "num_tokens"))


@both_modes
def test_auxiliary_loss_is_logged_with_the_summary(tmp_path, packing):
    trainer = trainer_for(
        tmp_path, model=tiny_model("qwen3_moe"), packing=packing, logging_steps=10
    )
    train_moves_all(trainer)
    assert math.isfinite(trainer.state.log_history[-1]["aux_loss"])


def test_random_order_keeps_the_number_of_documents_a_step(tmp_path):
    trainers = [
        _run(tmp_path, cls, train_sampling_strategy="random", num_train_epochs=2)
        for cls in (PackedSFTTrainer, SFTTrainer)
    ]
    assert trainers[0].state.global_step == trainers[1].state.global_step == 12
    assert logged(trainers[0], "num_tokens")[-1] == logged(trainers[1], "num_tokens")[-1]
    assert logged(trainers[0], "epoch") == pytest.approx(logged(trainers[1], "epoch"), abs=1e-6)


@both_modes
def test_logged_keys_are_those_of_trl(tmp_path, packing):
    ours, theirs = (
        _run(
            tmp_path,
            cls,
            packing=packing,
            eval_strategy="steps",
            eval_steps=1,
            max_steps=2,
            arguments={"eval_dataset": tiny_dataset("prompt_completion", 4)},
        )
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    for mine, other in zip(ours.state.log_history, theirs.state.log_history, strict=True):
        assert {*other} <= {*mine}


def test_compute_loss_func_sees_the_inputs_that_trl_gives(tmp_path):
    """Logits of the whole vocabulary, labels to be shifted, the step's number of trained tokens."""

    def run(cls):
        seen = []

        def compute_loss_func(outputs, labels, num_items_in_batch=None):
            seen.append((outputs.logits.shape[-1], num_items_in_batch is not None))
            return transformers.loss.loss_utils.ForCausalLMLoss(
                outputs.logits, labels, VOCAB_SIZE, num_items_in_batch=num_items_in_batch
            )

        with pytest.warns(FutureWarning, match="compute_loss_func"):
            trainer = _run(tmp_path, cls, arguments={"compute_loss_func": compute_loss_func})
        return trainer, seen

    (ours, seen), (theirs, _) = run(PackedSFTTrainer), run(SFTTrainer)
    assert {*seen} == {(VOCAB_SIZE, True)}
    assert_same_run(ours, theirs)


@packed_only
def test_compute_loss_func_packed_equals_the_built_in_loss(tmp_path):
    def compute_loss_func(outputs, labels, num_items_in_batch=None):
        return transformers.loss.loss_utils.ForCausalLMLoss(
            outputs.logits, labels, VOCAB_SIZE, num_items_in_batch=num_items_in_batch
        )

    built_in = _run(tmp_path, PackedSFTTrainer, packing=True)
    with pytest.warns(FutureWarning, match="compute_loss_func"):
        own = _run(
            tmp_path,
            PackedSFTTrainer,
            packing=True,
            arguments={"compute_loss_func": compute_loss_func},
        )
    assert_same_run(own, built_in)


@packed_only
@pytest.mark.parametrize(
    "changes",
    [{}, {"loss_type": "dft"}, {"label_smoothing_factor": 0.1}, {"completion_only_loss": False}],
    ids=lambda changes: ",".join(changes) or "nll",
)
def test_a_packed_step_over_all_documents_equals_trl_unpacked(tmp_path, changes):
    ours = _run(tmp_path, PackedSFTTrainer, packing=True, max_length=2048, **changes)
    theirs = _run(tmp_path, SFTTrainer, per_device_train_batch_size=22, **changes)
    assert_same_run(ours, theirs)


# --------------------------------------------------------------------------------------- options


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
        _run(tmp_path, PackedSFTTrainer, max_steps=1, neftune_noise_alpha=alpha)
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
            _run(
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


@both_modes
def test_optimizers_can_be_passed(tmp_path, packing):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = trainer_for(
        tmp_path, model=model, packing=packing, arguments={"optimizers": (optimizer, scheduler)}
    )
    train_moves_all(trainer)
    assert trainer.lr_scheduler is scheduler
    trainer = trainer_for(
        tmp_path,
        packing=packing,
        arguments={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})},
    )
    train_moves_all(trainer)


@both_modes
def test_callbacks_see_the_run(tmp_path, packing):
    class Recorder(TrainerCallback):
        events: list[str]

        def __init__(self):
            self.events = []

        def on_train_begin(self, args, state, control, **kwargs):
            self.events.append("begin")

        def on_step_end(self, args, state, control, **kwargs):
            self.events.append("step")
            control.should_training_stop = state.global_step == 2

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.events.append("log")

        def on_train_end(self, args, state, control, **kwargs):
            self.events.append("end")

    recorder = Recorder()
    trainer = trainer_for(
        tmp_path, packing=packing, max_length=64, max_steps=4, arguments={"callbacks": [recorder]}
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert recorder.events == ["begin", "step", "log", "step", "log", "log", "end"]


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


@both_modes
def test_context_parallelism_refuses_packing(tmp_path, monkeypatch, packing):
    import accelerate

    sharded = types.SimpleNamespace(
        cp_enabled=True, sp_enabled=False, sp_backend=None, tp_size=1, cp_size=2, sp_size=1
    )
    create = SFTTrainer.create_accelerator_and_postprocess

    def create_sharded(trainer):
        create(trainer)
        monkeypatch.setattr(
            accelerate.Accelerator, "parallelism_config", property(lambda self: sharded)
        )

    monkeypatch.setattr(SFTTrainer, "create_accelerator_and_postprocess", create_sharded)
    with pytest.raises(ValueError, match="not compatible with context parallelism"):
        trainer_for(tmp_path, packing=packing, eval_packing=True)


# ---------------------------------------------------------------------------- saving and loading


@both_modes
def test_checkpoint_holds_what_trl_writes(tmp_path, packing):
    def files(folder, cls):
        trainer = _run(
            folder, cls, packing=packing, max_steps=2, save_strategy="steps", save_steps=2
        )
        return trainer, {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}

    ours, mine = files(tmp_path / "ours", PackedSFTTrainer)
    _, others = files(tmp_path / "theirs", SFTTrainer)
    assert others <= mine
    card = (tmp_path / "ours/README.md").read_text(encoding="utf-8")
    assert "trl" in card
    assert "SFT" in card
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours/checkpoint-2")
    assert all(torch.equal(p, ours.model.get_parameter(n)) for n, p in saved.named_parameters())
    written = json.loads((tmp_path / "ours/checkpoint-2/config.json").read_text())
    reference = json.loads((tmp_path / "theirs/checkpoint-2/config.json").read_text())
    assert written == reference


@both_modes
def test_the_trained_model_still_generates_from_padded_batches(tmp_path, packing):
    trainer = _run(tmp_path, PackedSFTTrainer, packing=packing, max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", padding_side="left")
    prompts = [pair[0] for pair in QUESTIONS_AND_ANSWERS[:3]]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    live, loaded = (
        model.eval().generate(**batch, max_new_tokens=8, do_sample=False)
        for model in (trainer.model, saved)
    )
    assert torch.equal(live, loaded)


@both_modes
def test_resuming_gives_the_run_that_was_not_interrupted(tmp_path, packing):
    """In the second epoch, with dropout and a random order."""
    changes = {
        "packing": packing,
        "max_length": 128,
        "model": "gpt2_dropout",
        "train_sampling_strategy": "random",
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = _run(tmp_path, PackedSFTTrainer, **changes)
    steps = whole.state.global_step
    middle = steps // 2 + 1
    assert middle < steps
    resumed = trainer_for(
        tmp_path / "again",
        tiny_dataset("prompt_completion", 22),
        **{**changes, "model": tiny_model("gpt2_dropout", seed=5), "save_strategy": "no"},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{middle}"))
    assert resumed.state.global_step == steps
    for name, value in parameters(whole).items():
        torch.testing.assert_close(resumed.model.get_parameter(name), value, atol=0, rtol=0)


def test_train_can_be_called_twice(tmp_path):
    trainer = trainer_for(tmp_path, packing=True)
    train_moves_all(trainer)
    train_moves_all(trainer)


def test_subclasses_can_override_compute_loss(tmp_path):
    calls = []

    class Mine(PackedSFTTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            calls.append({*inputs})
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    train_moves_all(trainer_for(tmp_path, cls=Mine, packing=True))
    assert calls
    assert all({"input_ids", "labels"} <= keys for keys in calls)


@both_modes
def test_the_config_is_left_as_trl_leaves_it(tmp_path, packing):
    """The same object can go to the next trainer."""
    ours, theirs = (
        trainer_for(tmp_path, cls=cls, packing=packing).args for cls in (None, SFTTrainer)
    )
    assert ours.to_dict() == theirs.to_dict()
    assert ours.packing is packing
    again = PackedSFTTrainer(
        tiny_model(), ours, train_dataset=tiny_dataset(), processing_class=tiny_tokenizer()
    )
    train_moves_all(again)


@both_modes
def test_a_padded_batch_can_be_scored_by_hand(tmp_path, packing):
    """Code of a user's own: TRL's padded batch, an attention mask in it, through `compute_loss`."""
    rows = documents_of_lengths([5, 9, 3], prompt=2)
    batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    model = tiny_model()
    with torch.no_grad():
        expected = model(**batch).loss.item()
    trainer = trainer_for(tmp_path, model=model, packing=packing)
    with torch.no_grad():
        loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        assert trainer.model(**batch).loss.item() == pytest.approx(expected, abs=1e-6)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert outputs.logits.shape == (3, 9, VOCAB_SIZE)


# ------------------------------------------------------------------------- paths that stay TRL's


def test_an_own_collator_is_used_unchanged(tmp_path):
    seen = []

    def collate(rows):
        seen.extend(rows)
        return DataCollatorForLanguageModeling(pad_token_id=0)(rows)

    ours, theirs = (
        _run(tmp_path, cls, arguments={"data_collator": collate})
        for cls in (PackedSFTTrainer, SFTTrainer)
    )
    assert ours.data_collator is collate
    assert all({"input_ids", "labels"} <= {*row} for row in seen)
    assert_same_run(ours, theirs)


def test_an_own_collator_with_packing_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"(?i)collator"):
        trainer_for(
            tmp_path,
            packing=True,
            arguments={"data_collator": DataCollatorForLanguageModeling(pad_token_id=0)},
        )


def test_images_take_the_path_of_trl(tmp_path):
    pytest.importorskip("PIL")

    def run(cls):
        model, processor = tiny_vlm("llava")
        trainer = trainer_for(
            tmp_path,
            tiny_dataset("images", 6),
            cls=cls,
            model=model,
            processing_class=processor,
            per_device_train_batch_size=3,
            max_length=None,
            optim="sgd",
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            arguments={"eval_dataset": tiny_dataset("images", 3)},
        )
        trainer.train()
        return trainer

    ours, theirs = run(PackedSFTTrainer), run(SFTTrainer)
    assert isinstance(ours.data_collator, DataCollatorForVisionLanguageModeling)
    assert_same_run(ours, theirs)
    assert ours.evaluate()["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"packing": True}, "Packing is not supported for vision"),
        ({"padding_free": True}, "Padding-free"),
        ({"truncation_mode": "keep_end"}, "keep_end"),
    ],
)
def test_images_refuse_what_trl_refuses(tmp_path, changes, text):
    pytest.importorskip("PIL")
    model, processor = tiny_vlm("llava")
    with pytest.raises(ValueError, match=text):
        trainer_for(
            tmp_path, tiny_dataset("images", 4), model=model, processing_class=processor, **changes
        )


def test_images_need_a_vision_model(tmp_path):
    pytest.importorskip("PIL")
    with pytest.raises(ValueError, match=r"vision-related.*vision-language model"):
        trainer_for(tmp_path, "images")


@both_modes
@pytest.mark.parametrize("form", ["prompt_completion", "conversational_language_modeling"])
@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_text_trains_a_vision_model(tmp_path, name, form, packing):
    if name == "llava":
        pytest.importorskip("PIL")
    model, processing_class = tiny_vlm(name)
    trainer = trainer_for(
        tmp_path,
        tiny_dataset(form),
        model=model,
        processing_class=processing_class,
        packing=packing,
        max_length=64,
        gradient_checkpointing=False,
    )
    before = parameters(trainer)
    trainer.train()
    still = unchanged(before, trainer)
    assert still
    assert all("vis" in name or "projector" in name for name in still)
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])


# --------------------------------------------------------------------------------------- mistakes


def test_train_dataset_must_be_a_dataset(tmp_path):
    for wrong, error, text in (
        (None, ValueError, "`train_dataset` is required"),
        (
            tiny_dataset_dict(),
            TypeError,
            "`train_dataset` must be a `Dataset` or `IterableDataset`",
        ),
    ):
        with pytest.raises(error, match=text):
            trainer_for(tmp_path, wrong)


def test_a_stream_needs_max_steps(tmp_path):
    with pytest.raises(ValueError, match="max_steps"):
        trainer_for(tmp_path, tiny_iterable(), max_steps=-1)


def test_packing_needs_max_length(tmp_path):
    with pytest.raises(ValueError, match="`max_length` can't be `None`"):
        trainer_for(tmp_path, packing=True, max_length=None)


def test_truncation_mode_must_be_known(tmp_path):
    with pytest.raises(ValueError, match=r"(?i)truncation.mode"):
        trainer_for(tmp_path, truncation_mode="keep_middle")


def test_a_tokenizer_without_eos_and_pad_is_refused(tmp_path):
    tokenizer = tiny_tokenizer(pad=None)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"(?i)pad_token|eos"):
        trainer_for(tmp_path, processing_class=tokenizer)


def test_dispatch_batches_is_turned_off_for_streams(tmp_path):
    trainer = trainer_for(tmp_path, tiny_iterable(), accelerator_config={"dispatch_batches": True})
    assert trainer.args.accelerator_config.dispatch_batches is False
    train_moves_all(trainer)


@packed_only
@both_modes
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_one_process_has_no_batches_to_cut(tmp_path, name, packing):
    """On one process they do nothing in TRL; accelerate would cut our boundaries like rows."""
    plain, asked = (
        trainer_for(tmp_path / str(i), packing=packing, accelerator_config=config)
        for i, config in enumerate((None, {name: True}))
    )
    for trainer in (plain, asked):
        trainer.train()
    for ours, theirs in zip(plain.model.parameters(), asked.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@packed_only
@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_batches_cut_by_accelerate_are_refused_by_name(tmp_path, name):
    """Several processes would cut a packed row at the number of its documents."""
    trainer = trainer_for(tmp_path, accelerator_config={name: True})
    from trl_packing.training.arguments import check_arguments

    args = types.SimpleNamespace(accelerator_config=trainer.args.accelerator_config, world_size=2)
    with pytest.raises(ValueError, match=name):
        check_arguments(args, tiny_dataset("language_modeling"))


def _no_eos():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    return tokenizer


MISTAKES = {
    "no documents": ([], {}, "empty|no documents|no rows"),
    "an empty document": ([{"input_ids": []}], {}, "empty|no document|trained token"),
    "no completion": ([{"prompt": "a"}], {}, "completion"),
    "no known column": ([{"body": "a"}], {}, "column"),
    "max_length 0": ([{"text": "a b c"}], {"max_length": 0}, "max_length"),
    "max_length −1": ([{"text": "a b c"}], {"max_length": -1}, "max_length"),
    "unknown strategy": ([{"text": "a"}], {"packing_strategy": "best"}, "packing_strategy"),
    "all dropped": (
        [{"prompt": "a long prompt " * 9, "completion": "x"}],
        {"max_length": 4},
        "max_length",
    ),
    "short mask": (
        [{"input_ids": [7, 8, 9], "assistant_masks": [1, 1]}],
        {},
        "assistant_masks",
    ),
    "short labels": ([{"input_ids": [7, 8, 9], "labels": [7, 8]}], {}, "labels"),
    "fractional ids": ([{"input_ids": [7.5, 8.0, 9.0]}], {}, "integer"),
    "text ids": ([{"input_ids": ["a", "b"]}], {}, "integer"),
    "ids beyond the vocabulary": ([{"input_ids": [7, VOCAB_SIZE + 1]}], {}, "vocabulary"),
    "no eos": ([{"text": "a"}], {"processing_class": _no_eos}, "(?i)eos"),
    "a missing text": ([{"text": "a"}, {"text": None}], {}, "text"),
}


@packed_only
@both_modes
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_behind(tmp_path, mistake, packing):
    rows, changes, text = MISTAKES[mistake]
    if mistake == "unknown strategy" and not packing:
        pytest.skip("not read without packing")
    dataset = Dataset.from_list(rows) if rows else tiny_dataset().select([])
    if mistake == "an empty document":  # whose ids are integers, though there are none
        dataset = dataset.cast(Features({"input_ids": List(Value("int64"))}))
    changes = {k: v() if callable(v) else v for k, v in changes.items()}
    with pytest.raises((ValueError, TypeError), match=text):
        trainer_for(tmp_path / "out", dataset, packing=packing, **changes).train()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
