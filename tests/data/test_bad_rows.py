"""Rows that have nothing to train, or cannot be: one of them stops no run, all of them are counted.

What TRL trains is trained, token for token; what it drops is dropped; what it stops at is refused
in one sentence, however many rows there are.
"""

import logging

import pytest
from datasets import Dataset, IterableDataset
from harness import make_trainer
from helpers.tiny import tiny_model, tiny_tokenizer
from trl import SFTTrainer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.bad_rows import in_one_sentence


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


def trainer_for(folder, rows, cls=PackedSFTTrainer, tokenizer=None, **settings):
    settings = {"max_length": 128, "max_steps": 1, **settings}
    tokenizer = tokenizer or tiny_tokenizer(chat=True)
    return make_trainer(folder, rows, cls=cls, tokenizer=tokenizer, **settings)


def documents(trainer):
    rows = trainer.train_dataset
    return [(row["input_ids"], row["labels"]) for row in rows]


def every_third(usual, other, number=30):
    return [other if i % 3 == 0 else usual for i in range(number)]


# --- trained as TRL trains it ---------------------------------------------------------------------

PAIR = {"prompt": "Why? ", "completion": "Because."}


def test_an_empty_completion_trains_its_end_as_trl_does(tmp_path, caplog):
    rows = every_third(PAIR, {"prompt": "And? ", "completion": ""})
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path / "ours", rows)
    theirs = trainer_for(tmp_path / "trl", rows, cls=SFTTrainer)
    assert documents(trainer) == documents(theirs)
    eos = trainer.processing_class.eos_token_id
    assert [label for label in trainer.train_dataset[0]["labels"] if label != -100] == [eos]
    said_of_them = [r.message for r in caplog.records if "empty 'completion'" in r.message]
    assert said_of_them == [
        "[RANK 0] 10 of 30 rows of the train dataset have an empty 'completion': of these, only "
        "the end (EOS) is trained"
    ]
    trainer.train()
    assert "10 of 30 rows" in str(trainer.packing_report)


def test_completions_that_are_not_empty_are_not_counted(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trainer = trainer_for(tmp_path, [PAIR] * 4)
    assert "empty" not in caplog.text
    assert "empty" not in str(trainer.packing_report)


def test_an_empty_answer_of_a_prompt_template_trains_its_end(tmp_path):
    rows = every_third({"query": "Why?", "output": "So."}, {"query": "Why?", "output": ""})
    trainer = trainer_for(tmp_path, rows, prompt_template="qa", tokenizer=tiny_tokenizer())
    trainer.train()
    assert "10 of 30 rows of the train dataset have an empty 'output'" in str(
        trainer.packing_report
    )
    assert len(trainer.train_dataset) == 30


def test_an_empty_prompt_is_that_of_trl(tmp_path):
    rows = every_third(PAIR, {"prompt": "", "completion": "Because."})
    ours = trainer_for(tmp_path / "ours", rows)
    assert documents(ours) == documents(trainer_for(tmp_path / "trl", rows, cls=SFTTrainer))


def test_an_empty_completion_of_a_stream_trains_its_end(tmp_path):
    rows = every_third(PAIR, {"prompt": "And? ", "completion": ""})
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = trainer_for(tmp_path, stream)
    assert documents(trainer) == documents(trainer_for(tmp_path / "rows", rows))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", None])
def test_an_empty_answer_of_an_assistant_trains_its_end(tmp_path, train_on):
    rows = every_third(
        {"messages": [user("Why?"), said("So.")]}, {"messages": [user("Why?"), said("")]}
    )
    trainer = trainer_for(tmp_path, rows, train_on=train_on)
    trained = [label for label in trainer.train_dataset[0]["labels"] if label != -100]
    eos = trainer.processing_class.eos_token_id
    assert len(trainer.train_dataset) == 30
    assert eos in trained
    assert train_on is None or trained == [eos]


# --- dropped, and counted -------------------------------------------------------------------------


@pytest.mark.parametrize("train_on", ["assistant", None])
@pytest.mark.parametrize(
    ("usual", "empty"),
    [
        ({"messages": [user("Hi"), said("Yes?")]}, {"messages": []}),
        (
            {"prompt": [user("Hi")], "completion": [said("Yes?")]},
            {"prompt": [user("Hi")], "completion": []},
        ),
    ],
    ids=["messages", "completion"],
)
def test_conversations_without_messages_are_dropped_and_counted(tmp_path, usual, empty, train_on):
    rows = [usual] * 5 + [empty] * 3 + [usual]
    trainer = trainer_for(tmp_path, rows, train_on=train_on)
    trainer.train()
    assert documents(trainer) == documents(
        trainer_for(tmp_path / "usual", [usual] * 6, train_on=train_on)
    )
    assert "3 documents without a trained token: dropped" in str(trainer.packing_report)


# --- refused, and counted -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "bad", "sentence"),
    [
        (
            PAIR,
            {"prompt": "Why? ", "completion": None},
            "row 0 of the train dataset: its 'completion' is nothing (null); make it a string, or "
            "remove the row",
        ),
        (
            {"messages": [user("Hi"), said("Yes?")]},
            {"messages": [user("Hi"), said(None)]},
            "row 0 of the train dataset: message 1 of 'messages' (assistant) has no content; "
            "remove the row, or set it to ''",
        ),
        (
            {"prompt": [user("Hi")], "completion": [said("Yes?")]},
            {"prompt": [], "completion": [said("Yes?")]},
            "row 0 of the train dataset: 'prompt' must be a list of at least one message, got "
            "list []",
        ),
        (
            {"input_ids": [7, 8, 9], "completion_mask": [0, 1, 1]},
            {"input_ids": [7, 8, 9], "completion_mask": [0, 1]},
            "document 0 of the train dataset has 3 input_ids but 2 entries in 'completion_mask'; "
            "give one per token",
        ),
    ],
)
def test_bad_rows_of_a_kind_are_counted_in_one_sentence(tmp_path, usual, bad, sentence):
    with pytest.raises(ValueError) as error:
        trainer_for(tmp_path, every_third(usual, bad))
    assert str(error.value) == f"{sentence} (10 such rows)"
    with pytest.raises(ValueError) as error:
        trainer_for(tmp_path, [bad, *[usual] * 3])
    assert str(error.value) == sentence


