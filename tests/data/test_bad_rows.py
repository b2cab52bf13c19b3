"""Rows that have nothing to train, or cannot be: one of them stops no run, all of them are counted.

What TRL trains is trained, token for token; what it drops is dropped; what it stops at is refused
in one sentence that names the row, however many rows there are. Ids and lengths that a model cannot
read are named before it runs on any of them.
"""

import numpy as np
import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.chat_templates import source_of
from helpers.streams import stream_of
from helpers.tiny import VOCAB_SIZE, assistant, tiny_model, tiny_tokenizer, user
from trl import SFTTrainer

from trl_packing import PackedDataset, enable_packing


def chat(*messages):
    return {"messages": [user("Hi"), *messages]}


def trainer_for(folder, rows, **options):
    options = {"tokenizer": tiny_tokenizer(chat=True), "max_length": 128, "max_steps": 1, **options}
    return make_trainer(folder, rows, **options)


def documents(trainer):
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def every_third(usual, other, number=30):
    return [other if i % 3 == 0 else usual for i in range(number)]


# --- trained as TRL trains it, or dropped and counted ---------------------------------------------

PAIR = {"prompt": "Why? ", "completion": "Because."}
TURNS = {"prompt": [user("Hi")], "completion": [assistant("Yes?")]}


def test_an_empty_completion_trains_its_end_as_trl_does(tmp_path):
    rows = every_third(PAIR, {"prompt": "And? ", "completion": ""})
    trainer = trainer_for(tmp_path / "ours", rows)
    theirs = documents(trainer_for(tmp_path / "trl", rows, cls=SFTTrainer))
    assert documents(trainer) == theirs
    assert documents(trainer_for(tmp_path / "stream", stream_of(rows))) == theirs


@pytest.mark.parametrize("train_on", ["assistant", None])
def test_rows_without_messages_are_dropped_and_counted(tmp_path, train_on):
    for usual, empty in (
        (chat(assistant("Yes?")), {"messages": []}),
        (TURNS, {**TURNS, "completion": []}),
    ):
        trainer = trainer_for(tmp_path, [usual] * 5 + [empty] * 3 + [usual], train_on=train_on)
        plain = trainer_for(tmp_path / "usual", [usual] * 6, train_on=train_on)
        assert documents(trainer) == documents(plain)
        assert "3 documents without a trained token: dropped" in str(trainer.packing_report)


def test_messages_beside_a_text_of_nulls_are_trained(tmp_path):
    rows = [chat(assistant("Yes?"))] * 4
    beside = trainer_for(tmp_path / "beside", [{**row, "text": None} for row in rows])
    assert documents(beside) == documents(trainer_for(tmp_path / "alone", rows))


# --- refused, and counted -------------------------------------------------------------------------

TOKENS = {"input_ids": [7, 8, 9]}
LABELLED = {**TOKENS, "labels": [7, 8, 9]}
MASKED = {**TOKENS, "completion_mask": [0, 1, 1]}
WEIGHTED = {**TOKENS, "loss_weights": [0.5] * 3}
PACKED = {**TOKENS, "seq_lengths": [2, 1]}
NEGATIVE = {**TOKENS, "seq_lengths": [4, -1]}
OF_A_KIND = [
    (chat(assistant("Yes?")), {"messages": None}, "row {} .*'messages' is nothing .null."),
    (chat(assistant("Yes?")), chat(assistant(None)), "row {} .*message 1 .* has no content"),
    (TURNS, {**TURNS, "prompt": []}, "row {} .*'prompt' must be a list of messages"),
    (
        MASKED,
        {**MASKED, "completion_mask": [0, 1]},
        "document {} .* 2 entries in 'completion_mask'",
    ),
    (WEIGHTED, {**WEIGHTED, "loss_weights": [1.0]}, "document {} .* 1 entries in 'loss_weights'"),
    (PACKED, NEGATIVE, "row {} .* its seq_lengths are .4, -1.; they must name every token"),
    (TOKENS, {"input_ids": [7, VOCAB_SIZE, 9]}, f"document {{}} .* has token id {VOCAB_SIZE}, but"),
]


