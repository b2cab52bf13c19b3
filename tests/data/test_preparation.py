"""The whole way of the data, from a user's rows to the trainer's documents and its report."""

import logging

import pytest
import torch
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


def chat(*messages: dict) -> dict:
    return {"messages": [{"role": "user", "content": "Why?"}, *messages]}


def said(text: str, **flags) -> dict:
    return {"role": "assistant", "content": text, **flags}


# --- weights of messages --------------------------------------------------------------------------


def loss_of_first_step(trainer) -> float:
    trainer.train()
    return trainer.state.log_history[0]["loss"]


@pytest.mark.parametrize("packing", [True, False])
def test_a_weight_of_zero_trains_as_if_the_message_were_not(tmp_path, packing):
    rows = [chat(said("So.", weight=weight), said("Because.")) for weight in (0.0, 1.0)]
    flags = [chat(said("So.", train=train), said("Because.")) for train in (False, True)]
    losses = [
        loss_of_first_step(trainer_for(tmp_path, examples * 4, packing=packing))
        for examples in (rows, flags)
    ]
    assert losses[0] == losses[1]


def test_the_weight_of_a_message_weighs_its_tokens(tmp_path):
    weighted, plain, other = (
        loss_of_first_step(trainer_for(tmp_path, [chat(said("So.", weight=w), said("Because."))]))
        for w in (0.25, 1.0, 0.0)
    )
    # The mean over tokens moves from the loss of both answers toward that of the second alone.
    assert min(plain, other) < weighted < max(plain, other)


@pytest.mark.parametrize("packing", [True, False])
def test_weights_are_cut_with_their_tokens(tmp_path, packing):
    rows = [chat(said("one two three four five", weight=0.5))] * 4
    trainer = trainer_for(
        tmp_path, rows, packing=packing, max_length=30, overflow="truncate_prompt"
    )
    whole = trainer_for(tmp_path, rows, packing=packing, max_length=128)
    cut, full = trainer.train_dataset[0], whole.train_dataset[0]
    size = len(cut["input_ids"])
    assert size == 30 < len(full["input_ids"])
    assert cut["loss_weights"] == full["loss_weights"][-size:]
    assert {w for w, label in zip(cut["loss_weights"], cut["labels"], strict=True) if w} == {0.5}
    trainer.train()


def test_a_stream_trains_by_the_weights_of_its_messages(tmp_path):
    rows = [chat(said("So.", weight=0.5), said("Because."))] * 8
    stream = IterableDataset.from_generator(lambda: iter(rows))
    losses = [loss_of_first_step(trainer_for(tmp_path, data)) for data in (stream, rows)]
    torch.testing.assert_close(*losses)


# --- response templates ---------------------------------------------------------------------------


def test_a_tokenized_data_set_may_have_a_response_template(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"input_ids": tokenizer(f"Why?\n{ANSWER} So.<eos>")["input_ids"]}] * 3
    for template in (ANSWER, tokenizer(f"\n{ANSWER}")["input_ids"]):
        trainer = trainer_for(tmp_path, rows, tokenizer=tokenizer, response_template=template)
        assert trained_texts(trainer) == [" So.<eos>"] * 3


def test_labels_and_a_response_template_are_one_too_many(tmp_path):
    rows = [{"input_ids": [5, 6], "labels": [-100, 6]}]
    with pytest.raises(ValueError, match="has 'labels' and response_template='###' is set"):
        trainer_for(tmp_path, rows, response_template="###")


@pytest.mark.parametrize("tokenized", [False, True])
def test_documents_without_the_template_are_counted_in_the_report(tmp_path, caplog, tokenized):
    tokenizer = tiny_tokenizer()
    texts = [f"Why?\n{ANSWER} So.<eos>"] * 3 + ["nothing<eos>"]
    rows = [
        {"input_ids": tokenizer(text)["input_ids"]} if tokenized else {"text": text}
        for text in texts
    ]
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, rows, tokenizer=tokenizer, response_template=ANSWER)
    sentence = f"1 of 4 documents (25.0%) have no response_template '{ANSWER}'"
    assert sentence in caplog.text
    assert sentence in str(trainer.packing_report)
    assert trained_texts(trainer) == [" So.<eos>"] * 3