def test_a_bad_row_is_found_in_its_batch(tmp_path):
    """The other rows are not rendered again, which would take minutes on a million."""
    rendered = []

    def formatted(row):
        rendered.append(row["n"])
        return None if row["n"] == 2500 else "a b c"

    rows = Dataset.from_list([{"n": n} for n in range(4000)])
    args = PackedSFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    with pytest.raises(ValueError, match=r"^row 2500 of the train dataset: formatting_func ret"):
        PackedSFTTrainer(
            tiny_model("llama"),
            args,
            train_dataset=rows,
            processing_class=tiny_tokenizer(),
            formatting_func=formatted,
        )
    assert rendered.count(2500) >= 1
    assert len(rendered) < 5000


def test_a_bad_row_of_several_processes_is_named(tmp_path):
    rows = [{"messages": [user("Hi"), said("Yes?")]}] * 20 + [
        {"messages": [user("Hi"), said(None)]}
    ]
    with pytest.raises(ValueError, match="row 20 of the train dataset: message 1"):
        trainer_for(tmp_path, rows, dataset_num_proc=2)


def test_messages_beside_a_text_of_nulls_are_trained(tmp_path):
    rows = [{"messages": [user("Hi"), said("Yes?")]}] * 4
    beside = trainer_for(tmp_path / "beside", [{**row, "text": None} for row in rows])
    assert documents(beside) == documents(trainer_for(tmp_path / "alone", rows))
    with pytest.raises(ValueError, match=r"row 1 .*'messages' is null"):
        trainer_for(tmp_path / "null", [rows[0], {"messages": None}, rows[1]])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": 5, "content": "a"}]}, "has int 5 as role; make it a string"),
        ({"messages": []}, "all 4 rows of the train dataset are empty"),
        ({"text": "a b", "loss_weight": 1e300}, r"1e\+300, more than float32 holds; divide all"),
        ({"messages": [user("a"), said("b", weight=1e300)]}, r"weight=1e\+300; .*float32 holds"),
        ({"messages": '[{"role": "user", "content": "a"}]'}, r"is a text; .*json\.loads"),
    ],
    ids=["role", "empty", "loss_weight", "weight", "JSON"],
)
def test_a_row_that_cannot_be_trained_is_refused_in_one_sentence(tmp_path, row, words):
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, [row] * 4)


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("value", [2**63, 2**70, -(2**63) - 1])
def test_tokens_beyond_64_bits_are_named(tmp_path, column, value):
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7]}
    trainer = trainer_for(tmp_path, stream_of([row] * 3 + [{**row, column: [5, 6, value]}]))
    with pytest.raises(ValueError, match=f"row 3 has {value} in '{column}'.* 64 bits"):
        trainer.train()


def test_rows_that_differ_in_a_number_or_a_name_are_of_one_kind(tmp_path):
    def alien(i):
        return {"messages": [user("Hi"), {"role": f"alien{i}", "content": "x"}]}

    def silent(i):
        return {"messages": [user("Hi"), said("Yes?"), {"role": "user", "content": None}]}

    rows = [{"messages": [user("Hi"), said("Yes?")]}, *map(alien, range(4)), *map(silent, range(2))]
    with pytest.raises(ValueError, match="alien0") as error:
        trainer_for(tmp_path, rows)
    first, second = str(error.value).split("; also ")
    assert first.startswith("row 1 of the train dataset: message 1 of 'messages' has the role")
    assert first.endswith("(4 such rows)")
    assert second.startswith("row 5 of the train dataset: message 2 of 'messages' (user) has no")
    assert second.endswith("(2 such rows)")


