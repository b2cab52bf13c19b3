"""The whole way of the data, from a user's rows to the trainer's documents and its report."""

import pytest
from datasets import Dataset, concatenate_datasets, interleave_datasets
from harness import make_trainer
from helpers.chat_templates import source_of
from helpers.streams import stream_of
from helpers.tiny import (
    assistant,
    documents_of_lengths,
    tiny_dataset,
    tiny_rows,
    tiny_tokenizer,
    user,
)
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer

ANSWER = "### Answer:"


def trainer_for(folder, rows, **options):
    options = {"tokenizer": tiny_tokenizer(chat=True), "max_length": 128, **options}
    return make_trainer(folder, rows, **options)


def trained_texts(trainer) -> list[str]:
    return [
        trainer.processing_class.decode([label for label in row["labels"] if label != -100])
        for row in trainer.train_dataset
    ]


# --- response templates, hints, columns -----------------------------------------------------------


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_response_template_trains_what_follows_or_is_counted(tmp_path, caplog, tokenized):
    tokenizer = tiny_tokenizer()

    def rows_of(*texts):
        ids = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]
        return ids if tokenized else [{"text": text} for text in texts]

    rows = rows_of(*[f"Why?\n{ANSWER} So.<eos>"] * 3, "nothing<eos>")
    trainer = trainer_for(tmp_path, rows, tokenizer=tokenizer, response_template=ANSWER)
    sentence = f"1 of 4 documents (25.0%) have no response_template '{ANSWER}'"
    assert sentence in caplog.text
    assert sentence in str(trainer.packing_report)
    assert trained_texts(trainer) == [" So.<eos>"] * 3
    with pytest.raises(ValueError, match=r"no document of the train dataset .*'### Answer:'"):
        trainer_for(tmp_path, rows_of("nothing"), tokenizer=tokenizer, response_template=ANSWER)


@pytest.mark.parametrize("lacks", [None, "tool calls", "tools"])
def test_tools_that_the_template_leaves_out_are_warned_of(tmp_path, caplog, lacks):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    tokenizer = tiny_tokenizer(chat=True)
    if lacks == "tool calls":
        plain = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
        tokenizer.chat_template = plain
    elif lacks == "tools":
        tokenizer.chat_template = source_of("deepseekv3")
    row = {"messages": [user("Why?"), assistant("So.")], "tools": [tool]}
    trainer_for(tmp_path, [row], tokenizer=tokenizer)
    warns = "has tools, but the chat template renders no" in caplog.text
    assert warns == (lacks is not None)
    assert not lacks or f"renders no {lacks};" in caplog.text


@pytest.mark.parametrize(("settings", "is_hinted"), [({}, True), ({"train_on": "all"}, False)])
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


@pytest.mark.parametrize("streamed", [False, True])
def test_rows_that_were_padded_are_refused_by_their_number(tmp_path, streamed):
    def trained(masks):
        rows = [{"input_ids": [7, 8, 9, 10], "attention_mask": mask} for mask in masks]
        trainer_for(tmp_path, stream_of(rows) if streamed else rows, max_steps=1).train()

    trained([[1, 1, 1, 1]] * 3)
    for mask in ([1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 2, 2]):
        with pytest.raises(ValueError, match=r"document 1 of the .*tokenize without padd"):
            trained([[1, 1, 1, 1], mask, [1, 1, 1, 1]])


JOINED = [
    (interleave_datasets, "id", False),
    (interleave_datasets, "source", True),
    (concatenate_datasets, "tools", False),
    (concatenate_datasets, "id", True),
]


@pytest.mark.parametrize(("join", "column", "is_first"), JOINED)
def test_joined_streams_lose_nothing_if_one_has_a_column_more(tmp_path, join, column, is_first):
    if column == "tools":
        more = tiny_rows("tools")
        rows = [{"messages": row["messages"]} for row in more]
    else:
        rows = documents_of_lengths(range(4, 20))
        more = [{**row, column: "a"} for row in rows]
    parts = [Dataset.from_list(part).to_iterable_dataset() for part in (rows, more)]
    joined = join(parts[::-1] if is_first else parts)
    trainer = trainer_for(tmp_path, joined, packing=True, max_steps=2)
    whole = trainer_for(tmp_path, Dataset.from_list(list(joined)), packing=True, max_steps=2)
    found = [row["input_ids"] for row in trainer.train_dataset]
    assert found == [row["input_ids"] for row in whole.train_dataset]
    assert len(found) == len(list(joined)) > len(rows)
    trainer.train()
