"""No backend allocates a T×T mask, and none a tensor of the size of one."""

import pytest
import torch
from helpers.dense import with_keywords
from helpers.memory import largest_allocation
from helpers.packed_models import packed_batch
from helpers.tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class LargestTensor(TorchDispatchMode):
    """Remember the bytes of the largest tensor that an operator makes, forward and backward."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return made


def largest_tensor(function):
    with LargestTensor() as largest:
        function()
    return largest.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [100, 1024])
def test_a_windowed_document_needs_no_mask_of_its_length_on_other_devices(window, dtype):
    """8,192 tokens: a difference of positions is 512 MiB, a mask in bf16 still 128 MiB."""
    length = 8192
    q, k, v = (torch.randn(length, 1, 8, dtype=dtype).requires_grad_() for _ in range(3))

    def step():
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
        sdpa_by_document(q, k, v, cu_seqlens, 0.3, window).float().sum().backward()

    # A tile of 512 queries sees its window, and itself.
    a_tile = 512 * (window + 512 + 8) * q.element_size()
    assert largest_tensor(step) <= max(a_tile, length * 8 * q.element_size())


def test_the_largest_tensor_is_seen():
    """The control: a mask of a whole document, made as it was."""

    def mask():
        positions = torch.arange(1024)
        return (positions[:, None] - positions[None]).abs() < 100

    assert largest_tensor(mask) == 1024 * 1024 * 8
