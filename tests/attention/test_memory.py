"""No backend allocates a T×T mask, and none a tensor of the size of one."""

import pytest
import torch
from helpers.memory import largest_allocation
from helpers.packed_models import packed_batch, packed_model
from helpers.tiny import tiny_model

from trl_packing.attention.document_sdpa import sdpa_by_document


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss"])
def test_no_mask_of_the_whole_row_is_allocated(name):
    """At T = 2,048 a mask has 2**22 entries, of a byte at least; the logits have 2.6 million."""
    batch, own = packed_batch([64] * 30 + [100, 28]), {"max_position_embeddings": 2048}
    assert batch["input_ids"].shape[1] == 2048

    def largest_in(model):
        return largest_allocation(lambda: model(**batch).logits.square().mean().backward())

    assert largest_in(tiny_model(name, **own)) >= 2048**2, "the model's own mask is there"
    assert largest_in(packed_model(name, **own)) < 2048**2


@pytest.mark.parametrize("window", [100, 1024])
def test_a_windowed_document_needs_no_mask_of_its_length_on_other_devices(window):
    """8,192 tokens: a mask is 64 MiB at least; a tile of 512 queries sees its window only."""
    q, k, v = (torch.randn(8192, 1, 8).requires_grad_() for _ in range(3))
    cu_seqlens = torch.tensor([0, 8192], dtype=torch.int32)

    def step():
        sdpa_by_document(q, k, v, cu_seqlens, 0.3, window).sum().backward()

    assert largest_allocation(step) < 8192**2 / 8
