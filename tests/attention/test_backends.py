"""Packed attention: right numbers, right arguments, no T×T mask, and nothing else changed.

Tolerances, float32: the references run in float64, so what is left is the rounding of one kernel:
2**-24 = 6e-8 of values of size 1 to 10, over sums of at most 40 keys × 16 dimensions, far below
1e-5. bf16 keeps 8 bits, so its outputs round at 2**-8 of a value. Whole models: as test_exact.py.
"""

import copy
import inspect
import logging
import math
import sys
import warnings

import pytest
import torch
import torch.nn.attention.varlen
from helpers.dense import dense_attention, probabilities, visible
from helpers.tiny import PACKED_MODELS, WINDOW, documents_of_lengths, tiny_model, tiny_vlm
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention import document_sdpa, flash_attn
from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.backends import AttentionChoice, install_attention
from trl_packing.attention.document_sdpa import _sdpa_with_autograd, document_attention
from trl_packing.attention.varlen import varlen_attention
from trl_packing.isolation.fallback import with_fallbacks

TOLERANCE = 1e-5

# Two documents without tokens, one of a single token, and one longer than every window below.
LENGTHS = (5, 1, 0, 30, 2, 0, 3)
NUM_TOKENS = sum(LENGTHS)


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def inputs(heads=4, kv_heads=2, head_dim=8, value_dim=8, dtype=torch.float32):
    return [
        torch.randn(NUM_TOKENS, h, d).to(dtype).requires_grad_()
        for h, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    ]