def test_rows_for_many_reasons_are_few_words():
    found = in_one_sentence(f"row {i}: it lacks {'abcdefghi'[i]}" for i in range(9))
    assert found.endswith("; also 4 rows for other reasons")
    assert found.count("also") == 5


def test_a_template_that_asks_for_too_much_names_the_row(tmp_path):
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{% for i in range(1000000) %}a{% endfor %}"
    with pytest.raises(ValueError, match=r"row 0 .*cannot render it: Range too big.*30 such rows"):
        trainer_for(tmp_path, [{"messages": [user("Hi"), said("Yes?")]}] * 30, tokenizer=tokenizer)


@pytest.mark.parametrize("form", ["text", "messages"])
def test_half_a_character_names_its_row(tmp_path, form):
    def row(text):
        return {"text": text} if form == "text" else {"messages": [user(text), said("Yes?")]}

    rows = [row("Hi" if i != 4 else "H\ud800i") for i in range(10)]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    with pytest.raises(ValueError, match=r"row 4 of the train dataset.*lone surrogate '.ud800'"):
        trainer_for(tmp_path, stream).train()


@pytest.mark.parametrize("train_on", ["assistant", None])
def test_tool_calls_that_are_a_text_name_their_row(tmp_path, train_on):
    usual = {"messages": [user("Hi"), said("Yes?")]}
    bad = {"messages": [user("Hi"), said("", tool_calls='[{"name": "look"}]')]}
    sentence = (
        r"row 1 of .*message 1 .*\(assistant\) has str .*look.* as tool_calls; make it a list"
    )
    with pytest.raises(ValueError, match=sentence):
        trainer_for(tmp_path, [usual, bad], train_on=train_on)


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


TOKENS = {"input_ids": [7, 8, 9]}


@pytest.mark.parametrize(
    ("usual", "other", "sentence"),
    [
        (TOKENS, {**TOKENS, "labels": [-100, 8, 9]}, "has 'labels', but its first row has none"),
        ({**TOKENS, "labels": [7, 8, 9]}, TOKENS, "has no 'labels', but others have"),
        ({**TOKENS, "completion_mask": [0, 1, 1]}, TOKENS, "has no 'completion_mask', but others"),
        (TOKENS, {**TOKENS, "assistant_masks": [0, 1, 1]}, "has 'assistant_masks', but its first"),
        ({**TOKENS, "loss_weight": 1.0}, TOKENS, "has no 'loss_weight', but others have"),
    ],
)
def test_a_stream_whose_rows_change_columns_names_the_row(tmp_path, usual, other, sentence):
    rows = [other if i == 31 else usual for i in range(40)]
    with pytest.raises(ValueError, match=f"row 31 of the stream {sentence}"):
        trainer_for(tmp_path, stream_of(rows), max_steps=20).train()


def test_columns_that_say_nothing_of_tokens_may_come_and_go(tmp_path):
    rows = [{**TOKENS, "source": "web"} if i % 2 else TOKENS for i in range(40)]
    trainer_for(tmp_path, stream_of(rows)).train()


@pytest.mark.parametrize("lengths", [[10, -2], [4, 3]])
@pytest.mark.parametrize("streamed", [False, True])
def test_lengths_that_do_not_name_every_token_name_their_row(tmp_path, lengths, streamed):
    good = {"input_ids": [7] * 8, "labels": [7] * 8, "seq_lengths": [6, 2]}
    rows = [{**good, "seq_lengths": lengths} if i == 31 else good for i in range(40)]
    trainer_for(tmp_path, [good] * 3).train()
    with pytest.raises(ValueError, match=r"row 31 of the .*seq_lengths"):
        trainer_for(tmp_path, stream_of(rows) if streamed else rows, max_steps=20).train()


@pytest.mark.parametrize("evaluated", [False, True])
@pytest.mark.parametrize("rows", [[], [{"input_ids": [7, 8, 9], "labels": [-100] * 3}] * 3])
def test_a_stream_with_nothing_to_train_is_refused_in_words(tmp_path, rows, evaluated):
    def run():
        if evaluated:
            trainer_for(tmp_path, [PAIR]).evaluate(stream_of(rows))
        else:
            trainer_for(tmp_path, stream_of(rows)).train()

    with pytest.raises(ValueError, match=r"is empty: it has no rows|no documents left to train on"):
        run()


LONG = "many words and more " * 20


