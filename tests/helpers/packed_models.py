"""Tiny models with packed attention installed, rows for them, and the rows' documents alone."""

from contextlib import nullcontext

import torch

from helpers.flash_attn_double import pretend_cuda
from helpers.tiny import documents_of_lengths, tiny_model
from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention.install import install_attention


def packed_batch(lengths, seed=0):
    """Return a packed row of random documents, without labels."""
    batch = PackedCollator()(documents_of_lengths(lengths, seed=seed))
    del batch["labels"]
    return batch


def install(model, attention="auto", gpu=None):
    """Install attention by its name, and return `model`; with a `monkeypatch`, that of a GPU."""
    machine = {}
    with gpu.context() if gpu else nullcontext() as patch:
        if gpu:
            pretend_cuda(patch)
            machine = {"device": "cuda", "dtype": torch.bfloat16}
        install_attention(model, resolve_attention(model, attention, **machine))
    return model


def packed_model(name, fallback=None, **overrides):
    """Return a tiny model, loaded with attention `fallback`, that runs packed rows."""
    return install(tiny_model(name, attn_implementation=fallback, **overrides))


def alone(model, batch):
    """Return the logits of each document of a packed batch, run as an ordinary batch."""
    parts = batch["input_ids"].split(batch["cu_seq_lens_q"].diff().tolist(), 1)
    return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], 1)