def outcome(attention, tensors, upstream, **options):
    """Return the output and the gradient of every tensor in `tensors` and of the sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    given = dict(options)
    if options.get("sinks") is not None:
        given["sinks"] = options["sinks"].detach().to(tensors[0].dtype).clone().requires_grad_()
        leaves.append(given["sinks"])
    output = attention(*leaves[:3], boundaries(), **given)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_equals_dense(attention, tensors, tolerance=TOLERANCE, **options):
    upstream = torch.randn(NUM_TOKENS, tensors[0].shape[1], tensors[2].shape[2])
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(tensors[0].shape[1])
    ours = outcome(attention, tensors, upstream, scale=0.4, **options)
    reference = outcome(
        dense_attention, [x.double() for x in tensors], upstream.double(), scale=0.4, **options
    )
    for got, expected in zip(ours, reference, strict=True):
        size = 1 + expected.abs().max().item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * size)


# --- document-wise attention ------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window shorter than documents": {"window": 4},
    "window longer than documents": {"window": 64},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "softcap, window": {"softcap": 2.0, "window": 4},
    "sinks, window": {"sinks": True, "window": 4},
    "softcap, sinks, window": {"softcap": 2.0, "sinks": True, "window": 7},
}
SHAPES = {
    "one key head a query head": {"kv_heads": 4},
    "grouped": {},
    "multi-query": {"kv_heads": 1},
    "narrow values": {"value_dim": 6},
    "wide values": {"value_dim": 12},
}


@pytest.mark.parametrize("block", [512, 4], ids=["one tile", "tiles of 4"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_document_attention_equals_dense_attention(options, block, monkeypatch):
    monkeypatch.setattr(document_sdpa, "_BLOCK", block)
    assert_equals_dense(document_attention, inputs(), **options)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_are_grouped_and_values_have_their_own_width(shape, options):
    assert_equals_dense(document_attention, inputs(**shape), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_document_attention_in_bf16_is_as_close_as_bf16_allows(options):
    tensors = inputs(dtype=torch.bfloat16)
    assert_equals_dense(document_attention, tensors, tolerance=4 * 2**-8, **options)


def test_the_comparison_sees_a_missing_boundary():
    def without_boundaries(query, key, value, cu_seqlens, **options):
        return document_attention(query, key, value, cu_seqlens[[0, -1]], **options)

    with pytest.raises(AssertionError):
        assert_equals_dense(without_boundaries, inputs())


def test_inputs_need_not_be_contiguous():
    """Models hand over ``(heads, T, head_dim)`` transposed, and slices of a fused projection."""

    def strided(query, key, value, cu_seqlens, **options):
        fused = torch.cat([query, key, value], 1).transpose(0, 1).contiguous().transpose(0, 1)
        parts = fused.split([query.shape[1], key.shape[1], value.shape[1]], 1)
        assert not any(x.is_contiguous() for x in parts)
        return document_attention(*parts, cu_seqlens, **options)

    for options in ({}, {"window": 4}, {"softcap": 2.0}):
        assert_equals_dense(strided, inputs(), **options)


def test_an_upstream_gradient_need_not_be_contiguous():
    tensors = inputs()
    upstream = torch.randn(8, 4, NUM_TOKENS).transpose(0, 2)
    ours = outcome(document_attention, tensors, upstream, scale=0.4)
    same = outcome(document_attention, tensors, upstream.contiguous(), scale=0.4)
    for got, expected in zip(ours, same, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("block", [512, 4, 3], ids=["one tile", "tiles of 4", "tiles of 3"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 9, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_variant_for_other_devices_equals_dense_attention(shape, window, block, monkeypatch):
    monkeypatch.setattr(document_sdpa, "_BLOCK", block)

    def attention(query, key, value, cu_seqlens, *, scale, window=None):
        return _sdpa_with_autograd(query, key, value, cu_seqlens, scale, window or 0)

    assert_equals_dense(attention, inputs(**shape), window=window)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_on_other_devices_equal_dense_attention(options, monkeypatch):
    """There every tile goes through its scores, in float32: CPU's fused kernel is CPU's."""
    monkeypatch.setattr(document_sdpa, "_needs_scores", lambda query, options: True)
    monkeypatch.setattr(document_sdpa, "_BLOCK", 4)
    assert_equals_dense(document_attention, inputs(), **options)


def test_autocast_leaves_scores_in_float32():
    tensors = inputs()
    plain = document_attention(*tensors, boundaries(), scale=0.4, softcap=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = document_attention(*tensors, boundaries(), scale=0.4, softcap=2.0)
    assert torch.equal(plain, under_autocast)


# --- dropout ---------------------------------------------------------------------------------

DROPOUT = 0.25


def dropout_attention(query, key, value, cu_seqlens, **options):
    torch.manual_seed(11)
    return document_attention(query, key, value, cu_seqlens, dropout=DROPOUT, **options)


def kept_weights(query, key, **options):
    """Return what dropout multiplies each weight with: one-hot values make the weights visible."""
    one_hot = torch.eye(NUM_TOKENS)[:, None].expand(-1, key.shape[1], -1)
    weights = dropout_attention(query, key, one_hot, boundaries(), **options).transpose(0, 1)
    undropped = probabilities(query, key, boundaries(), **options)
    return torch.where(undropped > 0, weights / undropped, 0).detach(), undropped > 0


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"sinks": True}, {"softcap": 2.0}], ids=str)
def test_dropout_drops_the_same_weights_forward_and_backward(options, monkeypatch):
    monkeypatch.setattr(document_sdpa, "_BLOCK", 8)
    tensors = inputs()
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    kept, seen = kept_weights(*tensors[:2], scale=0.4, **options)

    def dense_with_dropout(query, key, value, cu_seqlens, **options):
        weights = probabilities(query, key, cu_seqlens, **options) * kept
        return torch.einsum("hqk,khd->hqd", weights, value.repeat_interleave(2, 1)).transpose(0, 1)

    upstream = torch.randn(NUM_TOKENS, 4, 8)
    ours = outcome(dropout_attention, tensors, upstream, scale=0.4, **options)
    doubles = [x.double() for x in tensors]
    expected = outcome(dense_with_dropout, doubles, upstream.double(), scale=0.4, **options)
    for got, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=0, atol=2 * TOLERANCE)
    # Weights are kept at 1 / (1 - p) or dropped, a share p of them: 3 sigma of 2,000 draws is 0.03.
    values = kept[seen]
    assert ((values == 0) | ((values - 1 / (1 - DROPOUT)).abs() < 1e-4)).all()
    assert (values == 0).float().mean().item() == pytest.approx(DROPOUT, abs=0.05)


def test_dropout_gradient_equals_finite_differences():
    """Central differences along a random direction, in float64 but for the scores: 1e-3 of it."""
    tensors = [x.detach().double() for x in inputs()]
    direction = [torch.randn_like(x) for x in tensors]
    upstream = torch.randn(NUM_TOKENS, 4, 8, dtype=torch.float64)

    def loss(step):
        moved = [x + step * d for x, d in zip(tensors, direction, strict=True)]
        return (dropout_attention(*moved, boundaries(), scale=0.4) * upstream).sum().item()

    gradients = outcome(dropout_attention, tensors, upstream, scale=0.4)[1:]
    slope = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    assert (loss(1e-2) - loss(-1e-2)) / 2e-2 == pytest.approx(slope, rel=1e-2)


def test_every_call_drops_other_weights_eager_and_compiled():
    tensors = inputs()

    def attention(query, key, value):
        return document_attention(query, key, value, boundaries(), scale=0.4, dropout=DROPOUT)

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for function in (attention, compiled):
        assert not torch.equal(function(*tensors), function(*tensors))


# --- the custom op ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        (None, None, 0.4, 0, 0.0, 0.0),
        ("sinks", None, 0.4, 4, 2.0, 0.0),
        (None, 5, 0.4, 0, 0.0, 0.1),
    ],
    ids=["plain", "sinks, window, softcap", "dropout"],
)
def test_the_op_keeps_the_contract_of_custom_ops(options):
    sinks, seed, *rest = options
    sinks = torch.randn(4, requires_grad=True) if sinks else None
    seed = None if seed is None else torch.tensor(seed)
    arguments = (*inputs(), boundaries(), sinks, seed, *rest)
    torch.library.opcheck(torch.ops.trl_packing.document_attention.default, arguments)


def test_compiled_models_compute_the_same_and_settle_on_their_graphs():
    model = packed_model("llama")
    num_graphs = 0

    def count(graph, example_inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for number, lengths in enumerate([(5, 9, 3), (4, 4), (7, 2, 2, 6), (11, 1)]):
        batch = packed_batch(lengths)
        torch.testing.assert_close(
            compiled(**batch).logits, model(**batch).logits, rtol=0, atol=TOLERANCE
        )
        if number == 1:
            settled = num_graphs
    assert num_graphs == settled <= 2, "the second batch made lengths dynamic; later ones reuse it"


# --- whole models ----------------------------------------------------------------------------


def packed_batch(lengths, seed=0):
    batch = PackedCollator()(documents_of_lengths(lengths, seed=seed))
    del batch["labels"]
    return batch


def packed_model(name, fallback=None, **overrides):
    model = tiny_model(name, attn_implementation=fallback, **overrides)
    install_attention(model, resolve_attention(model))
    return model


def alone(model, batch):
    """Return the logits of each document of a packed batch, run as an ordinary batch."""
    parts = batch["input_ids"].split(batch["cu_seq_lens_q"].diff().tolist(), 1)
    return torch.cat([model(input_ids=ids, use_cache=False).logits for ids in parts], 1)


def fallbacks(name):
    """The implementations that a model may have been loaded with; gemma2 and gpt_oss have one."""
    return ["eager"] if name in ("gemma2", "gpt_oss") else ["sdpa", "eager"]


MODELS_AND_FALLBACKS = [(name, fallback) for name in PACKED_MODELS for fallback in fallbacks(name)]


@pytest.mark.parametrize(("name", "fallback"), MODELS_AND_FALLBACKS)
def test_a_packed_row_equals_its_documents_alone(name, fallback):
    model = packed_model(name, fallback)
    batch = packed_batch([3, 20, 1, 9, 12])
    torch.testing.assert_close(
        model(**batch).logits, alone(model, batch), rtol=0, atol=10 * TOLERANCE
    )


def test_scores_are_scaled_as_the_model_says():
    """gemma2 divides by the root of query_pre_attn_scalar, which is not its head_dim here."""
    model = packed_model("gemma2", query_pre_attn_scalar=2)
    batch = packed_batch([3, 20, 9])
    expected = alone(tiny_model("gemma2", query_pre_attn_scalar=2), batch)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=10 * TOLERANCE)
    by_head_dim = alone(tiny_model("gemma2", query_pre_attn_scalar=8), batch)
    assert (by_head_dim - expected).abs().max() > 0.1


BF16_LOGITS = {"rtol": 0, "atol": 8 * 2**-8 * 4}  # a few roundings of 8 bits of logits below 4


def test_autocast_reaches_packed_attention_as_it_reaches_sdpa():
    """Rotary embeddings return float32 under autocast, beside values in bf16."""
    model = packed_model("qwen3")
    batch = packed_batch([3, 20, 9])
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = model(**batch).logits, alone(model, batch)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected, **BF16_LOGITS)


def test_norms_may_be_kept_in_float32():
    """As peft does; queries and keys are then wider than values."""
    model, reference = (make("qwen3", dtype=torch.bfloat16) for make in (packed_model, tiny_model))
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    batch = packed_batch([3, 20, 9])
    torch.testing.assert_close(model(**batch).logits, alone(reference, batch), **BF16_LOGITS)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradient_checkpointing_keeps_the_gradients(name):
    """Layers run again in the backward, outside the call that announced itself as packed."""
    gradients = []
    for checkpointing in (False, True):
        model = packed_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**packed_batch([3, 20, 9])).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for parameter, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], expected, rtol=0, atol=TOLERANCE)


@pytest.fixture
def messages(caplog):
    """What transformers says: its logger does not propagate to pytest's handler by itself."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_mask_or_cache_breaks_isolation(implementation, messages):
    """On untouched transformers: why a packed batch has no mask, and `use_cache=False` in it."""
    model = tiny_model("llama", attn_implementation=implementation)
    batch = packed_batch([3, 20, 9])
    expected = alone(model, batch)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=10 * TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_mask = model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits
        with_cache = model(**{**batch, "use_cache": True}).logits
        by_default = model(**{k: v for k, v in batch.items() if k != "use_cache"}).logits
    for leaking in (with_mask, with_cache, by_default):
        torch.testing.assert_close(leaking[:, :3], expected[:, :3], rtol=0, atol=10 * TOLERANCE)
        assert (leaking - expected)[:, 3:].abs().max() > 0.1
    assert not messages.records, "and nobody says a word"


