"""The whole way of the data, from a user's rows to the trainer's documents and its report."""

import logging

import pytest
from datasets import Dataset, IterableDataset
from harness import TWO_RUNS, make_trainer
from helpers.tiny import tiny_dataset, tiny_tokenizer
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer
from trl_packing.data.unpack import unpack_rows

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
    losses = [
        loss_of_first_step(
            trainer_for(
                tmp_path,
                [chat(said("So.", **{name: value}), said("Because.")) for value in values] * 4,
                packing=packing,
            )
        )
        for name, values in (("weight", (0.0, 1.0)), ("train", (False, True)))
    ]
    assert losses[0] == losses[1]


def test_the_weight_of_a_message_weighs_its_tokens_in_a_stream_too(tmp_path):
    rows = [[chat(said("So.", weight=w), said("Because."))] * 8 for w in (0.25, 1.0, 0.0)]
    stream = IterableDataset.from_generator(lambda: iter(rows[0]))
    weighted, plain, other, streamed = (
        loss_of_first_step(trainer_for(tmp_path, each)) for each in (*rows, stream)
    )
    # The mean over tokens moves from the loss of both answers toward that of the second alone.
    assert min(plain, other) < weighted < max(plain, other)
    assert streamed == pytest.approx(weighted, rel=TWO_RUNS)


@pytest.mark.parametrize("packing", [True, False])
def test_weights_are_cut_with_their_tokens(tmp_path, packing):
    rows = [chat(said("one two three four five", weight=0.5))] * 4
    settings = {"packing": packing, "overflow": "truncate_prompt"}
    cut, full = (
        trainer_for(tmp_path, rows, max_length=size, **settings).train_dataset[0]
        for size in (30, 128)
    )
    assert len(cut["input_ids"]) == 30 < len(full["input_ids"])
    assert cut["loss_weights"] == full["loss_weights"][-30:]
    assert {w for w, label in zip(cut["loss_weights"], cut["labels"], strict=True) if w} == {0.5}


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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train_on": "assistant", "assistant_only_loss": True}, "assistant_only_loss"),
        ({"train_on": "all", "response_template": "#"}, "both say what is trained"),
        ({"response_template": "#"}, "has 'labels' and response_template='#' is set"),
        ({"prompt_template": "nothing"}, "is no file, names no template"),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path, settings, sentence):
    row = {"text": "So."} if "labels" not in sentence else {"input_ids": [5, 6], "labels": [5, 6]}
    with pytest.raises(ValueError, match=sentence):
        trainer_for(tmp_path, [row], **settings)


def test_tools_that_the_template_leaves_out_are_warned_of(tmp_path, caplog):
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
    tokenizer, rows = tiny_tokenizer(chat=True), [chat(said("So.")) | {"tools": [tool]}]
    lacks = "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
    for template, warns in ((tokenizer.chat_template, False), (lacks, True)):
        tokenizer.chat_template = template
        with caplog.at_level(logging.WARNING):
            trainer_for(tmp_path, rows, tokenizer=tokenizer)
        sentence = "has tools, but the chat template renders no tool calls"
        assert (sentence in caplog.text) == warns


