"""Document boundaries of a packed row, in the four forms that kernels take.

    seq_lengths    [3, 2, 4]                      N documents of a row, or (B, N), zeros behind
    cu_seqlens     [0, 3, 5, 9]                   (N + 1,) int32, for varlen kernels
    position_ids   [0 1 2, 0 1, 0 1 2 3]          (T,) int64, restart at every document
    document_ids   [0 0 0, 1 1, 2 2 2 2]          (T,) int64, equal iff same document

Tokens after the documents of a row are padding, a document with id -1 that attends to itself: no
row of a mask is empty (softmax over none is NaN). Empty documents count, so ids index the lengths.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def cu_seqlens_from_lengths(seq_lengths: Tensor) -> Tensor:
    """Return document boundaries ``(N + 1,)`` int32, starting at 0 and ending at T.

    Args:
        seq_lengths: tokens of each document, ``(N,)`` or ``(B, N)`` integers of at least 0.

    Examples:
        >>> cu_seqlens_from_lengths(torch.tensor([3, 2, 4])).tolist()
        [0, 3, 5, 9]
    """
    ends = _checked_lengths(seq_lengths).cumsum(-1, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def position_ids_from_lengths(seq_lengths: Tensor, *, num_tokens: int | None = None) -> Tensor:
    """Return each token's offset in its document: ``(T,)`` or ``(B, T)`` int64.

    Args:
        seq_lengths: tokens of each document, ``(N,)`` or ``(B, N)`` integers.
        num_tokens: T, if rows end with padding; None for the tokens of the longest row.

    Raises:
        ValueError: lengths are not integers, are negative, or sum to more than `num_tokens`.

    Examples:
        >>> position_ids_from_lengths(torch.tensor([[3, 2], [4, 0]])).tolist()
        [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    """
    lengths = _with_padding(seq_lengths, num_tokens)
    starts = _repeat_by_token(lengths.cumsum(-1) - lengths, lengths)
    return torch.arange(starts.shape[-1], device=starts.device) - starts


def document_ids_from_lengths(seq_lengths: Tensor, *, num_tokens: int | None = None) -> Tensor:
    """Return the index of each token's document: ``(T,)`` or ``(B, T)`` int64, -1 on padding.

    Args:
        seq_lengths: as in `position_ids_from_lengths`, which raises the same errors.
        num_tokens: T, if rows end with padding.

    Examples:
        >>> document_ids_from_lengths(torch.tensor([[3, 2], [4, 0]])).tolist()
        [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    """
    lengths = _with_padding(seq_lengths, num_tokens)
    ids = torch.arange(lengths.shape[-1], device=lengths.device)
    ids[-1] = -1
    return _repeat_by_token(ids.expand_as(lengths), lengths)


def lengths_from_eos(input_ids: Tensor, eos_token_id: int | Sequence[int]) -> Tensor:
    """Return the lengths of documents that end with EOS: ``(N,)``, or ``(B, N)`` int64 with zeros.

    The tokens after the last EOS are a document, and so are further EOS tokens directly after one
    (a row padded with EOS). The lengths of a row sum to T.

    Args:
        input_ids: ``(T,)`` or ``(B, T)`` integers, else ValueError.
        eos_token_id: one id, or several.

    Examples:
        >>> batch = torch.tensor([[5, 6, 0, 7, 8, 9, 0], [5, 0, 6, 0, 0, 0, 0]])
        >>> lengths_from_eos(batch, 0).tolist()
        [[3, 4, 0], [2, 2, 3]]
    """
    _check_integers("input_ids", input_ids)
    rows = torch.atleast_2d(input_ids)
    is_eos = torch.isin(rows, torch.as_tensor(eos_token_id, device=rows.device))
    before = torch.nn.functional.pad(is_eos[:, :-1], (1, 0), value=False)
    after = torch.nn.functional.pad(is_eos[:, 1:], (0, 1), value=False)
    ends = (is_eos & ~(before & after)).long()  # the first EOS of a run, and the last
    document = ends.cumsum(-1) - ends  # of each token
    number = int(document.max()) + 1 if document.numel() else 0
    lengths = document.new_zeros(len(rows), number)
    lengths.scatter_add_(1, document, torch.ones_like(document))
    return lengths.reshape(*input_ids.shape[:-1], number)


def block_diagonal_mask(
    seq_lengths: Tensor,
    *,
    num_tokens: int | None = None,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.bool,
) -> Tensor:
    """Return the attention mask of documents: ``(T, T)``, or ``(B, 1, T, T)``, as [query, key].

    Args:
        seq_lengths: as in `position_ids_from_lengths`, like `num_tokens`.
        num_tokens: T, or None.
        causal: whether a token attends only to itself and to earlier tokens.
        window: a token attends only to keys less than `window` positions away; None for all.
        dtype: bool for True where attention is allowed, or a float type for a mask that is added to
            the scores: 0 where attention is allowed, and the lowest number of the type elsewhere.

    Examples:
        >>> block_diagonal_mask(torch.tensor([2, 1])).int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    ids = document_ids_from_lengths(seq_lengths, num_tokens=num_tokens)
    return mask_from_document_ids(ids, causal=causal, window=window, dtype=dtype)


def mask_from_document_ids(
    ids: Tensor, *, causal: bool = True, window: int | None = None, dtype: torch.dtype = torch.bool
) -> Tensor:
    """Return the mask of `block_diagonal_mask`, given `document_ids` ``(T,)`` or ``(B, T)``."""
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}; pass None for no window")
    allowed = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    token = torch.arange(ids.shape[-1], device=ids.device)
    distance = token.unsqueeze(-1) - token  # in the row, because documents are contiguous
    if causal:
        allowed &= distance >= 0
    if window is not None:
        allowed &= distance.abs() < window
    if ids.dim() == 2:
        allowed = allowed.unsqueeze(1)
    if dtype == torch.bool:
        return allowed
    lowest = torch.finfo(dtype).min  # TypeError for integers
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, lowest)


