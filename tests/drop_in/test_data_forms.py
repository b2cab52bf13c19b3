"""Every form of data set that TRL trains on trains here, and becomes the same documents."""

import math

import pytest
from datasets import Dataset, IterableDataset
from helpers.drop_in import (
    TEXT_FORMS,
    both_modes,
    documents,
    packed_only,
    tokenizer_for,
    train_moves_all,
    trained_text,
    trainer_for,
)
from helpers.tiny import (
    CHATML,
    QUESTIONS_AND_ANSWERS,
    tiny_dataset,
    tiny_iterable,
    tiny_rows,
    tiny_tokenizer,
)
from trl import SFTTrainer


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


@both_modes
def test_dataset_text_field_names_the_column(tmp_path, packing):
    dataset = tiny_dataset("language_modeling").rename_column("text", "body")
    trainer = trainer_for(tmp_path, dataset, packing=packing, dataset_text_field="body")
    assert QUESTIONS_AND_ANSWERS[0][0] in trained_text(trainer)
    train_moves_all(trainer)


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
def test_skip_prepare_dataset_takes_rows_as_they_are(tmp_path, packing):
    trainer = trainer_for(
        tmp_path,
        "tokenized_labels",
        packing=packing,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    assert documents(trainer.train_dataset) == documents(tiny_dataset("tokenized_labels"))
    train_moves_all(trainer)


def test_evaluate_refuses_masks_without_labels_where_preparation_is_skipped(tmp_path):
    trainer = trainer_for(
        tmp_path, "tokenized_labels", dataset_kwargs={"skip_prepare_dataset": True}
    )
    with pytest.raises(ValueError, match="Add a 'labels' column"):
        trainer.evaluate(tiny_dataset("tokenized_assistant_masks", 4))


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
