"""The whole way of the data, from a user's rows to the trainer's documents and its report."""

import logging

import pytest
from datasets import Dataset, IterableDataset
from harness import make_trainer
from helpers.tiny import tiny_dataset, tiny_tokenizer
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer

ANSWER = "### Answer:"


def trainer_for(folder, rows, *, tokenizer=None, cls=PackedSFTTrainer, **settings):
    defaults = {"max_length": 128, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    tokenizer = tokenizer or tiny_tokenizer(chat=True)
    return make_trainer(folder, rows, cls=cls, tokenizer=tokenizer, **defaults | settings)


def trained_texts(trainer) -> list[str]:
    return [
        trainer.processing_class.decode([label for label in row["labels"] if label != -100])
        for row in trainer.train_dataset
    ]


def chat(*answers: tuple[str, dict]) -> dict:
    said = [{"role": "assistant", "content": text, **flags} for text, flags in answers]
    return {"messages": [{"role": "user", "content": "Why?"}, *said]}


# --- response templates, hints, columns -----------------------------------------------------------


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_response_template_trains_what_follows_and_its_lack_is_counted(
    tmp_path, caplog, tokenized
):
    tokenizer = tiny_tokenizer()

    def rows_of(*texts):
        ids = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
        return ids if tokenized else [{"text": text} for text in texts]

    rows = rows_of(*[f"Why?\n{ANSWER} So.<eos>"] * 3, "nothing<eos>")
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, rows, tokenizer=tokenizer, response_template=ANSWER)
    sentence = f"1 of 4 documents (25.0%) have no response_template '{ANSWER}'"
    assert sentence in caplog.text
    assert sentence in str(trainer.packing_report)
    assert trained_texts(trainer) == [" So.<eos>"] * 3
    with pytest.raises(ValueError, match=r"no document of the train dataset .*'### Answer:'"):
        trainer_for(tmp_path, rows_of("nothing"), tokenizer=tokenizer, response_template=ANSWER)


@pytest.mark.parametrize("renders", [True, False])
def test_tools_that_the_template_leaves_out_are_warned_of(tmp_path, caplog, renders):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    tokenizer = tiny_tokenizer(chat=True)
    if not renders:
        lacks = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
        tokenizer.chat_template = lacks
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, [chat(("So.", {})) | {"tools": [tool]}], tokenizer=tokenizer)
    warns = "has tools, but the chat template renders no tool calls" in caplog.text
    assert warns == (not renders)


@pytest.mark.parametrize(
    ("settings", "is_hinted"),
    [({}, True), ({"train_on": "all"}, False)],
)
def test_messages_that_are_trained_whole_get_a_hint_in_the_report(tmp_path, settings, is_hinted):
    trainer = trainer_for(tmp_path, tiny_dataset("conversational_language_modeling"), **settings)
    assert ("train_on='assistant'" in str(trainer.packing_report)) == is_hinted


def test_shuffling_the_data_set_gives_the_order_of_trl(tmp_path):
    rows = tiny_dataset("language_modeling")
    settings = {"shuffle_dataset": True, "packing": False, "tokenizer": tiny_tokenizer()}
    ours, theirs = (
        trainer_for(tmp_path, rows, cls=c, **settings) for c in (PackedSFTTrainer, SFTTrainer)
    )
    order = [row["input_ids"] for row in ours.train_dataset]
    assert order == [row["input_ids"] for row in theirs.train_dataset]
    assert sorted(order) != order


@pytest.mark.parametrize("packing", [True, False])
def test_a_column_of_packed_rows_goes_where_rows_are_texts(tmp_path, packing):
    rows = Dataset.from_list([{"text": "Because.", "seq_lengths": [1]}] * 8)
    trainer = trainer_for(tmp_path, rows, packing=packing)
    assert "seq_lengths" not in trainer.train_dataset.column_names


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_were_padded_are_refused_by_their_number(tmp_path, streamed):
    def trained(masks):
        rows = [{"input_ids": [7, 8, 9, 10], "attention_mask": mask} for mask in masks]
        given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
        trainer_for(tmp_path, given, max_steps=1).train()

    trained([[1, 1, 1, 1]] * 3)
    for mask in ([1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 2, 2]):
        with pytest.raises(ValueError, match=r"document 1 of the train .*tokenize without padd"):
            trained([[1, 1, 1, 1], mask, [1, 1, 1, 1]])