@pytest.mark.parametrize(("usual", "bad", "sentence"), OF_A_KIND)
def test_the_first_bad_row_of_a_kind_is_named(tmp_path, usual, bad, sentence):
    rows = Dataset.from_list([usual, bad, usual, bad, bad])
    with pytest.raises(ValueError, match=sentence.format(1)):
        trainer_for(tmp_path, rows)
    with pytest.raises(ValueError, match=sentence.format(2)):
        trainer_for(tmp_path, rows.select([0, 2, 3]))
    if None not in bad.values():
        trainer_for(tmp_path, rows.select([0, 2]))


ALPACA = {"prompt_template": "alpaca"}
ONE_SENTENCE = [
    ({"question": "why"}, {}, r"no column to train on: it has \['question'\]"),
    ({"prompt": "why", "answer": "so"}, {}, "its 'completion' is nothing .null."),
    ({"input_ids": [1.0, 2.0]}, {}, "'input_ids' holds .*lists of integers; convert"),
    ({"input_ids": [1, None]}, {}, r"'input_ids' has a missing \(null\) token"),
    ({**TOKENS, "loss_weights": ["a", "b", "c"]}, {}, "'loss_weights' holds .*lists of numbers"),
    ({"messages": [{"role": 5, "content": "a"}]}, {}, "has the role 5, which is none"),
    ({"messages": ["Hi"]}, {}, "message 0 .* is str 'Hi', not a dictionary"),
    (
        chat(assistant("a", tool_calls='[{"name": "f"}]')),
        {},
        "has str .* as tool_calls; make it a list",
    ),
    ({"messages": []}, {}, "4 read, the longest has 0"),
    ({"input_ids": None}, {}, "'input_ids' has a null row; filter it out"),
    ({"text": "a b", "loss_weight": float("nan")}, {}, "row 0 .* has loss_weight=nan; give finite"),
    ({"text": "a b", "loss_weight": 1e300}, {}, r"=1e\+300; .* float32"),
    ({"messages": '[{"role": "user"}]'}, {}, r"nothing to train on.*json\.loads"),
    (
        {"prompt": str([user("a")]), "completion": str([assistant("b")])},
        {},
        r"on.*ast\.literal_eval",
    ),
    ({"conversations": [{"from": "alien", "value": "Hi"}]}, {}, "from 'alien'; rename it"),
    ({**chat(assistant("a")), "tools": "[not json"}, {}, "'tools' must be a list"),
    (chat(user("again")), {"template": "gemma"}, "cannot render it.* roles must alternate"),
    (chat(assistant("a", weight=0.5)), {"response_template": "#"}, "both say what is trained"),
    (LABELLED, {"response_template": "#"}, "has 'labels' and response_template='#' is set"),
    ({"text": "a"}, {"train_on": "assistant"}, "train_on='assistant' is about messages, but"),
    ({"query": "a", "output": "b", "answer": "c"}, ALPACA, r"\['output', 'answer'\]; rename it"),
    ({**TOKENS, "seq_lengths": [3]}, {"max_length": 2}, "packed .* 3 tokens.*raise max_"),
    ({"text": "a", "loss_weights": [1.0]}, {}, "'loss_weight', .*tokenized rows"),
    (chat(assistant("a")), {"template": None}, "no chat template; set chat_template_path"),
    ({"text": "a"}, {"eos": None}, "the tokenizer has no eos_token"),
]


