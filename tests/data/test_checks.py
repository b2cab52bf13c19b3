"""A fault of a data set is one sentence that names the row, the column and the way out."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.tiny import tiny_tokenizer

from trl_packing.data.checks import check_columns, check_ends, check_packed_rows

BAD_DATA = {
    "no column": (
        {"question": ["why"]},
        "the train dataset has no column to train on: it has ['question']; expected 'text', "
        "'messages', 'prompt' and 'completion', or 'input_ids' (or pass formatting_func)",
    ),
    "no completion": (
        {"prompt": ["why"], "answer": ["so"]},
        "the train dataset has a 'prompt' column but no 'completion' column: it has "
        "['prompt', 'answer']; rename the column that holds the answers to 'completion'",
    ),
    "short mask": (
        {"input_ids": [[1, 2], [1, 2, 3]], "completion_mask": [[0, 1], [0, 1]]},
        "document 1 of the train dataset has 3 input_ids but 2 entries in 'completion_mask'; "
        "give one per token",
    ),
    "long labels": (
        {"input_ids": [[1, 2]], "labels": [[1, 2, 3]]},
        "document 0 of the train dataset has 2 input_ids but 3 entries in 'labels'",
    ),
    "numbers with a fraction": (
        {"input_ids": [[1.0, 2.0]]},
        "column 'input_ids' holds list<item: double>, but tokens are lists of integers; convert it",
    ),
    "words": ({"input_ids": [["a", "b"]]}, "column 'input_ids' holds list<item: string>"),
    "too few weights": (
        {"input_ids": [[1, 2], [1, 2, 3]], "loss_weights": [[0.5, 1.0], [1.0]]},
        "document 1 of the train dataset has 3 input_ids but 1 entries in 'loss_weights'; "
        "give one per token",
    ),
    "words as weights": (
        {"input_ids": [[1]], "loss_weights": [["a"]]},
        "column 'loss_weights' holds list<item: string>, but weights are lists of numbers",
    ),
    "no lists": ({"input_ids": [1, 2]}, "column 'input_ids' holds int"),
    "missing row": (
        {"input_ids": [[1, 2], None]},
        "row 1 of the train dataset has no 'input_ids' (it is null); remove such rows",
    ),
    "missing token": (
        {"input_ids": [[1, None]]},
        "column 'input_ids' has a missing (null) token; remove such rows",
    ),
}


@pytest.mark.parametrize("bad", BAD_DATA)
def test_bad_columns_are_one_clear_sentence(bad):
    columns, sentence = BAD_DATA[bad]
    with pytest.raises(ValueError) as error:
        check_columns(Dataset.from_dict(columns), "train", "text")
    assert sentence in str(error.value)


def test_a_stream_without_a_completion_column_is_refused_before_it_is_read():
    rows = Dataset.from_dict({"prompt": ["why"]}).to_iterable_dataset()
    with pytest.raises(ValueError, match="no 'completion' column"):
        check_columns(rows, "train", "text")


@pytest.mark.parametrize(
    "columns",
    [
        {"text": ["a"]},
        {"messages": [[{"role": "user", "content": "a"}]]},
        {"conversations": [[{"from": "human", "value": "a"}]]},
        {"prompt": ["a"], "completion": ["b"]},
        {"input_ids": [[1, 2]], "assistant_masks": [[0, 1]]},
        {"input_ids": np.array([[1, 2]], dtype=np.int32)},
        {"input_ids": [[1, 2], []], "loss_weights": [[0.5, 1.0], []]},
        {"input_ids": [[1, 2]], "loss_weights": np.ones((1, 2), np.float32)},
    ],
)
def test_good_columns_pass(columns):
    check_columns(Dataset.from_dict(columns), "train", "text")


ROWS = [
    {"input_ids": [1, 2, 3], "seq_lengths": [2, 1]},
    {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [5]},
]


def test_rows_packed_before_must_fit_and_tell_their_lengths():
    rows = Dataset.from_list(ROWS)
    check_packed_rows(rows, 5, "train")
    check_packed_rows(rows, None, "train")
    with pytest.raises(ValueError, match=r"row 1 of the train .* is packed .* 5 tokens, but "):
        check_packed_rows(rows, 4, "train")
    wrong = Dataset.from_list([*ROWS, {"input_ids": [1, 2], "seq_lengths": [3]}])
    with pytest.raises(
        ValueError, match=r"row 2 .* holds 2 input_ids but its seq_lengths sum to 3"
    ):
        check_packed_rows(wrong, 5, "train")


def test_rows_packed_before_cannot_grow():
    rows = Dataset.from_list(ROWS)
    for packed in (rows, rows.to_iterable_dataset()):
        with pytest.raises(
            ValueError, match=r"append_eos=True, but the rows of the train .* packed already"
        ):
            check_packed_rows(packed, 5, "train", append_eos=True)


def test_plain_text_needs_an_eos_token():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token, so documents of the"):
        check_ends(Dataset.from_dict({"text": ["a"]}), tokenizer, "train")
    check_ends(Dataset.from_dict({"input_ids": [[1]]}), tokenizer, "train")
    check_ends(Dataset.from_dict({"text": ["a"]}), tiny_tokenizer(), "train")