def padded(lengths, side):
    rows = [d["input_ids"] for d in documents_of_lengths(lengths, seed=4)]
    longest = max(lengths)
    ids = [
        [0] * (longest - len(r)) + r if side == "left" else r + [0] * (longest - len(r))
        for r in rows
    ]
    mask = [
        [0] * (longest - len(r)) + [1] * len(r)
        if side == "left"
        else [1] * len(r) + [0] * (longest - len(r))
        for r in rows
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def everyday_calls(model):
    """What a model is used for besides packed training; every result compares bit by bit."""
    model.eval()
    left, right = padded([12, 3, 7], "left"), padded([12, 3, 7], "right")
    results = {
        "one document": model(input_ids=left["input_ids"][:1]).logits,
        "left-padded": model(**left).logits[left["attention_mask"].bool()],
        "right-padded": model(**right).logits[right["attention_mask"].bool()],
        "generated": model.generate(**left, do_sample=False, max_new_tokens=6, pad_token_id=0),
    }
    # The second half of the row does not see the first.
    at = torch.arange(12)
    seen = (at[:, None] >= at[None]) & ((at[:, None] < 5) == (at[None] < 5))
    additive = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    results["4-D mask"] = model(input_ids=left["input_ids"][:1], attention_mask=additive).logits
    model.train()
    logits = model(**right).logits[right["attention_mask"].bool()]
    weight = model.get_input_embeddings().weight
    results["gradient"] = torch.autograd.grad(logits.square().mean(), weight)[0]
    return results


@pytest.mark.parametrize(("name", "fallback"), MODELS_AND_FALLBACKS)
def test_calls_that_are_not_packed_stay_as_they_were(name, fallback):
    model = tiny_model(name, attn_implementation=fallback)
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model))
    model(**packed_batch([3, 5]))
    for call, result in everyday_calls(model).items():
        torch.testing.assert_close(result, before[call], rtol=0, atol=1e-6, msg=call)