@pytest.mark.parametrize("tokenized", [False, True])
def test_a_template_in_no_document_is_an_error(tmp_path, tokenized):
    tokenizer = tiny_tokenizer()
    row = {"input_ids": tokenizer("nothing")["input_ids"]} if tokenized else {"text": "nothing"}
    with pytest.raises(ValueError, match=r"no document of the train dataset .*'### Answer:'"):
        trainer_for(tmp_path, [row], tokenizer=tokenizer, response_template=ANSWER)


# --- settings that cannot be ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train_on": "user"}, "train_on='user' is unknown"),
        ({"train_on": "assistant", "assistant_only_loss": True}, "leave assistant_only_loss out"),
        ({"train_on": "all", "response_template": "#"}, "both say what is trained"),
        ({"instruction_template": "#"}, "needs response_template"),
        ({"response_template": ""}, "response_template is empty"),
        ({"prompt_template": "nothing"}, "is no file, names no template"),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path, settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer_for(tmp_path, [{"text": "So."}], **settings)


def test_tokenizers_that_trl_prepares_for_refuse_what_it_does_not_have(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    own = type("Own", (type(tokenizer),), {"__call__": lambda self, *a, **k: {"input_ids": [5]}})
    tokenizer.__class__ = own
    with pytest.raises(ValueError, match=r"train_on='assistant' cannot be used .*Own renders"):
        trainer_for(tmp_path, [chat(said("So."))], tokenizer=tokenizer, train_on="assistant")


# --- the rest -------------------------------------------------------------------------------------


def test_tools_that_the_template_leaves_out_are_warned_of(tmp_path, caplog):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    tokenizer = tiny_tokenizer(chat=True)
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, [chat(said("So.")) | {"tools": [tool]}], tokenizer=tokenizer)
    assert "has tools" not in caplog.text
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    with caplog.at_level(logging.WARNING):
        trainer_for(tmp_path, [chat(said("So.")) | {"tools": [tool]}], tokenizer=tokenizer)
    assert "has tools, but the chat template renders no tool calls" in caplog.text


def test_shuffling_the_data_set_gives_the_order_of_trl(tmp_path):
    rows = tiny_dataset("language_modeling")
    settings = {"shuffle_dataset": True, "packing": False, "tokenizer": tiny_tokenizer()}
    ours, theirs = (
        trainer_for(tmp_path, rows, cls=c, **settings) for c in (PackedSFTTrainer, SFTTrainer)
    )
    order = [row["input_ids"] for row in ours.train_dataset]
    assert order == [row["input_ids"] for row in theirs.train_dataset]
    assert sorted(order) != order


def test_raw_fields_train_and_evaluate(tmp_path):
    rows = [{"query": f"{n} + 1?", "response": str(n + 1)} for n in range(8)]
    trainer = trainer_for(tmp_path, rows, tokenizer=tiny_tokenizer(), prompt_template="qa")
    assert trained_texts(trainer) == [f"{n + 1}<eos>" for n in range(8)]
    trainer.train()
    assert trainer.evaluate(Dataset.from_list(rows))["eval_loss"] > 0


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", [True, False])
def test_text_with_a_column_of_packed_rows_is_refused_where_that_column_would_stay(
    tmp_path, packing
):
    rows = Dataset.from_list([{"text": "Because.", "seq_lengths": [1]}] * 8)
    if packing:
        assert "seq_lengths" not in trainer_for(tmp_path, rows).train_dataset.column_names
        return
    with pytest.raises(ValueError, match=r"'seq_lengths', .* drop the column: .*remove_columns"):
        trainer_for(tmp_path, rows, packing=False)


@pytest.mark.parametrize(
    ("settings", "is_hinted"),
    [({}, True), ({"train_on": "all"}, False), ({"train_on": "assistant"}, False)],
)
def test_messages_that_are_trained_whole_get_a_hint_in_the_report(tmp_path, settings, is_hinted):
    tokenizer = tiny_tokenizer(chat=True)
    trainer = make_trainer(
        tmp_path,
        tiny_dataset("conversational_language_modeling"),
        tokenizer=tokenizer,
        max_steps=1,
        **settings,
    )
    trainer.train()
    assert ("train_on='assistant'" in str(trainer.packing_report)) == is_hinted
