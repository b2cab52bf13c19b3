"""Exact gradients of a document that is longer than what fits into memory, in chunks of its tokens.

    forward     c0 → c1 → c2       without a graph: keys and values of each chunk are kept
    backward    c2, c1, c0         each chunk runs again behind the keys and values before it, and
                                   its own get the gradients that later chunks have left for them

So memory holds the graph of one chunk, and keys and values of the document with their gradients,
each once: attention reads views of them. Every chunk but the last runs twice. A kernel over
boundaries sees a chunk as the last queries of a document; other attention gets a mask of the chunk
by all keys before it, in every layer.
The chain rule over chunks is that of truncated backpropagation through time, without truncation.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from trl_packing.attention.calls import Call, packed_way, use_current_row
from trl_packing.attention.flash_attn import is_flash_attention
from trl_packing.attention.install import use_native_attention
from trl_packing.attention.model_facts import (
    PACKED_NAMES,
    current_implementation,
    unwrap_model,
    unwrap_peft,
    without_checkpointing,
)
from trl_packing.attention.sequence_parallel import part_of_row
from trl_packing.documents.host_row import cache_values, host_row, to_device
from trl_packing.isolation.preserve import preserve_state
from trl_packing.isolation.probes import random_tokens
from trl_packing.loss.next_token import next_token_loss

_CHECKED, _CHUNK = 40, 16  # tokens of the document of the check, and of its chunks

_OF_BACKBONE = (
    "input_ids",
    "position_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
)


def is_longer(batch: Mapping[str, Any], num_tokens: int) -> bool:
    """Whether a packed row is one document of more than `num_tokens` tokens."""
    row = host_row(batch)
    return row is not None and len(row.lengths) == 1 and int(row.lengths[0]) > num_tokens


@dataclass(frozen=True)
class Chunks:
    """Trains documents in chunks of `num_tokens` tokens.

    Attributes:
        model: as a step calls it; it may be wrapped, not sharded.
        loss_of: returns the share of a chunk in the loss of the step.
        backward: of accelerate.
        without_sync: a block in which gradients stay on this rank.
        autocast: a block in the precision in which `model` runs, for calls of its backbone.
    """

    model: nn.Module
    num_tokens: int
    loss_of: Callable[[Call], Tensor]
    backward: Callable[[Tensor], None]
    without_sync: Callable[[], AbstractContextManager[None]]
    autocast: Callable[[], AbstractContextManager[None]] = nullcontext

    def train(self, batch: Mapping[str, Any], length: int) -> Tensor:
        """Add the gradients of a document to those of the model; return its share of the loss.

        `batch` holds ``(1, T)`` tensors, of which the first `length` tokens are the document.
        """
        base = unwrap_peft(unwrap_model(self.model))
        way, name = packed_way(base), current_implementation(base)
        by_kernel = name in PACKED_NAMES or is_flash_attention(name)
        by_kernel &= way is not None and way.run is not None and way.attention is None
        chunks = self._cut(batch, length, base.device, by_kernel)
        attention = nullcontext() if by_kernel else use_native_attention(base)
        with use_current_row(None), attention, without_checkpointing(base):
            cache = DynamicCache()
            cache.layer_class_to_replicate = partial(ChunkedLayer, length)
            randomness = self._forward(base, chunks, cache)
            total = torch.zeros((), device=base.device)
            for number in reversed(range(len(chunks))):
                with self.without_sync() if number else nullcontext():
                    total += self._step(chunks[number], number * self.num_tokens, cache)
                on_cpu, *on_device = randomness[number - 1]  # at the end, that of the last chunk
                torch.set_rng_state(on_cpu)
                for state in on_device:
                    torch.get_device_module(base.device).set_rng_state(state)
        return total

    def _cut(
        self, batch: Mapping[str, Any], length: int, device: torch.device, by_kernel: bool
    ) -> list[Call]:
        """Return the chunks, with boundaries of queries and keys for a kernel that reads them."""
        chunks = []
        for start in range(0, length, self.num_tokens):
            stop = min(start + self.num_tokens, length)
            chunk = part_of_row(batch, start, stop)
            seen = {"q": stop - start, "k": stop} if by_kernel else {}
            for of, tokens in seen.items():
                ends = np.array([0, tokens], dtype=np.int32)
                boundaries = to_device(ends, device)
                cache_values(boundaries, ends)
                chunk[f"cu_seq_lens_{of}"] = boundaries
                chunk[f"max_length_{of}"] = tokens
            chunks.append(chunk)
        return chunks

    def _forward(self, base: Any, chunks: list[Call], cache: DynamicCache) -> list[list[Tensor]]:
        """Fill the cache with all chunks but the last; return the random states before each."""
        randomness = []
        with torch.no_grad(), self.autocast():
            for number, chunk in enumerate(chunks):
                states = [torch.get_rng_state()]
                if base.device.type != "cpu":
                    states.append(torch.get_device_module(base.device).get_rng_state())
                randomness.append(states)
                if number < len(chunks) - 1:
                    tokens = {name: chunk[name] for name in _OF_BACKBONE if name in chunk}
                    behind = self._behind(cache, number * self.num_tokens)
                    base.base_model(**tokens, **behind)  # no logits
        return randomness

    def _step(self, chunk: Call, start: int, cache: DynamicCache) -> Tensor:
        """Run a chunk forward and backward; leave gradients of the keys and values before it."""
        loss = self.loss_of(chunk | self._behind(cache, start))
        self.backward(loss + sum(layer.zero for layer in cache.layers))
        return loss.detach()

    def _behind(self, cache: DynamicCache, start: int) -> Call:
        """Return the options of a call that runs the chunk from token `start` on."""
        for layer in cache.layers:
            layer.start = start
        return {cache_name(unwrap_peft(unwrap_model(self.model))): cache, "use_cache": True}


class ChunkedLayer(DynamicLayer):
    """Keys and values of a document of `length` tokens, and their gradients, in buffers.

    Attributes:
        start: of the chunk that runs.
        zero: keeps the loss of a chunk connected with its keys and values; 0 where there are none.
    """

    start = 0
    zero: Tensor | float = 0.0
    is_initialized: bool

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def get_seq_length(self) -> int:
        return self.start

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``(1, heads, T, dim)``, up to the end of the chunk."""
        if not self.is_initialized:
            buffers: list[Tensor] = []
            for states in (key_states, value_states):
                shape = (*states.shape[:-2], self.length, states.shape[-1])
                buffers += states.new_empty(shape), states.new_zeros(shape, dtype=torch.float32)
            self.keys, self.of_keys, self.values, self.of_values = buffers
            self.is_initialized = True
        keys, zero = _Behind.apply(key_states, self.keys, self.of_keys, self.start)
        values, other = _Behind.apply(value_states, self.values, self.of_values, self.start)
        self.zero = zero + other
        return keys, values


