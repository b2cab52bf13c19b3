"""Two preparations are compared on every row; a difference of one label is found."""

import pytest
from datasets import Dataset
from helpers.attacks import ATTACKS, harmful
from helpers.tiny import tiny_tokenizer

from trl_packing.tools.preparations import compare as compare_preparations
from trl_packing.tools.preparations.compare import (
    CUT,
    DIFFERENCES,
    DROPPED,
    DROPPED_BY_BOTH,
    EQUAL,
    LABELS,
    TOKENS,
    WEIGHTS,
    compare,
)
from trl_packing.tools.preparations.side import Prepared, Side, documents_by_trl
from trl_packing.tools.preparations.text import comparison_text
from trl_packing.tools.preview.previewed_run import PreviewedRun


def run_of(rows, *options, tokenizer=None):
    tokenizer = tokenizer or tiny_tokenizer(chat=True)
    return PreviewedRun.from_settings(rows, tokenizer, [*options])


def compared(rows, first=(), second=(), *, by_trl=False, tokenizer=None):
    a, b = (run_of(rows, *options, tokenizer=tokenizer) for options in (first, second))
    return compare(Side("here", a), Side("trl" if by_trl else "there", b, by_trl=by_trl))


def found(comparison):
    return {kind: number for kind in DIFFERENCES if (number := comparison.counts[kind])}


def chats(number: int = 12) -> Dataset:
    turns = lambda i: [  # noqa: E731
        {"role": "user", "content": "Why? " * (1 + i % 4)},
        {"role": "assistant", "content": "Because. " * (1 + i % 3)},
    ]
    return Dataset.from_list([{"messages": turns(i) * (1 + i % 2)} for i in range(number)])


def texts(*numbers: int) -> Dataset:
    return Dataset.from_dict({"text": ["one two three " * n for n in numbers]})


def tokenized(labels, **columns) -> Dataset:
    ids = [[7 + k for k in range(len(row))] for row in labels]
    return Dataset.from_dict({"input_ids": ids, "labels": labels, **columns})


# --- TRL ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (chats(), []),
        (chats(), ["--max_length", "30"]),
        (chats(), ["--assistant_only_loss", "true"]),
        (chats(), ["--shuffle_dataset", "true"]),
        (chats(), ["--eos_token", "<|other|>"]),
        (texts(1, 5, 2), ["--max_length", "16"]),
        (Dataset.from_dict({"prompt": ["Why? ", "Who?"], "completion": ["So.", ""]}), []),
        (tokenized([[7, 8, 9], [-100, 8], [-100, -100]]), []),
    ],
)
def test_settings_that_trl_has_prepare_the_same(rows, options):
    options = ["--max_length", "64", *options]
    tokenizer = tiny_tokenizer(chat="generation")
    comparison = compared(rows, options, options, by_trl=True, tokenizer=tokenizer)
    assert comparison.is_equal
    assert comparison.counts[EQUAL] + comparison.counts[DROPPED_BY_BOTH] == len(rows)
    assert comparison.totals[0].tolist() == comparison.totals[1].tolist()
    assert comparison.totals.all()


def test_settings_that_trl_lacks_are_found_in_the_labels():
    comparison = compared(chats(), *[["--train_on", "assistant"]] * 2, by_trl=True)
    assert found(comparison) == {LABELS: 12}
    assert comparison.totals[0, 2] < comparison.totals[1, 2]


def test_the_documents_of_trl_are_those_of_its_trainer(tmp_path):
    from helpers.tiny import tiny_model
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(str(tmp_path), max_length=30, use_cpu=True, bf16=False, report_to="none")
    trainer = SFTTrainer(
        tiny_model("llama"), args, train_dataset=chats(), processing_class=tiny_tokenizer(chat=True)
    )
    shown = documents_by_trl(run_of(chats(), "--max_length", "30"))
    assert shown["input_ids"][:] == trainer.train_dataset["input_ids"][:]
    assert shown["labels"][:] == trainer.train_dataset["labels"][:]


def test_rows_that_trl_cannot_prepare_are_refused_with_its_reason():
    rows = Dataset.from_dict({"question": ["Why?"], "answer": ["So."]})
    options = ["--prompt_template", "{question}"]
    with pytest.raises(ValueError, match="TRL cannot prepare these rows: KeyError: 'text'"):
        compared(rows, options, options, by_trl=True)


# --- kinds of differences -------------------------------------------------------------------------


def changed(rows, row, column, at, value):
    lists = rows.to_list()
    lists[row][column][at] = value
    return Dataset.from_list(lists)


def sides_of(first, second, *options):
    return compare(Side("a", run_of(first, *options)), Side("b", run_of(second, *options)))


def test_one_label_among_many_rows_is_found(monkeypatch):
    """The negative control: everything is equal but for one label of one row."""
    monkeypatch.setattr(compare_preparations, "_CHUNK", 7)
    rows = tokenized([list(range(7, 12))] * 50)
    assert sides_of(rows, rows).is_equal
    comparison = sides_of(rows, changed(rows, 33, "labels", 3, -100))
    assert found(comparison) == {LABELS: 1}
    assert comparison.counts[EQUAL] == 49
    (difference,) = comparison.differences
    assert (difference.row, difference.at) == (33, 3)


