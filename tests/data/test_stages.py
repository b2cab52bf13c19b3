"""The whole way of the data, from a user's rows to the trainer's documents and its report."""

import logging

import pytest
from datasets import Dataset, IterableDataset
from harness import TWO_RUNS, make_trainer
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


def columns_of(trainer):
    names = ("input_ids", "labels", "loss_weights")
    return [{name: row[name] for name in names if name in row} for row in trainer.train_dataset]


def chat(*answers: tuple[str, dict]) -> dict:
    said = [{"role": "assistant", "content": text, **flags} for text, flags in answers]
    return {"messages": [{"role": "user", "content": "Why?"}, *said]}


# --- weights of messages --------------------------------------------------------------------------


def first_loss(folder, first_answers: list[dict], streamed=False, **settings) -> float:
    """The loss of a step on two answers, of which the first has these flags in turn."""
    rows = [chat(("So.", flags), ("Because.", {})) for flags in first_answers] * 4
    given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
    trainer = trainer_for(folder, given, **settings)
    trainer.train()
    return trainer.state.log_history[0]["loss"]


def test_a_weight_of_zero_trains_as_if_the_message_were_not(tmp_path):
    weights, flags = ([{name: 0}, {name: 1}] for name in ("weight", "train"))
    flags = [{"train": bool(each["train"])} for each in flags]
    assert first_loss(tmp_path, weights) == first_loss(tmp_path, flags)


def test_the_weight_of_a_message_weighs_its_tokens_in_a_stream_too(tmp_path):
    weighted, plain, other = (first_loss(tmp_path, [{"weight": w}] * 2) for w in (0.25, 1.0, 0.0))
    # The mean over tokens moves from the loss of both answers toward that of the second alone.
    assert min(plain, other) < weighted < max(plain, other)
    streamed = first_loss(tmp_path, [{"weight": 0.25}] * 2, streamed=True)
    assert streamed == pytest.approx(weighted, rel=TWO_RUNS)


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


def test_a_column_of_packed_rows_is_refused_where_it_would_stay(tmp_path):
    rows = Dataset.from_list([{"text": "Because.", "seq_lengths": [1]}] * 8)
    assert "seq_lengths" not in trainer_for(tmp_path, rows).train_dataset.column_names
    with pytest.raises(ValueError, match=r"'seq_lengths' .* drop the column: .*remove_columns"):
        trainer_for(tmp_path, rows, packing=False)


# --- rows that were padded ------------------------------------------------------------------------

EOS = tiny_tokenizer().eos_token_id


def rows_of(columns=(), left=None, width=12):
    """Rows of eight lengths; filled up to `width`, `left` of the padding in front, if it is set."""
    rows = []
    for length in (5, 9, 3, 9, 7, 4, 6, 8):
        front = min(left or 0, width - length)
        behind = 0 if left is None else width - length - front
        ids = [10 + length] * (length - 1) + [EOS]
        values = {
            "input_ids": ids,
            "attention_mask": [1] * length,
            "labels": [-100, *ids[1:]],
            "completion_mask": [0, 0] + [1] * (length - 2),
            "loss_weights": [0.5] * length,
        }
        names = ("input_ids", *columns, *(() if left is None else ("attention_mask",)))
        rows.append({n: fill(n, front) + values[n] + fill(n, behind) for n in names})
    return rows


def fill(name, number):
    return [{"labels": -100, "loss_weights": 0.0}.get(name, 0)] * number


@pytest.mark.parametrize(
    ("columns", "left"),
    [((), 0), (("labels",), 3), (("completion_mask", "loss_weights"), 99)],
    ids=["behind", "around", "in front"],
)
def test_padded_rows_are_the_documents_without_padding(tmp_path, caplog, columns, left):
    with caplog.at_level(logging.WARNING):
        ours = trainer_for(tmp_path / "padded", rows_of(columns, left))
        assert columns_of(ours) == columns_of(trainer_for(tmp_path / "bare", rows_of(columns)))
    said = "8 of 8 rows of the train dataset were padded beforehand: 45 padding tokens"
    assert said in caplog.text
    assert said in str(ours.packing_report)


def test_only_padding_that_is_marked_is_cut(tmp_path, caplog):
    bare, padded = columns_of(trainer_for(tmp_path / "bare", rows_of())), rows_of(left=0)
    unmarked = [{"input_ids": row["input_ids"]} for row in padded]
    assert columns_of(trainer_for(tmp_path, unmarked)) != bare, "the control"
    caplog.clear()
    masked = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows_of()]
    assert columns_of(trainer_for(tmp_path, masked)) == bare
    assert "padded" not in caplog.text
    empty = {"input_ids": [0] * 12, "attention_mask": [0] * 12}
    trainer = trainer_for(tmp_path, [empty, *padded, empty])
    assert columns_of(trainer) == bare
    assert "2 documents without a trained token: dropped" in str(trainer.packing_report)
    found, expected = (trainer.evaluate(Dataset.from_list(x)) for x in (padded, rows_of()))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TWO_RUNS)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([1, 0, 1, 1], "is no padding: .*0 between tokens where it is 1"),
        ([1, 1, 2, 2], "is no padding: it has other values than 0 and 1"),
        ([1, 1, 1], "has 4 input_ids but 3 entries in 'attention_mask'"),
    ],
)
def test_a_mask_that_is_no_padding_names_its_row(tmp_path, mask, sentence):
    good = {"input_ids": [7, 8, 9, EOS], "attention_mask": [1, 1, 1, 1]}
    rows = [good, {**good, "attention_mask": mask}, {**good, "attention_mask": mask}]
    with pytest.raises(ValueError, match=f"document 1 of the .*{sentence}.*2 such rows"):
        trainer_for(tmp_path, rows)


def test_a_stream_with_padding_is_refused_by_its_first_row(tmp_path):
    def trained(rows):
        stream = IterableDataset.from_generator(lambda: iter(rows))
        trainer_for(tmp_path, stream, max_steps=1).train()

    row = {"input_ids": [7, 8, 9, EOS], "attention_mask": [1, 1, 1, 1]}
    trained([row] * 3)
    with pytest.raises(ValueError, match=r"document 1 of the train stream .*tokenize without padd"):
        trained([row, {**row, "attention_mask": [1, 1, 1, 0]}, row])