def test_without_a_mask_function_padded_batches_would_change(monkeypatch):
    """The negative control of the test above, and why a mask function is registered too."""
    model = tiny_model("llama")
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model))
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, document_sdpa.NAME)
    after = everyday_calls(model)
    assert (after["left-padded"] - before["left-padded"]).abs().max() > 0.1
    assert not torch.equal(after["generated"], before["generated"])


def test_a_packed_call_that_fails_leaves_no_trace():
    model = packed_model("llama")
    batch = padded([12, 3, 7], "left")
    before = model(**batch).logits
    with pytest.raises(IndexError):
        model(**packed_batch([3, 5]) | {"input_ids": torch.full((1, 8), 10**6)})
    assert torch.equal(model(**batch).logits, before)


def test_a_copy_of_the_model_runs_its_own_weights():
    model = packed_model("llama")
    twin = copy.deepcopy(model)
    batch = packed_batch([3, 5])
    expected = model(**batch).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(**batch).logits, expected)


@pytest.mark.parametrize(
    ("name", "fallback"), [("llama", "sdpa"), ("llama", "eager"), ("gpt_oss", None)]
)
def test_saved_models_name_no_implementation_of_ours(name, fallback, tmp_path):
    model = packed_model(name, fallback)
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    assert "packed" not in saved
    assert "packed" not in model.config.to_json_string()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "packed" not in loaded.config._attn_implementation
    ids = packed_batch([9])["input_ids"]
    torch.testing.assert_close(
        loaded(input_ids=ids).logits, model.eval()(input_ids=ids).logits, rtol=0, atol=TOLERANCE
    )


def test_only_the_text_model_of_a_composite_one_changes(tmp_path):
    pytest.importorskip("PIL")
    model, _ = tiny_vlm("llava")
    batch = padded([12, 3, 7], "left")
    before = model(**batch).logits
    vision = model.config.vision_config._attn_implementation
    install_attention(model, resolve_attention(model))
    assert model.config.text_config._attn_implementation == document_sdpa.NAME
    assert model.config.vision_config._attn_implementation == vision
    assert torch.equal(model(**batch).logits, before)
    row = packed_batch([3, 20, 9])
    torch.testing.assert_close(model(**row).logits, alone(model, row), rtol=0, atol=10 * TOLERANCE)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("argument", ["position_bias", "attention_bias", "alibi", "head_mask"])
def test_what_packed_kernels_do_not_compute_is_refused(argument):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[document_sdpa.NAME]
    q = torch.randn(1, 2, 5, 4)
    given = {argument: torch.zeros(5, 5), "cu_seq_lens_q": torch.tensor([0, 5])}
    with pytest.raises(NotImplementedError, match=f"{argument}.*attention='model'"):
        attention(nn.Module(), q, q, q, None, **given)
    with pytest.raises(ValueError, match="one flat row, got 2 rows"):
        attention(
            nn.Module(), *[q.repeat(2, 1, 1, 1)] * 3, None, cu_seq_lens_q=torch.tensor([0, 5])
        )


# --- no T×T mask ------------------------------------------------------------------------------