class _Behind(torch.autograd.Function):
    """Keys (or values) of a chunk behind those before it, whose gradients stay in a buffer.

    In the backward, those of the chunk are all that it and later chunks have left there. A chunk
    without trained tokens passes them on too: its loss depends on the second output, a zero.
    """

    @staticmethod
    def forward(ctx, own, kept, gradient, start):
        stop = start + own.shape[-2]
        ctx.gradient, ctx.own = gradient, slice(start, stop)
        kept[..., start:stop, :] = own
        return kept[..., :stop, :], own.new_zeros(())

    @staticmethod
    def backward(ctx, of_all, _):
        ctx.gradient[..., : ctx.own.stop, :] += of_all
        return ctx.gradient[..., ctx.own, :].to(of_all.dtype), None, None, None


def cache_name(base: nn.Module) -> str:
    """Return the name under which a model takes keys and values; transformers 5.24 changed it."""
    names = inspect.signature(type(base).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def check_chunks(model: nn.Module) -> None:
    """Raise RuntimeError unless chunks give the loss and the gradients of a document as a whole.

    Args:
        model: without wrappers of ranks. Its gradients are left as they were.
    """
    base = unwrap_peft(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in trained]
    drawn = random_tokens(base)(_CHECKED)
    ids = torch.from_numpy(drawn)[None].to(base.device)
    positions = torch.arange(len(drawn), device=base.device)[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions}

    def loss_of(chunk: Call) -> Tensor:
        labels = chunk.pop("labels")
        logits = model(**chunk).logits
        behind = torch.cat([logits, logits[:, -1:]], 1)[:, : labels.shape[1]]
        return next_token_loss(behind, labels, num_items=len(drawn) - 1)

    def take_gradients() -> list[Tensor]:
        found = [p.grad.float().flatten() for p in trained if p.grad is not None]
        for parameter in trained:
            parameter.grad = None
        return found

    chunks = Chunks(model, _CHUNK, loss_of, torch.Tensor.backward, nullcontext)
    name = type(base).__name__
    advice = "max_tokens_in_memory cannot train it; leave it out"
    try:
        with preserve_state(model, training=True):
            take_gradients()  # of the user, who gets them back
            with use_native_attention(base):
                whole = loss_of(dict(batch))
                whole.backward()
            loss = float(whole.detach())
            expected = torch.cat(take_gradients())
            other = float(chunks.train(batch, len(drawn)))
            found = torch.cat(take_gradients())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RuntimeError(f"{name} does not run in chunks ({problem}): {advice}") from error
    finally:
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
    allowed = max(1e-3, 8 * torch.finfo(next(base.parameters()).dtype).eps)
    off = float((found - expected).norm() / expected.norm())
    if not max(off, abs(other - loss)) <= allowed:
        raise RuntimeError(
            f"gradients of {name} in chunks are off by {off:.1%}, rounding allows {allowed:.1%}: "
            f"{advice}"
        )