@pytest.mark.parametrize(
    ("row", "settings", "running"),
    [
        ({"messages": [user("Hi"), said(LONG)]}, {}, False),
        ({"messages": [user("Hi"), said(LONG)]}, {"train_on": "assistant"}, False),
        ({"conversations": [{"from": "gpt", "value": LONG}]}, {}, False),
        ({"prompt": "Hi", "completion": LONG}, {"completion_only_loss": False}, False),
        ({"query": "Hi", "response": LONG}, {"prompt_template": "qa"}, False),
        ({"text": f"### A: {LONG}"}, {"response_template": "### A:"}, False),
        ({"text": f"<|im_start|>user\nHi<|im_end|>\n{LONG}<|im_end|>"}, {}, False),
        ({"input_ids": [9] * 90, "labels": [-100] * 5 + [9] * 85}, {}, False),
        ({"instruction": "Hi", "output": LONG, "text": f"Hi\n{LONG}"}, {}, False),
        ({"text": LONG}, {}, True),
        ({"input_ids": [9] * 90}, {}, True),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_cut_answers_are_not_told_to_be_split(tmp_path, row, settings, running, streamed):
    """A piece of an answer without its question teaches to begin in the middle."""
    rows = stream_of([row] * 8) if streamed else [row] * 8
    trainer = trainer_for(tmp_path, rows, max_length=32, **settings)
    trainer.train()
    report = str(trainer.packing_report)
    assert "of the trained tokens are lost" in report
    assert "raise max_length" in report
    assert ("overflow='split'" in report) == running


# --- a prompt beside a whole conversation ---------------------------------------------------------


@pytest.mark.parametrize("column", ["messages", "conversations"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_beside_messages_repeats_their_beginning(tmp_path, column, streamed):
    """As in ultrachat_200k: prompt, prompt_id, messages."""
    conversations = [[user("Hi"), said("Yes?")], [user("Two and two?"), said("Four.")]] * 3
    rows = [{"prompt": c[0]["content"], "prompt_id": "x", column: c} for c in conversations]
    rows[3]["prompt"] = None
    given = IterableDataset.from_generator(lambda: iter(rows)) if streamed else rows
    trainer = trainer_for(tmp_path, given)
    plain = trainer_for(tmp_path / "plain", [{"messages": c} for c in conversations])
    assert documents(trainer) == documents(plain)
    trainer.train()


# --- flags that are null --------------------------------------------------------------------------


def flagged(train, number=4):
    messages = [user("Hi") | {"train": None}, said("Yes?", train=train)]
    return [{"messages": messages} for _ in range(number)]


def test_flags_that_are_all_null_are_as_if_they_were_not_there(tmp_path):
    without = [{"messages": [user("Hi"), said("Yes?")]}] * 4
    trainer = trainer_for(tmp_path / "null", flagged(None))
    assert documents(trainer) == documents(trainer_for(tmp_path / "plain", without))
    trainer.train()


def test_flags_of_later_rows_count_for_the_first(tmp_path):
    rows = Dataset.from_list(flagged(None) + flagged(True))
    trainer = trainer_for(tmp_path / "some", rows)
    asked = trainer_for(tmp_path / "asked", flagged(None), train_on="assistant")
    assert documents(trainer)[:4] == documents(asked)
    assert documents(trainer) != documents(trainer_for(tmp_path / "null", flagged(None, 8)))


def test_a_stream_whose_first_flags_are_null_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"null in its first row.* set train_on='assistant'"):
        trainer_for(tmp_path, stream_of(flagged(None)))
    trainer_for(tmp_path, stream_of(flagged(None)), train_on="assistant")


@pytest.mark.parametrize(
    "row",
    [
        {"text": "One two three."},
        {"prompt": "One", "completion": " two."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    ],
    ids=["text", "prompt", "messages"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_token_weights_beside_rows_without_tokens_are_refused(tmp_path, row, is_stream):
    rows = Dataset.from_list([row | {"loss_weights": [1.0, 0.5]}] * 4)
    with pytest.raises(ValueError, match=r"'loss_weights'.* 'loss_weight', .*tokenized rows"):
        trainer_for(tmp_path, rows.to_iterable_dataset() if is_stream else rows)


def test_flags_that_trl_would_ignore_are_refused(tmp_path):
    class OwnTokenizer(type(tiny_tokenizer())):
        def __call__(self, *args, **options):
            return super().__call__(*args, **options)

    own = tiny_tokenizer(chat=True)
    own.__class__ = OwnTokenizer
    with pytest.raises(ValueError, match="'train' or 'weight' of messages cannot be used"):
        trainer_for(tmp_path, flagged(0.5), tokenizer=own)
    trainer_for(tmp_path, flagged(None), tokenizer=own)


def test_flags_beside_a_response_template_are_refused(tmp_path):
    with pytest.raises(ValueError, match="both say what is trained"):
        trainer_for(tmp_path, flagged(0.5), response_template="<|im_start|>assistant")
