"""Facts about document boundaries, against a loop over documents that is obviously right."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.documents.boundaries import (
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


@given(ROW)
def test_a_row_has_the_positions_and_ids_of_its_documents(lengths):
    row = torch.tensor(lengths)
    position_ids, document_ids = slow_row(lengths, sum(lengths))
    assert position_ids_from_lengths(row).tolist() == position_ids
    assert document_ids_from_lengths(row).tolist() == document_ids


@given(BATCH, st.integers(0, 3))
def test_a_batch_has_the_positions_and_ids_of_each_row(lengths, padding):
    num_tokens = max(map(sum, lengths)) + padding
    expected = [slow_row(row, num_tokens) for row in lengths]
    batch = torch.tensor(lengths)
    found = position_ids_from_lengths(batch, num_tokens=num_tokens)
    assert found.tolist() == [position_ids for position_ids, _ in expected]
    found = document_ids_from_lengths(batch, num_tokens=num_tokens)
    assert found.tolist() == [document_ids for _, document_ids in expected]


@given(ROW)
def test_cu_seqlens_bound_each_document(lengths):
    cu_seqlens = cu_seqlens_from_lengths(torch.tensor(lengths))
    assert cu_seqlens.dtype == torch.int32
    assert (cu_seqlens[0], cu_seqlens[-1]) == (0, sum(lengths))
    assert cu_seqlens.diff().tolist() == lengths


def test_dtypes_are_those_that_models_and_kernels_expect():
    lengths = torch.tensor([2, 1], dtype=torch.int32)
    assert cu_seqlens_from_lengths(lengths).dtype == torch.int32
    assert position_ids_from_lengths(lengths).dtype == torch.int64
    assert document_ids_from_lengths(lengths).dtype == torch.int64
    assert lengths_from_eos(torch.tensor([1, 0], dtype=torch.int32), EOS).dtype == torch.int64


def test_no_documents_give_no_tokens():
    none = torch.tensor([], dtype=torch.int64)
    assert cu_seqlens_from_lengths(none).tolist() == [0]
    assert position_ids_from_lengths(none).tolist() == []
    assert document_ids_from_lengths(none).tolist() == []
    assert lengths_from_eos(none, EOS).tolist() == []
    assert lengths_from_eos(none.reshape(2, 0), EOS).shape == (2, 0)
    assert position_ids_from_lengths(none.reshape(0, 3)).shape == (0, 0)
    assert block_diagonal_mask(none).shape == (0, 0)


@pytest.mark.parametrize(
    ("input_ids", "lengths"),
    [
        ([5, 6, 0, 7, 0], [3, 2]),
        ([5, 6, 0, 7, 8], [3, 2]),  # a last document without EOS
        ([5, 6, 7], [3]),
        ([0, 5, 0], [1, 2]),  # EOS also used as BOS
        ([5, 0, 0, 0, 0], [2, 3]),  # padded with EOS: the padding is one document of its own
        ([5, 0, 0, 6, 0], [2, 1, 2]),
        ([0], [1]),
        ([0, 0, 0], [1, 2]),
    ],
)
def test_an_eos_ends_its_document_and_a_run_of_them_is_one_more(input_ids, lengths):
    assert lengths_from_eos(torch.tensor(input_ids), EOS).tolist() == lengths


@given(st.lists(st.lists(st.integers(0, 2), min_size=7, max_size=7), min_size=1, max_size=5))
def test_a_batch_has_the_lengths_of_each_row_filled_with_zeros(rows):
    alone = [lengths_from_eos(torch.tensor(row), EOS).tolist() for row in rows]
    width = max(map(len, alone))
    expected = [lengths + [0] * (width - len(lengths)) for lengths in alone]
    assert lengths_from_eos(torch.tensor(rows), EOS).tolist() == expected
    assert all(sum(lengths) == 7 for lengths in expected)


def test_every_eos_id_of_a_model_ends_a_document():
    assert lengths_from_eos(torch.tensor([5, 8, 6, 9, 7]), [8, 9]).tolist() == [2, 2, 1]


@settings(max_examples=50)
@given(
    lengths=ROW,
    padding=st.integers(0, 2),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 4)),
)
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
    lengths = torch.tensor([[2, 1], [1, 0]])
    allowed = block_diagonal_mask(lengths)
    for dtype in (torch.float32, torch.bfloat16):
        mask = block_diagonal_mask(lengths, dtype=dtype)
        assert mask.dtype == dtype
        assert mask[allowed].eq(0).all()
        assert mask[~allowed].eq(torch.finfo(dtype).min).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cu_seqlens_from_lengths(torch.tensor([1.0])), "integer tensor .* torch.float32"),
        (lambda: position_ids_from_lengths(torch.tensor([True])), "torch.bool"),
        (lambda: document_ids_from_lengths(torch.tensor([1, -2])), "not be negative, got -2"),
        (lambda: position_ids_from_lengths(torch.tensor(3)), r"of shape \(\)"),
        (lambda: position_ids_from_lengths(torch.ones(1, 1, 1).long()), r"of shape \(1, 1, 1\)"),
        (
            lambda: position_ids_from_lengths(torch.tensor([3, 2]), num_tokens=4),
            "sum to 5 but num_tokens is 4",
        ),
        (lambda: lengths_from_eos(torch.tensor([1.0]), EOS), "input_ids must be an integer tensor"),
        (lambda: block_diagonal_mask(torch.tensor([3]), window=0), "window must be at least 1"),
        (lambda: block_diagonal_mask(torch.tensor([3]), dtype=torch.int32), "a float type"),
    ],
)
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