@pytest.mark.parametrize(("row", "settings", "words"), ONE_SENTENCE)
def test_a_row_that_cannot_be_trained_is_refused_in_one_sentence(tmp_path, row, settings, words):
    tokenizer = tiny_tokenizer(chat=True)
    settings = dict(settings)
    if "template" in settings:
        name = settings.pop("template")
        tokenizer.chat_template = name and source_of(name)
    if "eos" in settings:
        tokenizer.eos_token = settings.pop("eos")
    with pytest.raises(ValueError, match=words) as error:
        trainer_for(tmp_path, [row] * 4, tokenizer=tokenizer, **settings)
    assert "\n" not in str(error.value)


def test_a_bad_row_is_found_in_its_batch(tmp_path):
    """The other rows are not rendered again, which would take minutes on a million."""
    rendered = []

    def formatted(row):
        rendered.append(row["n"])
        return None if row["n"] == 2500 else "a b c"

    rows = Dataset.from_list([{"n": n} for n in range(4000)])
    with pytest.raises(ValueError, match=r"^row 2500 of the train dataset: the result of form"):
        make_trainer(tmp_path, rows, arguments={"formatting_func": formatted})
    assert len(rendered) < 5000


def test_half_a_character_names_its_row(tmp_path):
    texts = [{"text": "Hi" if i != 4 else "H\ud800i"} for i in range(10)]
    with pytest.raises(
        ValueError, match=r"row 4 of the train dataset.*'.ud800' .*surrogates not allowed"
    ):
        trainer_for(tmp_path, stream_of(texts)).train()


# --- streams --------------------------------------------------------------------------------------


OTHER_ROWS = [
    (TOKENS, LABELLED, "has the column 'labels', unlike its first row"),
    (MASKED, TOKENS, "has no 'completion_mask', unlike"),
    ({**TOKENS, "loss_weight": 1.0}, TOKENS, "has no 'loss_weight', unlike"),
    (LABELLED, {**LABELLED, "labels": [1, 2]}, "of the stream has 3 input_ids but 2 entries"),
]


@pytest.mark.parametrize(("usual", "other", "sentence"), OTHER_ROWS)
def test_a_stream_with_another_row_names_it(tmp_path, usual, other, sentence):
    rows = [other if i == 31 else usual for i in range(40)]
    with pytest.raises(ValueError, match=f"(row|document) 31 .*{sentence}"):
        trainer_for(tmp_path, stream_of(rows), max_steps=20).train()


UNTRAINABLE = [
    (PACKED, "train stream were packed before"),
    ({**TOKENS, "input_ids": [5, 6, 2**63]}, "rows 0 to 3: .* beyond 64 bits"),
    ({**LABELLED, "input_ids": [5, 6, -(2**63) - 1]}, "rows 0 to 3: .* beyond 64 bits"),
    ({**WEIGHTED, "loss_weights": [1.0, None, 1.0]}, "'loss_weights' has a missing"),
    ({"text": "a", "loss_weights": [1.0]}, "'loss_weight', .*tokenized rows"),
]


@pytest.mark.parametrize(("row", "sentence"), UNTRAINABLE)
def test_a_stream_that_cannot_be_trained_is_refused(tmp_path, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        trainer_for(tmp_path, stream_of([row] * 4)).train()


@pytest.mark.parametrize("rows", [[], [{**TOKENS, "labels": [-100] * 3}] * 3])
def test_a_stream_with_nothing_to_train_is_refused_in_words(tmp_path, rows):
    words = r"is empty: it has no rows|no documents left to train on"
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, [PAIR]).evaluate(stream_of(rows))
    with pytest.raises(ValueError, match=words):
        trainer_for(tmp_path, stream_of(rows)).train()


# --- flags of messages ----------------------------------------------------------------------------


IGNORED_BY_TRL = [
    ({"weight": 0.5}, {}, "'weight' of messages"),
    ({}, {"train_on": "assistant"}, "train_on"),
]


