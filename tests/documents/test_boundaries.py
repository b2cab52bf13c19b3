"""Facts about document boundaries, against a loop over documents that is obviously right."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import (
    block_diagonal_mask,
    cu_seqlens_from_lengths,
    document_ids_from_lengths,
    lengths_from_eos,
    position_ids_from_lengths,
)

EOS = 0
ROW = st.lists(st.integers(0, 5), min_size=1, max_size=6)
BATCH = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(st.integers(0, 5), min_size=n, max_size=n), min_size=1, max_size=4)
)


def slow_row(lengths: list[int], num_tokens: int) -> tuple[list[int], list[int]]:
    """Return (position_ids, document_ids) of one row, its padding a document with id -1."""
    owners = [document for document, length in enumerate(lengths) for _ in range(length)]
    owners += [-1] * (num_tokens - len(owners))
    return [owners[:t].count(owner) for t, owner in enumerate(owners)], owners


@given(BATCH, st.integers(0, 3))
def test_positions_ids_and_boundaries_are_those_of_the_loop(lengths, padding):
    num_tokens = max(map(sum, lengths)) + padding
    batch, row = torch.tensor(lengths), torch.tensor(lengths[0], dtype=torch.int32)
    for function, at in ((position_ids_from_lengths, 0), (document_ids_from_lengths, 1)):
        expected = [slow_row(row, num_tokens)[at] for row in lengths]
        assert function(batch, num_tokens=num_tokens).tolist() == expected
        assert function(row).dtype == torch.int64
        assert function(row).tolist() == slow_row(lengths[0], sum(lengths[0]))[at]
    cu_seqlens = cu_seqlens_from_lengths(batch[0])
    assert cu_seqlens.dtype == cu_seqlens_from_lengths(row).dtype == torch.int32
    assert cu_seqlens.tolist() == [0, *accumulate(lengths[0])]


def test_no_documents_give_no_tokens():
    none = torch.tensor([], dtype=torch.int64)
    assert cu_seqlens_from_lengths(none).tolist() == [0]
    for found in (position_ids_from_lengths(none), document_ids_from_lengths(none)):
        assert found.tolist() == lengths_from_eos(none, EOS).tolist() == []
    assert lengths_from_eos(none.reshape(2, 0), EOS).shape == (2, 0)
    assert position_ids_from_lengths(none.reshape(0, 3)).shape == (0, 0)
    assert block_diagonal_mask(none).shape == (0, 0)


ENDED_BY_EOS = [
    ([0, 5, 0, 7, 8], EOS, [1, 2, 2]),  # EOS also used as BOS; a last document without EOS
    ([5, 0, 0, 0, 0], EOS, [2, 3]),  # padded with EOS: the padding is a document of its own
    ([5, 0, 0, 6, 0], EOS, [2, 1, 2]),
    ([5, 8, 6, 9, 7], [8, 9], [2, 2, 1]),  # every EOS of a model
]


@pytest.mark.parametrize(("input_ids", "eos", "lengths"), ENDED_BY_EOS)
def test_an_eos_ends_its_document_and_a_run_of_them_is_one_more(input_ids, eos, lengths):
    found = lengths_from_eos(torch.tensor(input_ids, dtype=torch.int32), eos)
    assert (found.tolist(), found.dtype) == (lengths, torch.int64)


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=5))
def test_a_batch_has_the_lengths_of_each_row_filled_with_zeros(rows):
    alone = [lengths_from_eos(torch.tensor(row), EOS).tolist() for row in rows]
    width = max(map(len, alone))
    expected = [lengths + [0] * (width - len(lengths)) for lengths in alone]
    assert lengths_from_eos(torch.tensor(rows), EOS).tolist() == expected
    assert all(sum(lengths) == 7 for lengths in expected)


@settings(max_examples=50)
@given(ROW, st.integers(0, 2), st.booleans(), st.none() | st.integers(1, 4))
def test_a_token_sees_its_document_only_and_within_window(lengths, padding, causal, window):
    num_tokens = sum(lengths) + padding
    _, owners = slow_row(lengths, num_tokens)
    expected = [
        [
            owners[query] == owners[key]
            and (not causal or key <= query)
            and (window is None or abs(query - key) < window)
            for key in range(num_tokens)
        ]
        for query in range(num_tokens)
    ]
    row = torch.tensor(lengths)
    mask = block_diagonal_mask(row, num_tokens=num_tokens, causal=causal, window=window)
    assert mask.tolist() == expected
    batch = block_diagonal_mask(row[None], num_tokens=num_tokens, causal=causal, window=window)
    assert torch.equal(batch[0, 0], mask)


def test_a_float_mask_is_zero_where_attention_is_allowed_and_the_lowest_number_elsewhere():
    allowed = block_diagonal_mask(torch.tensor([[2, 1], [1, 0]]))
    mask = block_diagonal_mask(torch.tensor([[2, 1], [1, 0]]), dtype=torch.bfloat16)
    lowest = torch.finfo(torch.bfloat16).min
    assert torch.equal(mask, torch.where(allowed, 0.0, lowest).to(torch.bfloat16))


REFUSED = [
    (cu_seqlens_from_lengths, [1.0], {}, "integer tensor .* torch.float32"),
    (document_ids_from_lengths, [1, -2], {}, "not be negative, got -2"),
    (position_ids_from_lengths, [[[1]]], {}, r"of shape \(1, 1, 1\)"),
    (position_ids_from_lengths, [3, 2], {"num_tokens": 4}, "sum to 5 but num_tokens is 4"),
    (block_diagonal_mask, [3], {"window": 0}, "window must be at least 1"),
]


@pytest.mark.parametrize(("function", "given", "options", "words"), REFUSED)
def test_bad_input_is_refused_by_name(function, given, options, words):
    with pytest.raises(ValueError, match=words):
        function(torch.tensor(given), **options)
