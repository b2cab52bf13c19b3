"""The model gets one flat row with document boundaries, and neither a mask nor a cache."""

import numpy as np
import pytest
import torch

from trl_packing import PackedCollator

TWO = [
    {"input_ids": [11, 12, 13, 14], "completion_mask": [0, 0, 1, 1]},
    {"input_ids": [21, 22, 23], "completion_mask": [0, 1, 1]},
]


def plain(batch) -> dict:
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def test_two_documents_become_exactly_this_batch():
    assert plain(PackedCollator()(TWO)) == {
        "input_ids": [[11, 12, 13, 14, 21, 22, 23]],
        "labels": [[-100, -100, 13, 14, -100, 22, 23]],
        "position_ids": [[0, 1, 2, 3, 0, 1, 2]],
        "cu_seq_lens_q": [0, 4, 7],
        "cu_seq_lens_k": [0, 4, 7],
        "max_length_q": 4,
        "max_length_k": 4,
        "seq_idx": [[0, 0, 0, 0, 1, 1, 1]],
        "use_cache": False,
    }


def test_padding_is_one_more_document_all_of_it_masked():
    batch = plain(PackedCollator(pad_token_id=9, pad_to_multiple_of=16)(TWO))
    assert batch["input_ids"] == [[11, 12, 13, 14, 21, 22, 23, *[9] * 9]]
    assert batch["cu_seq_lens_q"] == batch["cu_seq_lens_k"] == [0, 4, 7, 16]
    assert batch["position_ids"][0][7:] == list(range(9))
    assert batch["labels"][0][7:] == [-100] * 9


@pytest.mark.parametrize(("pad_to_multiple_of", "tokens"), [(None, 1), (8, 8)])
@pytest.mark.parametrize("rows", [[], [{"input_ids": [], "labels": []}]])
def test_an_empty_micro_batch_is_one_masked_document(rows, pad_to_multiple_of, tokens):
    batch = plain(PackedCollator(pad_token_id=9, pad_to_multiple_of=pad_to_multiple_of)(rows))
    assert batch["input_ids"] == [[9] * tokens]
    assert batch["labels"] == [[-100] * tokens]
    assert batch["cu_seq_lens_q"] == [0, tokens]
    assert batch["max_length_k"] == tokens


def test_rows_packed_before_keep_the_boundaries_in_seq_lengths():
    row = {"input_ids": [11, 12, 13, 21, 22], "labels": [11, 12, 13, 21, 22], "seq_lengths": [3, 2]}
    batch = plain(PackedCollator()([row, TWO[1]]))
    assert batch["cu_seq_lens_q"] == [0, 3, 5, 8]
    assert batch["position_ids"] == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert batch["labels"] == [[-100, 12, 13, -100, 22, -100, 22, 23]]


@pytest.mark.parametrize("convert", [np.array, np.int32, torch.tensor, torch.IntTensor, tuple])
def test_arrays_tensors_and_lists_give_the_same_batch(convert):
    rows = [*TWO, {"input_ids": [31, 32, 33], "labels": [-100, 32, 33], "seq_lengths": [2, 1]}]
    converted = [{name: convert(values) for name, values in row.items()} for row in rows]
    ours, expected = PackedCollator()(converted), PackedCollator()(rows)
    assert plain(ours) == plain(expected)
    assert ours["input_ids"].dtype == torch.int64


MISMATCHES = [
    ({"input_ids": [1.0, 2.0]}, "must be integers"),
    ({"completion_mask": [1, 1]}, "completion_mask has 2 entries but input_ids has 3"),
    ({"loss_weights": [1, 2, -3]}, r"loss_weights has -3\.0 at token 2; give finite numbers"),
    ({"seq_lengths": [2, 2]}, "row 1 has 3 tokens, and its seq_lengths sum to 4"),
]


@pytest.mark.parametrize(("row", "sentence"), MISMATCHES)
def test_what_does_not_match_input_ids_is_refused(row, sentence):
    with pytest.raises(ValueError, match=sentence):
        PackedCollator()([TWO[0], {"input_ids": [1, 2, 3], **row}])