def _check_integers(name: str, values: Tensor) -> None:
    if values.dtype not in _INTEGERS or values.dim() not in (1, 2):
        given = f"{values.dtype} of shape {tuple(values.shape)}"
        raise ValueError(f"{name} must be an integer tensor (1-D or 2-D), got {given}")


def _checked_lengths(seq_lengths: Tensor) -> Tensor:
    _check_integers("seq_lengths", seq_lengths)
    if (seq_lengths < 0).any():
        raise ValueError(f"seq_lengths must not be negative, got {int(seq_lengths.min())}")
    return seq_lengths.long()


def _with_padding(seq_lengths: Tensor, num_tokens: int | None) -> Tensor:
    """Return lengths with the padding as an additional document, so that every row sums to T."""
    lengths = _checked_lengths(seq_lengths)
    used = lengths.sum(-1, keepdim=True)
    longest = int(used.max()) if used.numel() else 0
    if num_tokens is not None and num_tokens < longest:
        raise ValueError(f"seq_lengths sum to {longest} but num_tokens is {num_tokens}; raise it")
    return torch.cat([lengths, (longest if num_tokens is None else num_tokens) - used], dim=-1)


def _repeat_by_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeat each document's value over its tokens; every row of `lengths` sums to the same T."""
    if values.device.type == "cpu":
        # torch.repeat_interleave would wake a thread pool: 12 ms a call on busy cores.
        flat = torch.from_numpy(np.repeat(values.flatten().numpy(), lengths.flatten().numpy()))
    else:
        flat = torch.repeat_interleave(values.flatten(), lengths.flatten())
    num_rows = lengths[..., 0].numel()
    return flat.reshape(*lengths.shape[:-1], flat.numel() // max(num_rows, 1))


def lengths_from_numbers(numbers: np.ndarray) -> np.ndarray:
    """Return the lengths ``(N,)`` of documents, given the number ``(T,)`` of each token's document.

    Neighbors with the same number are one document, also for number 0 (padding).
    """
    ends = np.append(np.flatnonzero(np.diff(numbers)) + 1, len(numbers))
    return np.diff(ends, prepend=0)


def boundaries_of_row(seq_lengths: torch.Tensor, longest: int = 0) -> dict[str, Any]:
    """Return the keys of a packed batch that describe the boundaries of its row, ``(N,)`` lengths.

    `longest` is a lower bound of ``max_length_q/k``, so that it stays constant between rows.
    """
    cu_seqlens = cu_seqlens_from_lengths(seq_lengths)
    longest = max(longest, int(seq_lengths.max()))
    seq_lengths = seq_lengths[seq_lengths > 0]
    return {
        "position_ids": position_ids_from_lengths(seq_lengths)[None],
        # Without these, the model derives boundaries in every layer, with a synchronization each.
        "cu_seq_lens_q": cu_seqlens,
        # One object under two names: torch.compile (2.13) fails with a KeyError where an earlier
        # row had keys that this one lacks, such as `key_index`.
        "cu_seq_lens_k": cu_seqlens.clone(),
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": document_ids_from_lengths(seq_lengths).to(torch.int32)[None],
        "use_cache": False,
    }
