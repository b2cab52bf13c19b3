"""Divides a packed row over N ranks, which exchange heads for tokens around attention (Ulysses).

    row            a a a a a b b c c c .      padded by a masked document to a multiple of N
    labels         shifted and masked in the row as a whole, before it is divided
    rank 0, 1      a a a a a b | b c c c .    embeddings, projections, experts, loss: T/N tokens

    query          rank 0                        rank 1
    before         tokens 0 to 5,  heads 0 1     tokens 6 to 11, heads 0 1
    exchange         heads 0 stay, 1 go     ⇄      heads 1 stay, 0 go
    attention      tokens 0 to 11, head 0        tokens 0 to 11, head 1
    exchange, and back to                   ⇄
    after          tokens 0 to 5,  heads 0 1     tokens 6 to 11, heads 0 1

Attention sees the whole row with its boundaries, so every kernel over boundaries runs unchanged.
Source: https://arxiv.org/abs/2309.14509 (DeepSpeed Ulysses).

T tokens of the row, t = T / N tokens of a rank, H heads, h = H / N heads of a rank, D head_dim.
"""

import functools
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from trl_packing.documents.host_row import host_values
from trl_packing.documents.labels import IGNORE_INDEX, SOURCE_IDS, TOKEN_WEIGHTS

# --- rows -------------------------------------------------------------------------------------

# What each token has, and what its successor has, which it predicts.
_OF_TOKENS = ("input_ids", "position_ids", "seq_idx")
_OF_TARGETS = {"labels": IGNORE_INDEX, TOKEN_WEIGHTS: 1.0, SOURCE_IDS: -1}


def share_of_rank(batch: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return the tokens ``(1, t)`` of a rank, and their t targets behind one that is masked.

    The boundaries stay those of the row ``(1, T)``; ValueError if T is no multiple of `size`.

    Examples:
        >>> row = {"input_ids": torch.arange(4)[None], "labels": torch.arange(4)[None]}
        >>> [share_of_rank(row, rank, 2)["labels"].tolist() for rank in range(2)]
        [[[-100, 1, 2]], [[-100, 3, -100]]]
    """
    length, rest = divmod(batch["input_ids"].shape[1], size)
    if rest:
        raise ValueError(
            f"a row of {length * size + rest} tokens cannot be divided over {size} ranks; set "
            f"pad_to_multiple_of={size}"
        )
    return batch | part_of_row(batch, rank * length, (rank + 1) * length)


def part_of_row(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    """Return what tokens ``[start, stop)`` of a row have, and their targets behind a masked one."""
    part = {}
    for name in batch.keys() & {*_OF_TOKENS}:
        part[name] = batch[name][:, start:stop].clone()
    for name in batch.keys() & _OF_TARGETS.keys():
        behind = pad(batch[name], (0, 1), value=_OF_TARGETS[name])  # the last predicts nothing
        part[name] = behind[:, start : stop + 1].clone()
    part["labels"][:, 0] = IGNORE_INDEX  # of the last token before
    return part


def num_shares(tokens: int, cu_seqlens: Tensor | None) -> int:
    """Return over how many ranks a row with these boundaries is divided, of which one has `tokens`.

    1 if it is not divided, or no packed row.
    """
    if cu_seqlens is None:
        return 1
    return max(int(host_values(cu_seqlens)[-1]) // max(tokens, 1), 1)


# --- ranks ------------------------------------------------------------------------------------


def group_of_row(size: int) -> Any:
    """Return the process group of the `size` ranks that share the rows of this rank.

    All ranks make it at its first use, together.
    """
    return _group_of_row(size, dist.group.WORLD)


@functools.lru_cache(maxsize=4)
def _group_of_row(size: int, _world: Any) -> Any:
    return dist.new_subgroups(group_size=size)[0]


# Seconds after which a rank that waits raises RuntimeError, because another may have failed; None
# waits as long as the process group does.
patience: float | None = None


class _Exchange(torch.autograd.Function):
    """Send part i of the first dimension to rank i; received parts are in the order of ranks.

    Parts are equal, so the exchange of the gradients is the same.
    """

    @staticmethod
    def forward(ctx, parts, group):
        ctx.group = group
        received = torch.empty_like(parts)
        if patience is None:
            dist.all_to_all_single(received, parts, group=group)
        else:
            work = dist.all_to_all_single(received, parts, group=group, async_op=True)
            work.wait(timedelta(seconds=patience))
        return received

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad.contiguous(), ctx.group), None


def gather_row(share: Tensor, size: int) -> Tensor:
    """Return the values ``(1, T, ...)`` of the row, of which each rank passes its ``(1, t, ...)``.

    A rank gets the gradients that its values have on all ranks.
    """
    same_for_all = share.expand(size, *share.shape[1:]).contiguous()
    return _Exchange.apply(same_for_all, group_of_row(size)).flatten(0, 1)[None]


# --- attention --------------------------------------------------------------------------------


def exchanging(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for divided rows, given one for whole rows, or such a one.

    Calls on rows that are not divided, and those without boundaries, do not change.
    """
    if hasattr(function, "of_whole_rows"):
        return function

    @functools.wraps(function)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        size = num_shares(query.shape[2], kwargs.get("cu_seq_lens_q"))
        if size == 1:
            return function(module, query, key, value, *args, **kwargs)
        group = group_of_row(size)
        # Fewer key heads than ranks are repeated; each rank then has the one of its query heads.
        times = size // gcd(key.shape[1], size)
        query = _exchanged(query, group, size)
        key = _exchanged(key.repeat_interleave(times, 1), group, size)
        value = _exchanged(value.repeat_interleave(times, 1), group, size)
        if kwargs.get("s_aux") is not None:  # a sink for each head
            kwargs["s_aux"] = kwargs["s_aux"].chunk(size)[dist.get_rank(group)]
        output, weights = function(module, query, key, value, *args, **kwargs)
        return _exchanged(output, group, size), weights

    attention.of_whole_rows = function  # type: ignore[attr-defined]
    return attention


def _exchanged(states: Tensor, group: Any, size: int) -> Tensor:
    """Return ``(1, h, T, D)`` given ``(1, H, t, D)``, and ``(1, t, H, D)`` given ``(1, T, h, D)``.

    The first dimension is divided over the ranks, and the second one is whole afterwards.
    """
    parts = states.squeeze(0).unflatten(0, (size, -1))
    received = _Exchange.apply(parts.contiguous(), group)
    return received.transpose(0, 1).flatten(1, 2)[None]
