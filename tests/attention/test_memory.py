"""No backend allocates a T×T mask, and none a tensor of the size of one."""

import pytest
import torch
from helpers.dense import LENGTHS, boundaries, inputs, with_keywords
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


def test_a_gpu_without_flash_attention_gets_what_its_fused_kernel_takes(monkeypatch):
    """A T4 has PyTorch's memory-efficient kernel, which takes no mask here and as many key heads as
    query heads (`use_mem_efficient_attention` in torch 2.13). Anything else falls back, without a
    message, to the kernel that writes and keeps every score of a document, for every head.
    """
    sdpa, calls = torch.nn.functional.scaled_dot_product_attention, []

    def record(query, key, value, **options):
        calls.append((query.shape, key.shape, value.shape, options))
        return sdpa(query, key, value, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    sdpa_by_document(*inputs(heads=4, kv_heads=2), boundaries(), 0.25, 0)
    assert [query[2] for query, *_ in calls] == [length for length in LENGTHS if length]
    for query, key, value, options in calls:
        assert query == key == value == (1, 4, query[2], 8)
        assert options == {"attn_mask": None, "is_causal": True, "scale": 0.25}


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


def test_no_difference_of_positions_is_made_on_a_cpu_either():
    q, k, v = (torch.randn(4096, 1, 8) for _ in range(3))
    cu_seqlens = torch.tensor([0, 4096], dtype=torch.int32)

    def forward():
        document_attention(q, k, v, cu_seqlens, scale=0.3, window=1024)

    assert largest_allocation(forward) <= 512 * (1024 + 512) * 4, "a tile's mask, in float32"


def test_scores_of_a_window_are_made_512_queries_at_a_time():
    """Soft-cap and dropout need them: a tile as long as the window would square it."""
    q, k, v = (torch.randn(4096, 4, 8) for _ in range(3))
    cu_seqlens = torch.tensor([0, 4096], dtype=torch.int32)

    def forward():
        document_attention(q, k, v, cu_seqlens, scale=0.3, window=2048, softcap=2.0)

    assert largest_allocation(forward) <= 4 * 512 * (2048 + 512) * 4, "four heads, in float32"


def test_tiles_on_other_devices_repeat_no_mask(monkeypatch):
    """PyTorch keeps a mask of its own for every call that it has to convert or to pad."""
    sdpa, biases = torch.nn.functional.scaled_dot_product_attention, []

    def record(query, key, value, *, attn_mask=None, **options):
        if attn_mask is not None:
            biases.append(attn_mask)
            assert attn_mask.dtype == query.dtype
            assert attn_mask.stride(0) % 8 == 0
            assert attn_mask.data_ptr() % 16 == key.data_ptr() % 16 == 0
            assert attn_mask.shape == (query.shape[2], key.shape[2])
        return sdpa(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    lengths = [3000, 700, 1500]
    q, k, v = (torch.randn(sum(lengths), 2, 8) for _ in range(3))
    sdpa_by_document(q, k, v, boundaries(lengths), 0.3, 600)
    assert len(biases) == 12, "tiles beyond the window"
    assert len({bias.untyped_storage().data_ptr() for bias in biases}) == 1