@pytest.mark.parametrize(
    ("settings", "is_hinted"),
    [({}, True), ({"train_on": "all"}, False), ({"train_on": "assistant"}, False)],
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


def test_raw_fields_train_and_evaluate(tmp_path):
    rows = [{"query": f"{n} + 1?", "response": str(n + 1)} for n in range(8)]
    trainer = trainer_for(tmp_path, rows, tokenizer=tiny_tokenizer(), prompt_template="qa")
    assert trained_texts(trainer) == [f"{n + 1}<eos>" for n in range(8)]
    assert trainer.evaluate(Dataset.from_list(rows))["eval_loss"] > 0


def test_a_column_of_packed_rows_is_refused_where_it_would_stay(tmp_path):
    rows = Dataset.from_list([{"text": "Because.", "seq_lengths": [1]}] * 8)
    assert "seq_lengths" not in trainer_for(tmp_path, rows).train_dataset.column_names
    with pytest.raises(ValueError, match=r"'seq_lengths', .* drop the column: .*remove_columns"):
        trainer_for(tmp_path, rows, packing=False)


# --- rows that were padded ------------------------------------------------------------------------

EOS = tiny_tokenizer().eos_token_id
FILLERS = {"labels": -100, "loss_weights": 0.0}


def plain(columns=()):
    rows = []
    for length in (5, 9, 3, 9, 7, 4, 6, 8):
        ids = [10 + length] * (length - 1) + [EOS]
        values = {
            "labels": [-100, *ids[1:]],
            "completion_mask": [0, 0] + [1] * (length - 2),
            "loss_weights": [0.5] * length,
        }
        rows.append({"input_ids": ids} | {name: values[name] for name in columns})
    return rows


def padded(columns=(), left=0, width=12):
    """The same rows, filled up to `width`, `left` of the padding in front."""
    rows = []
    for row in plain(columns):
        size = len(row["input_ids"])
        front = min(left, width - size)
        rows.append(
            {
                name: [FILLERS.get(name, 0)] * front
                + values
                + [FILLERS.get(name, 0)] * (width - size - front)
                for name, values in (row | {"attention_mask": [1] * size}).items()
            }
        )
    return rows


@pytest.mark.parametrize("columns", [(), ("labels",), ("completion_mask", "loss_weights")])
@pytest.mark.parametrize("left", [0, 3, 99], ids=["behind", "around", "in front"])
@pytest.mark.parametrize("streamed", [False, True])
def test_padded_rows_are_the_documents_without_padding(tmp_path, caplog, columns, left, streamed):
    rows = padded(columns, left)
    given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
    with caplog.at_level(logging.WARNING):
        ours = trainer_for(tmp_path / "padded", given)
        assert columns_of(ours) == columns_of(trainer_for(tmp_path / "bare", plain(columns)))
    kind = "stream" if streamed else "dataset"
    said = f"8 of 8 rows of the train {kind} were padded beforehand: 45 padding tokens"
    assert said in caplog.text
    assert streamed or said in str(ours.packing_report)


def test_only_padding_that_is_marked_is_cut(tmp_path, caplog):
    bare = columns_of(trainer_for(tmp_path / "bare", plain()))
    unmarked = [{"input_ids": row["input_ids"]} for row in padded()]
    assert columns_of(trainer_for(tmp_path, unmarked)) != bare, "the control"
    caplog.clear()
    masked = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in plain()]
    assert columns_of(trainer_for(tmp_path, masked)) == bare
    assert "padded" not in caplog.text
    empty = {"input_ids": [0] * 12, "attention_mask": [0] * 12}
    trainer = trainer_for(tmp_path, [empty, *padded(), empty])
    assert columns_of(trainer) == bare
    assert "2 documents without a trained token: dropped (2 of them" in str(trainer.packing_report)
    found, expected = (trainer.evaluate(Dataset.from_list(rows)) for rows in (padded(), plain()))
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=TWO_RUNS)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([1, 0, 1, 1], "is no padding: .*0 between tokens where it is 1"),
        ([1, 1, 2, 2], "is no padding: it has other values than 0 and 1"),
        ([1, 1, 1], "has 4 input_ids but 3 entries in 'attention_mask'"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_mask_that_is_no_padding_names_its_row(tmp_path, mask, sentence, streamed):
    good = {"input_ids": [7, 8, 9, EOS], "attention_mask": [1, 1, 1, 1]}
    rows = [good, {**good, "attention_mask": mask}, {**good, "attention_mask": mask}]
    given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
    with pytest.raises(ValueError, match=f"document 1 of the .*{sentence}.*2 such rows"):
        trainer_for(tmp_path, given).train()


# --- rows that were packed ------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_packed_rows_become_their_documents_in_order(stream):
    rows = [
        {
            "input_ids": [11, 12, 13, 21, 22],
            "labels": [-100, 12, 13, -100, 22],
            "loss_weights": [0.0, 1.0, 0.5, 0.0, 2.0],
            "seq_lengths": [3, 2],
            "source": "web",
        },
        {"input_ids": [31], "labels": [31], "loss_weights": [1.0], "seq_lengths": [1]},
    ]
    rows[1]["source"] = "code"
    dataset = Dataset.from_list(rows * 2).select([1, 2])
    found = list(unpack_rows(dataset.to_iterable_dataset() if stream else dataset))
    assert [document["input_ids"] for document in found] == [[31], [11, 12, 13], [21, 22]]
    assert [document["labels"] for document in found] == [[31], [-100, 12, 13], [-100, 22]]
    assert [document["loss_weights"] for document in found] == [[1.0], [0.0, 1.0, 0.5], [0.0, 2.0]]
    assert [document["source"] for document in found] == ["code", "web", "web"]
    unlabelled = unpack_rows(dataset.remove_columns("labels"))
    assert unlabelled["labels"][:] == unlabelled["input_ids"][:]