@pytest.mark.parametrize(("flags", "settings", "name"), IGNORED_BY_TRL)
def test_what_trl_would_ignore_is_refused(tmp_path, flags, settings, name):
    own = tiny_tokenizer(chat=True)
    own.__class__ = type("Own", (type(own),), {"__call__": lambda *a, **k: {"input_ids": [5]}})
    with pytest.raises(ValueError, match=rf"{name}.* cannot be used .*because Own renders"):
        trainer_for(tmp_path, [chat(assistant("a", **flags))], tokenizer=own, **settings)


# --- limits of a model ----------------------------------------------------------------------------

GOOD = {"input_ids": [7, 8, 9, 10], "labels": [-100, 8, 9, 10]}
BEYOND = ({**GOOD, "input_ids": [7, 8, 5000, 10]}, "has token id 5000, but")
LABEL = ({**GOOD, "labels": [-100, 8, 320, 10]}, "has label 320, but")


def with_bad(bad):
    """`bad` is row 31: no probe of the isolation check reads it."""
    return [bad if i == 31 else GOOD for i in range(40)]


@pytest.mark.parametrize(("bad", "sentence"), [BEYOND, LABEL])
def test_every_set_is_looked_at_before_the_model_runs_on_it(tmp_path, bad, sentence):
    rows = with_bad(bad)
    for name, given, options in (
        ("train dataset", rows, {}),
        ("web dataset", [GOOD], {"evaluated": {"web": Dataset.from_list(rows)}}),
        ("(eval dataset|stream)", [GOOD], {"evaluated": stream_of(rows)}),
    ):
        with pytest.raises(ValueError, match=f"document 31 of the {name} {sentence}"):
            trainer_for(tmp_path, given, **options)
    with pytest.raises(ValueError, match=f"(document|row) 31 of .* {sentence}"):
        trainer_for(tmp_path, stream_of(rows), max_steps=40).train()
    with pytest.raises(ValueError, match=f"document 31 of the training dataset {sentence}"):
        enable_packing(tiny_model("llama"), PackedDataset(rows, tiny_tokenizer(), 16))


@pytest.mark.parametrize("skips", [False, True], ids=["prepared", "as it is"])
def test_sets_that_come_later_are_looked_at(tmp_path, skips):
    bad, sentence = BEYOND
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}} if skips else {}
    trainer = trainer_for(tmp_path, [GOOD] * 8, **settings)
    rows = Dataset.from_list(with_bad(bad))
    for method in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match=f"document 31 of the .* {sentence}"):
            method(rows)
        method(Dataset.from_list([GOOD] * 8))  # and good ones pass
    for is_padded in (False, True):
        trainer.compute_metrics = (lambda prediction: {}) if is_padded else None
        for given in [rows] if skips else [rows, stream_of(rows)]:
            with pytest.raises(ValueError, match=f"document 31 of the .* {sentence}"):
                trainer.evaluate(given)


@pytest.mark.parametrize("make", [list, stream_of])
def test_documents_beyond_learned_positions_are_named(tmp_path, make):
    given = make(with_bad({"input_ids": [7] * 60, "labels": [7] * 60}))
    model = tiny_model("gpt2", n_positions=48)
    with pytest.raises(ValueError, match=r"document 31 .*60 tokens.*learned 48 positions; set max"):
        trainer_for(tmp_path, given, model=model, max_steps=40).train()
    trainer_for(tmp_path, given, model=model, max_length=48).train()


def test_limits_are_those_of_the_embeddings():
    rotary = tiny_model("llama", max_position_embeddings=32)
    rotary.resize_token_embeddings(VOCAB_SIZE + 8)
    enable_packing(rotary, [np.full(40, VOCAB_SIZE + 7)])
    with pytest.raises(ValueError, match=f"document 1 has token id {VOCAB_SIZE + 8}"):
        enable_packing(rotary, [np.array([7, 8]), np.array([7, VOCAB_SIZE + 8])])
    with pytest.raises(ValueError, match="document 0 has 40 tokens"):
        enable_packing(tiny_model("gpt2", n_positions=32), [np.full(40, 7)])