def test_the_label_of_a_first_token_trains_nothing():
    rows = tokenized([[7, 8, 9]] * 3)
    assert sides_of(rows, changed(rows, 1, "labels", 0, -100)).is_equal


def test_one_token_and_one_weight_are_found():
    rows = tokenized([[7, 8, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    token = changed(changed(rows, 1, "input_ids", 2, 20), 1, "labels", 2, 20)
    assert found(sides_of(rows, token)) == {TOKENS: 1}
    assert found(sides_of(rows, changed(rows, 2, "loss_weights", 1, 0.5))) == {WEIGHTS: 1}
    untrained = tokenized([[7, -100, 9]] * 3, loss_weights=[[1.0, 1.0, 1.0]] * 3)
    assert sides_of(untrained, changed(untrained, 2, "loss_weights", 1, 0.5)).is_equal
    weighted = tokenized([[7, 8, 9]] * 3, loss_weight=[1.0, 2.0, 1.0])
    assert found(sides_of(rows, weighted)) == {WEIGHTS: 1}


@pytest.mark.parametrize("overflow", ["split", "truncate_prompt"])
def test_other_cuts_of_the_same_text_are_told_from_other_text(overflow):
    rows = Dataset.from_dict({"prompt": ["one two three " * 4, "a"], "completion": ["so", "b"]})
    limit = ["--max_length", "24"]
    comparison = compared(rows, limit, [*limit, "--overflow", overflow])
    assert set(found(comparison)) <= {CUT, DROPPED}
    assert comparison.counts[EQUAL] == 1
    other = Dataset.from_dict({"prompt": ["one two threx " * 4, "a"], "completion": ["so", "b"]})
    a = Side("a", run_of(rows, *limit, "--overflow", "truncate_prompt"))
    b = Side("b", run_of(other, *limit, "--overflow", "truncate_prompt"))
    assert found(compare(a, b)) == {TOKENS: 1}


def test_a_document_cut_at_either_end_is_cut_differently():
    rows = texts(12, 1)
    comparison = compared(
        rows, ["--max_length", "16"], ["--max_length", "16", "--truncation_mode", "keep_end"]
    )
    assert found(comparison) == {CUT: 1}


def test_rows_that_one_side_drops_are_counted():
    comparison = compared(
        texts(12, 1, 12), ["--max_length", "16", "--overflow", "drop"], ["--max_length", "16"]
    )
    assert found(comparison) == {DROPPED: 2}
    assert comparison.totals[:, 0].tolist() == [1, 3]


def test_shuffled_rows_are_compared_with_themselves():
    shuffled = ["--shuffle_dataset", "true", "--packing", "false"]
    assert compared(chats(), [*shuffled, "--seed", "1"], [*shuffled, "--seed", "2"]).is_equal


def test_other_rows_are_refused():
    with pytest.raises(ValueError, match="a has 2 rows and b has 3"):
        sides_of(texts(1, 2), texts(1, 2, 3))


# --- text -----------------------------------------------------------------------------------------


def shown(comparison, tokenizer):
    return comparison_text(comparison, [tokenizer, tokenizer])


def test_the_text_shows_counts_and_the_lines_that_differ():
    tokenizer = tiny_tokenizer(chat=True)
    comparison = compared(chats(2), *[["--train_on", "assistant"]] * 2, by_trl=True)
    text = shown(comparison, tokenizer)
    assert "labels differ 2 rows" in " ".join(text.split())
    assert "The preparations differ in 2 of 2 rows." in text
    lines = text.split("\n")
    start = lines.index("row 0 · labels differ from token 1 on")
    assert lines[start + 1 : start + 3] == ["--- here", "+++ trl"]
    assert any(line.startswith("-") and "⟦Because. <|im_end|>⟧" in line for line in lines[start:])
    assert any(line.startswith("+") and "⟦" in line for line in lines[start + 3 :])


def test_tokens_of_the_same_text_are_told_by_their_ids():
    class Alike:
        """A tokenizer of which all tokens have the same text."""

        def decode(self, ids, **_):
            return "x" * len(ids)

    rows = tokenized([[7, 8, 9, 10, 11]])
    comparison = sides_of(rows, changed(rows, 0, "input_ids", 3, 20))
    text = shown(comparison, Alike())
    assert "\n-      10      1 'x'\n" in text
    assert "\n+      20      1 'x'\n" in text


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_text_does_not_act_in_the_terminal(attack):
    if attack == "lone surrogate":
        pytest.skip("Arrow holds no lone surrogates")
    rows = Dataset.from_dict({"prompt": ["Why? "], "completion": [f"So: {ATTACKS[attack]}."]})
    comparison = compared(rows, [], ["--completion_only_loss", "false"])
    text = shown(comparison, tiny_tokenizer(chat=True))
    assert not harmful(text)
    assert harmful(ATTACKS[attack]) or attack == "marks"


def test_many_rows_are_read_in_parts(monkeypatch):
    """No list of all documents is made: at most 1,000 rows are read at once."""
    held = []
    read = Prepared.of_rows

    def counted(self, first, end):
        found = read(self, first, end)
        held.append(len(found))
        return found

    monkeypatch.setattr(Prepared, "of_rows", counted)
    rows = tokenized([[7, 8, 9]] * 2500)
    assert compared(rows).counts[EQUAL] == 2500
    assert max(held) == 1000
    assert sum(held) == 5000