def largest_allocation(function):
    """Return the bytes of the largest single allocation, including those inside kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


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
    _sdpa_with_autograd(*inputs(heads=4, kv_heads=2), boundaries(), 0.25, 0)
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
        _sdpa_with_autograd(q, k, v, cu_seqlens, 0.3, window).float().sum().backward()

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
    _sdpa_with_autograd(q, k, v, boundaries(lengths), 0.3, 600)
    assert len(biases) == 12, "tiles beyond the window"
    assert len({bias.untyped_storage().data_ptr() for bias in biases}) == 1


# --- the choice ------------------------------------------------------------------------------


class OutsideTransformers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)


def gptj():
    """A model of transformers whose attention does not go through the interface."""
    config = AutoConfig.for_model(
        "gptj", vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
    )
    return AutoModelForCausalLM.from_config(config)


def test_on_a_cpu_documents_are_taken_one_after_another():
    choice = resolve_attention(tiny_model("llama"))
    assert choice == AttentionChoice("documents", "packed_documents", "cpu, float32")
    assert str(choice) == "document-wise SDPA (cpu, float32)"
    bf16 = resolve_attention(tiny_model("llama"), dtype=torch.bfloat16)
    assert bf16 == AttentionChoice("documents", "packed_documents", "cpu, bfloat16")


@pytest.mark.parametrize("name", PACKED_MODELS)
def test_every_supported_model_gets_documents_over_what_it_was_loaded_with(name):
    for fallback in fallbacks(name):
        model = tiny_model(name, attn_implementation=fallback)
        suffix = "_over_eager" if fallback == "eager" else ""
        for _ in range(2):  # and again when it is already installed
            assert resolve_attention(model).implementation == f"packed_documents{suffix}"
            install_attention(model, resolve_attention(model))


@pytest.mark.parametrize("model", [OutsideTransformers, gptj])
def test_models_outside_the_interface_keep_their_own_attention(model):
    model = model()
    choice = resolve_attention(model)
    name = type(model).__name__
    reason = f"{name} is outside transformers' attention interface"
    assert choice == AttentionChoice("model", None, reason)
    assert str(choice) == f"the model's own, masked by position_ids ({reason})"
    install_attention(model, choice)  # changes nothing
    with pytest.raises(
        ValueError, match=f"attention='documents' cannot be exact on {name}: .*auto"
    ):
        resolve_attention(model, "documents")


def test_the_model_s_own_mask_isolates_a_model_outside_the_interface():
    model = gptj().eval()
    batch = packed_batch([3, 20, 9])
    torch.testing.assert_close(
        model(**batch).logits, alone(model, batch), rtol=0, atol=10 * TOLERANCE
    )


def test_chunked_attention_stays_in_the_mask():
    model = tiny_model("llama")
    model.config.attention_chunk_size = 16
    choice = resolve_attention(model)
    assert (choice.backend, choice.reason) == ("model", "attention_chunk_size=16 lives in the mask")


def test_an_implementation_that_the_user_chose_is_kept():
    model = tiny_model("llama")
    model.config._attn_implementation = "flex_attention"
    choice = resolve_attention(model)
    assert choice == AttentionChoice("model", None, "the model was loaded with 'flex_attention'")


def test_named_attention_is_taken_or_refused():
    model = tiny_model("llama")
    documents = AttentionChoice("documents", "packed_documents", "attention='documents'")
    assert resolve_attention(model, "documents") == documents
    assert resolve_attention(model, "model") == AttentionChoice("model", None, "attention='model'")
    for name, reason in [
        ("varlen", "no CUDA device|older than sm80|the device is cpu"),
        ("flash_attention_2", "the device is cpu"),
        ("flash_attention_3", "the device is cpu"),
    ]:
        with pytest.raises(ValueError, match=f"attention='{name}' cannot be exact.*({reason})"):
            resolve_attention(model, name)
    with pytest.raises(ValueError, match=r"'flash' is not known; choose one of auto, .*documents"):
        resolve_attention(model, "flash")


@pytest.fixture
def cuda(monkeypatch):
    """A machine with a GPU as `resolve_attention` sees it: its kernels, and what is installed."""

    def pretend(flash=None, capability=(9, 0), device=True):
        found = [flash] if isinstance(flash, str) else list(flash or ())
        monkeypatch.setattr(flash_attn, "installed", lambda: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Testla T4")

        def choose(name="llama", attention="auto", dtype=torch.bfloat16, **overrides):
            model = tiny_model(name, **overrides)
            return resolve_attention(model, attention, device="cuda", dtype=dtype)

        return choose

    return pretend


def test_on_cuda_flash_attn_comes_first_then_torch_varlen_then_documents(cuda):
    assert cuda(flash="flash_attention_2")() == AttentionChoice(
        "flash_attention_2", "flash_attention_2", "installed"
    )
    assert cuda(flash="flash_attention_3")().backend == "flash_attention_3"
    varlen = AttentionChoice("varlen", "packed_varlen", "no flash-attn package needed")
    assert cuda()() == varlen
    assert cuda()(dtype=torch.float16) == varlen
    assert cuda()("gpt_oss").implementation == "packed_varlen_over_eager"
    documents = AttentionChoice("documents", "packed_documents", "cuda, bfloat16")
    assert cuda(capability=(7, 5))() == documents
    half = cuda(capability=(7, 5), flash="flash_attention_2")(dtype=torch.float16)
    assert half == AttentionChoice("documents", "packed_documents", "cuda, float16")


WIDE_VALUES = "cannot take head_dim 8 with 16"
REFUSALS = [
    # model, changes to it, dtype, why flash-attn is not taken, why torch varlen is not
    ("llama", {}, torch.float32, "the dtype is torch.float32", "the dtype is torch.float32"),
    ("llama", {"head_dim": 264}, None, "head_dim 264 is above 256", "head_dim 264 is above 256"),
    ("llama", {"head_dim": 12}, None, None, "cannot take head_dim 12 with 12"),
    ("llama", {"attention_dropout": 0.1}, None, None, "no dropout and the model sets 0.1"),
    ("gpt2_dropout", {}, None, None, "no dropout and the model sets 0.1"),
    ("gemma2", {}, None, None, "no soft-cap"),
    ("deepseek_v3", {"v_head_dim": 16}, None, WIDE_VALUES, WIDE_VALUES),
    ("deepseek_v3", {"v_head_dim": 4}, None, None, "cannot take head_dim 8 with 4"),
    ("gpt_oss", {}, None, "flash-attn has no attention sinks", None),
]


@pytest.mark.parametrize(("name", "overrides", "dtype", "no_flash", "no_varlen"), REFUSALS)
def test_a_kernel_that_would_not_be_exact_is_passed_over_and_refused_by_name(
    name, overrides, dtype, no_flash, no_varlen, cuda
):
    choose = cuda(flash="flash_attention_2")
    options = {"dtype": dtype or torch.bfloat16, **overrides}
    for refusal, attention in ((no_flash, "flash_attention_2"), (no_varlen, "varlen")):
        if refusal is None:
            assert choose(name, attention, **options).backend == attention
        else:
            with pytest.raises(ValueError, match=f"attention='{attention}' cannot be.*{refusal}"):
                choose(name, attention, **options)
    expected = (
        "documents" if no_flash and no_varlen else "varlen" if no_flash else "flash_attention_2"
    )
    assert choose(name, **options).backend == expected
    without_flash = "documents" if no_varlen else "varlen"
    assert cuda()(name, **options).backend == without_flash


def test_the_widest_head_of_any_layer_decides(cuda):
    """gemma4 has heads of 512 in some layers, of 256 in the others and in its config."""
    model = tiny_model("llama")
    model.model.layers[1].self_attn.head_dim = 512
    cuda(flash="flash_attention_2")
    choice = resolve_attention(model, device="cuda", dtype=torch.bfloat16)
    assert choice.backend == "documents"


def test_what_cannot_run_on_this_machine_says_why(cuda, monkeypatch):
    choose = cuda(capability=(7, 5))
    for name in ("varlen", "flash_attention_2"):
        with pytest.raises(ValueError, match="Testla T4 is older than sm80"):
            choose(attention=name)
    with pytest.raises(ValueError, match="no CUDA device"):
        cuda(device=False)(attention="varlen")
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    monkeypatch.delattr(torch.nn.attention, "varlen")
    with pytest.raises(ValueError, match=r"torch .* has no torch.nn.attention.varlen \(2.10 has\)"):
        cuda()(attention="varlen")


@pytest.mark.parametrize("loaded", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_2_is_refused_where_it_would_drop_sinks(loaded):
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = loaded
    with pytest.raises(
        ValueError, match=r"drops this model's attention sinks.*attention='documents'"
    ):
        resolve_attention(model)
    model = tiny_model("llama")
    model.config._attn_implementation = loaded
    assert resolve_attention(model) == AttentionChoice(loaded, None, "the model was loaded with it")


def test_flash_attention_is_known_by_its_names():
    for name in (*flash_attn.VERSIONS, "kernels-community/flash-attn2", "paged|flash_attention_2"):
        assert flash_attn.is_flash_attention(name)
    for name in (None, "sdpa", "eager", "flex_attention", document_sdpa.NAME, torch_varlen.NAME):
        assert not flash_attn.is_flash_attention(name)


def test_installed_flash_attention_is_found_newest_first(monkeypatch):
    from transformers.utils import import_utils

    for version in "234":
        monkeypatch.setattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)
    assert flash_attn.installed() == []
    found = []
    for version in "234":
        monkeypatch.setattr(import_utils, f"is_flash_attn_{version}_available", lambda: True)
        found.insert(0, f"flash_attention_{version}")
        assert flash_attn.installed() == found


ALL = list(flash_attn.VERSIONS)
TAKEN = [
    # compute capability, model, changes to it, the version that auto takes of all installed
    ((8, 0), "llama", {}, "flash_attention_3"),
    ((8, 6), "llama", {}, "flash_attention_3"),
    ((8, 9), "llama", {}, "flash_attention_3"),
    ((9, 0), "llama", {}, "flash_attention_4"),
    ((10, 0), "llama", {}, "flash_attention_4"),
    ((12, 0), "llama", {}, "flash_attention_4"),
    ((13, 0), "llama", {}, "flash_attention_2"),
    ((7, 5), "llama", {}, "documents"),
    # heads of 256 and of 192, beyond 128 from sm100
    ((9, 0), "llama", {"head_dim": 256}, "flash_attention_4"),
    ((10, 0), "llama", {"head_dim": 256}, "flash_attention_2"),
    ((12, 0), "llama", {"head_dim": 192}, "flash_attention_2"),
    ((10, 0), "llama", {"head_dim": 128}, "flash_attention_4"),
    ((9, 0), "llama", {"head_dim": 12}, "flash_attention_2"),
    # dropout, which transformers leaves out in silence for versions 3 and 4
    ((9, 0), "llama", {"attention_dropout": 0.1}, "flash_attention_2"),
    ((9, 0), "gpt2_dropout", {}, "flash_attention_2"),
    # soft-cap: no backward in version 4
    ((9, 0), "gemma2", {}, "flash_attention_3"),
    ((10, 0), "gemma2", {}, "flash_attention_2"),
    ((9, 0), "gemma2", {"attention_dropout": 0.1}, "documents"),
]


@pytest.mark.parametrize(("capability", "name", "overrides", "expected"), TAKEN)
def test_auto_takes_the_newest_version_that_can_train(capability, name, overrides, expected, cuda):
    assert cuda(flash=ALL, capability=capability)(name, **overrides).backend == expected


def test_a_version_that_cannot_train_here_is_refused_by_name(cuda):
    for capability, name, reason in (
        ((8, 6), "flash_attention_4", "older than sm90"),
        ((10, 0), "flash_attention_3", "version 3 has no kernels for sm100"),
        ((13, 0), "flash_attention_4", "version 4 has no kernels for sm130"),
    ):
        with pytest.raises(ValueError, match=f"attention='{name}' cannot be exact on .*{reason}"):
            cuda(flash=ALL, capability=capability)(attention=name)


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_deterministic_run_gets_a_version_that_can_be(asked, cuda, monkeypatch):
    """transformers asks the kernel for it by this variable, which `full_determinism` sets."""
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", asked)
    taken = {
        (12, 0): cuda(flash=ALL, capability=(12, 0))().backend,
        (9, 0): cuda(flash=ALL, capability=(9, 0))().backend,
        (8, 0): cuda(flash=ALL, capability=(8, 0))(head_dim=256).backend,
    }
    versions = {"0": (4, 4, 3), "1": (2, 4, 2)}[asked]
    assert list(taken.values()) == [f"flash_attention_{version}" for version in versions]


def test_a_model_that_transformers_keeps_from_flash_attention_gets_varlen(cuda, monkeypatch):
    """Setting it would stop the run, or load another kernel from the hub instead."""
    from transformers import LlamaPreTrainedModel

    choose = cuda(flash="flash_attention_2")
    with monkeypatch.context() as patch:
        patch.setattr(LlamaPreTrainedModel, "_supports_flash_attn", False)
        assert choose().backend == "varlen"
        with pytest.raises(ValueError, match="does not support FlashAttention in transformers"):
            choose(attention="flash_attention_2")
    with monkeypatch.context() as patch:
        only = ["kernels-community/vllm-flash-attn3"]
        patch.setattr(
            LlamaPreTrainedModel, "_compatible_flash_implementations", only, raising=False
        )
        assert choose().backend == "varlen"
    assert choose().backend == "flash_attention_2"


def test_after_a_kernel_come_the_other_kernels_and_then_the_model_s_own_mask(cuda):
    def order(*arguments, **options):
        choice = cuda(*arguments, **options)()
        return [way.backend for way in with_fallbacks(choice)]

    own = ["model", "mask", "padded", "equal_lengths"]
    assert order(flash=ALL) == [*ALL, "varlen", "documents", *own]
    assert order(flash=ALL, capability=(8, 0)) == [*ALL[1:], "varlen", "documents", *own]
    assert order() == ["varlen", "documents", *own]
    assert order(capability=(7, 5)) == ["documents", *own]


@pytest.mark.parametrize("fallback", ["sdpa", "eager"])
def test_after_a_kernel_the_model_gets_its_own_implementation_back(fallback, cuda):
    cuda(flash=ALL)
    model = tiny_model("llama", attn_implementation=fallback)
    ways = with_fallbacks(resolve_attention(model, device="cuda", dtype=torch.bfloat16))
    implementations = {}
    for way in ways:
        model.config._attn_implementation = "flash_attention_4"  # as the first way has set it
        if way.backend not in ALL:
            install_attention(model, way)
            implementations[way.backend] = model.config._attn_implementation
    suffix = "_over_eager" if fallback == "eager" else ""
    assert implementations == {
        "varlen": f"packed_varlen{suffix}",
        "documents": f"packed_documents{suffix}",
        **dict.fromkeys(["model", "mask", "padded", "equal_lengths"], fallback),
    }


def test_a_model_loaded_with_flash_attention_falls_back_to_our_kernels(cuda):
    cuda(flash=ALL)
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    ways = with_fallbacks(resolve_attention(model, device="cuda", dtype=torch.bfloat16))
    own = ["model", "mask", "padded", "equal_lengths"]
    assert [way.backend for way in ways] == ["flash_attention_2", "varlen", "documents", *own]
    assert {way.native for way in ways} == {"flash_attention_2"}


# --- torch varlen, by doubles of its kernels --------------------------------------------------


@pytest.fixture
def varlen_calls(monkeypatch):
    """Let `varlen_attn` compute from what it is given, and keep what that was."""
    calls = []

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
    ):
        calls.append(
            {
                "cu_seqlens": (cu_seq_q, cu_seq_k),
                "longest": (max_q, max_k),
                "scale": scale,
                "window": window_size,
            }
        )
        assert enable_gqa or query.shape[1] == key.shape[1], "as torch 2.12 asks for"
        assert all(x.is_contiguous() for x in (query, key, value))
        left, right = window_size
        assert right == 0, "causal"
        return dense_attention(
            query, key, value, cu_seq_q, scale=scale, window=left + 1 if left >= 0 else None
        )

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    return calls


@pytest.fixture
def flash_calls(monkeypatch):
    """Doubles of PyTorch's FlashAttention ops; the backward rebuilds weights from the log-sum-exp.

    As the kernel does: whatever `out` and `lse` it is handed decide the gradients.
    """
    calls = []

    def scores(query, key, cu_seqlens, scale, left):
        seen = visible(cu_seqlens, None if left < 0 else left)
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (torch.einsum("qhd,khd->hqk", query, keys) * scale).masked_fill(~seen, -math.inf)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                scale, window_size_left, window_size_right):  # fmt: skip
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size_left, is_causal))
        assert dropout_p == 0
        assert not return_debug_mask
        assert window_size_right == 0
        assert is_causal == (window_size_left < 0)
        s = scores(q, k, cu_q, scale, window_size_left)
        values = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        out = torch.einsum("hqk,khd->qhd", s.softmax(-1), values)
        return out, s.logsumexp(-1), torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal,
                 rng_state, unused, *, scale, window_size_left, window_size_right):  # fmt: skip
        assert grad.is_contiguous()
        assert is_causal == (window_size_left < 0)
        kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        p = torch.exp(scores(q, k, cu_q, scale, window_size_left) - lse[..., None])
        received = (grad * out).sum(-1).t()[..., None]
        d_scores = p * (torch.einsum("qhd,khd->hqk", grad, values) - received) * scale
        d_key = torch.einsum("hqk,qhd->khd", d_scores, q).unflatten(1, (kv_heads, group)).sum(2)
        d_value = torch.einsum("hqk,qhd->khd", p, grad).unflatten(1, (kv_heads, group)).sum(2)
        return torch.einsum("hqk,khd->qhd", d_scores, keys), d_key, d_value

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return calls


VARLEN_OPTIONS = [{}, {"window": 1}, {"window": 4}, {"window": 64}]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, varlen_calls):
    assert_equals_dense(varlen_attention, inputs(kv_heads=kv_heads), **options)
    (call,) = varlen_calls
    assert call["window"] == (options.get("window", 0) - 1, 0)
    assert call["scale"] == 0.4
    assert call["longest"] == (30, 30)
    assert all(torch.equal(x, boundaries()) for x in call["cu_seqlens"])


@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_with_sinks_equals_dense_attention(options, flash_calls):
    assert_equals_dense(varlen_attention, inputs(), sinks=True, **options)
    left = options.get("window", 0) - 1
    b = boundaries().tolist()
    assert flash_calls == [(b, b, 30, 30, left, left < 0)]


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"dropout": 0.1}], ids=str)
def test_varlen_attention_refuses_what_the_kernel_lacks(options):
    with pytest.raises(NotImplementedError, match=r"no soft-cap and no dropout.*'documents'"):
        varlen_attention(*inputs(), boundaries(), scale=0.4, **options)


def test_torch_2_11_is_not_asked_for_enable_gqa(monkeypatch):
    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        return dense_attention(query, key, value, cu_q, scale=scale)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    assert_equals_dense(varlen_attention, inputs())


def test_torch_s_varlen_attention_takes_the_arguments_we_give():
    """The doubles above have the signature of the installed torch."""
    parameters = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
    positional = list(parameters)[:7]
    assert positional == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= parameters.keys()
    for op, names in (
        (torch.ops.aten._flash_attention_forward, "max_q max_k dropout_p is_causal"),
        (torch.ops.aten._flash_attention_backward, "out logsumexp cum_seq_q cum_seq_k max_q max_k"),
    ):
        schema = [argument.name for argument in op.default._schema.arguments]
        assert " ".join(schema).count(names) == 1
        assert {"scale", "window_size_left", "window_size_right"} <= set(schema)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_models_on_torch_varlen_equal_their_documents_alone(name, varlen_calls, flash_calls):
    model, reference = tiny_model(name), tiny_model(name)
    fallback = "_over_eager" if name == "gpt_oss" else ""
    install_attention(model, AttentionChoice("varlen", torch_varlen.NAME + fallback, "a test"))
    batch = packed_batch([3, 20, 1, 9])
    logits, expected = model(**batch).logits, alone(reference, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=10 * TOLERANCE)
    for output in (logits, expected):
        output.square().mean().backward()
    for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=10 * TOLERANCE, msg=parameter)
    if name == "gpt_oss":
        assert [call[4] for call in flash_calls] == [WINDOW - 1, -1], "a window, then none"
        assert not varlen_calls
    else:
        lefts = {"llama": [-1, -1], "mistral": [WINDOW - 1] * 2, "gemma3_text": [WINDOW - 1, -1]}
        assert [call["window"] for call in varlen_calls] == [(left, 0) for left in lefts[name]]
        assert {call["longest"] for call in varlen_calls} == {(20, 20)}
        for call in varlen_calls:
            assert call["cu_seqlens"][0].tolist() == [0, 3, 23, 24, 33]
            assert call["cu_seqlens"][0].dtype == torch.int32
