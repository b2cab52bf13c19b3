"""No backend allocates a T×T mask, and none a tensor of the size of one."""

import pytest
import torch
from helpers.dense import with_keywords
from helpers.memory import largest_allocation
from helpers.packed_models import packed_batch
from helpers.tiny import tiny_model

from trl_packing import resolve_attention
from trl_packing.attention import document_sdpa
from trl_packing.attention.document_sdpa import sdpa_by_document
from trl_packing.attention.install import install_attention

document_attention = with_keywords(document_sdpa.document_attention)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_no_mask_of_the_whole_row_is_allocated(name):
    """At T = 2,048 a mask has 2**22 entries, of a byte at least; the logits have 2.6 million."""
    model = tiny_model(name, max_position_embeddings=2048)
    batch = packed_batch([64] * 30 + [100, 28])
    num_tokens = batch["input_ids"].shape[1]
    assert num_tokens == 2048

    def step():
        model(**batch).logits.square().mean().backward()

    assert largest_allocation(step) >= num_tokens**2, "the model's own mask is there"
    install_attention(model, resolve_attention(model))
    assert largest_allocation(step) < num_tokens**2


@pytest.mark.parametrize("window", [100, 1024])
def test_a_windowed_document_needs_no_mask_of_its_length_on_other_devices(window):
    """8,192 tokens: a mask is 64 MiB at least; a tile of 512 queries sees its window only."""
    q, k, v = (torch.randn(8192, 1, 8).requires_grad_() for _ in range(3))

    def step():
        cu_seqlens = torch.tensor([0, 8192], dtype=torch.int32)
        sdpa_by_document(q, k, v, cu_seqlens, 0.3, window).sum().backward()

    assert largest_allocation(step) < 8192**2 / 8
