"""The head that scores trained positions only says what the model's own logits say.

Tolerances, float32: a logit is a sum of 32 products, a log-probability one of 320 exponentials: a
hundred roundings by 2**-24 of values below 20 stay within 1e-4, and gradients, of size 1, in 1e-5.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from helpers.memory import largest_allocation
from helpers.tiny import VOCAB_SIZE, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer import utils as trl_utils
from trl.trainer.utils import add_fused_lm_head

from trl_packing.documents.host_row import cache_values
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.loss import lm_head as head
from trl_packing.loss.lm_head import add_trained_positions_head

TOLERANCE = 1e-5
NUM_TOKENS = 40


def build(model_type, **arguments):
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        **arguments,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if model.lm_head.bias is not None:
            torch.nn.init.normal_(model.lm_head.bias)
    return model


MODELS = {
    "plain": lambda: tiny_model("llama"),
    "tied": lambda: tiny_model("gpt2"),
    "soft-cap": lambda: tiny_model("gemma2", final_logit_softcapping=3.0),
    "logit_scale": lambda: tiny_model("cohere2"),
    "logits_scaling divides": lambda: build("granite", logits_scaling=4.0),
    "logits_scaling multiplies": lambda: build("hyperclovax", logits_scaling=0.5),
    "bias": lambda: build("phi"),
}


def with_trl_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def with_our_head(model):
    add_trained_positions_head(with_trl_head(model))
    return model


def batch(share=0.5, rows=1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(6, VOCAB_SIZE, (rows, NUM_TOKENS), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < share
    return {"input_ids": ids, "labels": ids.masked_fill(~chosen, IGNORE_INDEX)}


def from_own_logits(model, input_ids, labels):
    """Return log-probabilities and entropies, top-1 and which positions are trained."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    targets, chosen = labels[:, 1:].clamp(min=0), labels[:, 1:] != IGNORE_INDEX
    distribution = logits.log_softmax(-1)
    log_probs = distribution.gather(-1, targets[..., None])[..., 0]
    entropy = -(distribution.exp() * distribution).sum(-1)
    is_top1 = logits.argmax(-1) == targets
    return [torch.where(chosen, x, 0) for x in (log_probs, entropy)], is_top1 & chosen, chosen


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, expected, tolerance=TOLERANCE):
    assert ours.keys() == expected.keys()
    for name, reference in expected.items():
        atol = tolerance * (1 + reference.abs().max().item())
        torch.testing.assert_close(ours[name], reference, rtol=0, atol=atol, msg=name)


def assert_same_output(ours, expected, tolerance=TOLERANCE):
    for field in ("log_probs", "entropy", "is_top1", "label_mask", "loss", "aux_loss"):
        got, reference = getattr(ours, field, None), getattr(expected, field, None)
        assert (got is None) == (reference is None), field
        if got is not None:
            assert got.dtype == reference.dtype, field
            assert got.shape == reference.shape, field
            close = {"rtol": 0, "atol": 10 * tolerance, "msg": field}
            torch.testing.assert_close(got, reference, **close)


# A loss multiplies the log-probabilities by these: one number, or one for each position.
LOSSES = {
    "sum": lambda log_probs: -log_probs.sum() / 7,
    "dft": lambda log_probs: -(log_probs * log_probs.exp().detach()).sum(),
    "weights": lambda log_probs: (log_probs * torch.linspace(-1, 2, NUM_TOKENS - 1)).sum(),
    "few weights": lambda log_probs: log_probs.sum() + 15 * log_probs[0, 5:9].sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_the_head_says_what_the_model_s_own_logits_say(build, loss):
    model, reference = with_our_head(build()), build()
    given = batch()
    output = model(**given, fused_lm_head=True)
    (log_probs, entropy), is_top1, chosen = from_own_logits(reference, **given)
    torch.testing.assert_close(output.log_probs, log_probs, rtol=0, atol=10 * TOLERANCE)
    torch.testing.assert_close(output.entropy, entropy, rtol=0, atol=10 * TOLERANCE)
    assert torch.equal(output.is_top1, is_top1)
    assert torch.equal(output.label_mask, chosen)
    torch.testing.assert_close(output.loss, -log_probs.sum() / chosen.sum(), rtol=0, atol=TOLERANCE)
    expected = gradients(reference, loss(log_probs))
    assert_same_gradients(gradients(model, loss(output.log_probs)), expected)
    assert max(g.abs().max() for g in expected.values()) > 1000 * TOLERANCE


@pytest.mark.parametrize("elements", [1, VOCAB_SIZE * 3, VOCAB_SIZE * 7 + 1])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("name", ["soft-cap", "bias"])
def test_chunks_change_nothing(name, loss, elements, monkeypatch):
    model, given = with_our_head(MODELS[name]()), batch()
    whole = model(**given, fused_lm_head=True)
    expected = gradients(model, loss(whole.log_probs))
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", elements)
    chunked = model(**given, fused_lm_head=True)
    assert_same_output(chunked, whole)
    assert_same_gradients(gradients(model, loss(chunked.log_probs)), expected)


def test_without_a_trained_position_the_loss_is_a_differentiable_zero():
    model = with_our_head(tiny_model("llama"))
    output = model(**batch(share=0.0), fused_lm_head=True)
    assert output.loss.item() == 0
    assert output.loss.requires_grad
    given = gradients(model, output.loss)
    assert given.keys() == {n for n, _ in model.named_parameters()}
    assert all(g.abs().max() == 0 for g in given.values())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_auxiliary_loss_of_experts_is_that_of_trl_s_head(name):
    models = [
        wrap(tiny_model(name, output_router_logits=True, router_aux_loss_coef=0.1))
        for wrap in (with_our_head, with_trl_head)
    ]
    given = {**batch(), "fused_lm_head": True, "position_ids": torch.arange(NUM_TOKENS)[None]}
    ours, trls = (model(**given) for model in models)
    assert_same_output(ours, trls)
    assert ours.aux_loss > 1
    torch.testing.assert_close(
        ours.loss, -ours.log_probs.sum() / ours.label_mask.sum() + 0.1 * ours.aux_loss
    )
    assert_same_gradients(gradients(models[0], ours.loss), gradients(models[1], trls.loss))


@pytest.mark.parametrize("name", ["plain", "soft-cap", "bias"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_autocast_to_bf16_rounds_as_trl_s_head_does(name, loss):
    """Logits are rounded alike and summed in float32. Gradients pass through bf16: 8 bits of it."""
    found = []
    for wrap in (with_our_head, with_trl_head):
        model = wrap(MODELS[name]())
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**batch(), fused_lm_head=True)
        found.append((output, gradients(model, loss(output.log_probs))))
    assert_same_output(found[0][0], found[1][0])
    assert found[0][0].log_probs.dtype == torch.float32
    for parameter, expected in found[1][1].items():
        atol = 8 * 2**-8 * expected.abs().max().item()
        torch.testing.assert_close(found[0][1][parameter], expected, rtol=0, atol=atol)


def test_evaluation_takes_no_gradients(monkeypatch):
    """They are taken in the forward, which cannot see by itself that no backward will come."""
    model = with_our_head(build("phi"))
    expected = model(**batch(), fused_lm_head=True)

    def refuse(*arguments):
        raise AssertionError("a gradient was computed")

    monkeypatch.setattr(head, "_d_logits", refuse)
    with torch.no_grad():
        output = model(**batch(), fused_lm_head=True)
    assert_same_output(output, expected)
    with torch.enable_grad(), pytest.raises(AssertionError):
        model(**batch(), fused_lm_head=True)


def test_logits_of_untrained_positions_are_never_there(monkeypatch):
    """A fifth of 512 positions × 4,096 entries is trained, and taken 16 at a time."""
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 16 * 4096)
    ids = torch.randint(6, 300, (1, 512))
    labels = ids.masked_fill(torch.arange(512) % 5 > 0, IGNORE_INDEX)
    sizes = []
    for wrap in (with_our_head, with_trl_head):
        model = wrap(tiny_model("llama", vocab_size=4096))
        sizes.append(
            largest_allocation(
                lambda model=model: model(
                    input_ids=ids, labels=labels, use_cache=False, fused_lm_head=True
                ).loss.backward()
            )
        )
    assert sizes[0] <= 4096 * 32 * 4, "the head's own gradient is the largest"
    assert sizes[1] >= 512 * 4096 * 4, "TRL's head on a CPU scores every position"


def test_every_other_call_is_trl_s():
    model, reference = with_our_head(tiny_model("llama")), with_trl_head(tiny_model("llama"))
    given = batch()
    for call in (
        {"input_ids": given["input_ids"]},
        given,
        {**given, "shift_labels": given["labels"], "fused_lm_head": True},
    ):
        ours, expected = model(**call), reference(**call)
        for field, value in expected.items():
            if torch.is_tensor(value):
                assert torch.equal(ours[field], value), field
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    generate = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = given["input_ids"][:, :5]
    assert torch.equal(model.generate(ids, **generate), reference.generate(ids, **generate))


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": None}, 1.0),
        ({"logit_scale": 0.0}, 0.0),
        ({"output_multiplier": 3}, 3.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
    ],
)
def test_the_scale_of_logits_goes_by_every_name_that_models_give_it(fields, scale):
    config = SimpleNamespace(**{"model_type": "granite", **fields})
    assert head._logit_scale(config) == scale


# --- TRL's kernels, where Triton runs: here by their own torch code -------------------------------


@pytest.fixture
def scored_rows(monkeypatch):
    """Take this CPU for a device with Triton; records the positions that TRL's kernels score."""
    monkeypatch.setattr(head, "_has_triton", lambda weight: True)
    apply, rows = trl_utils._ChunkedLogProbFunction.apply, []

    class Spy:
        @staticmethod
        def apply(hidden, *args):
            rows.append(len(hidden))
            return apply(hidden, *args)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Spy)
    return rows


def known_batch(share=0.5, rows=1):
    """A batch whose trained positions the host knows, as those of the trainer."""
    made = batch(share, rows)
    cache_values(made["labels"], made["labels"].numpy() != IGNORE_INDEX)
    return made


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_kernels_are_given_trained_positions_only(build, loss, scored_rows):
    ours, inputs = with_our_head(build()), known_batch()
    num_trained = int((inputs["labels"][:, 1:] != IGNORE_INDEX).sum())
    output = ours(**inputs, fused_lm_head=True)
    assert scored_rows == [num_trained]
    assert 0 < num_trained < NUM_TOKENS - 1
    found = gradients(ours, loss(output.log_probs))
    scored_rows.clear()
    trl = with_trl_head(build())
    reference = trl(**inputs, fused_lm_head=True)
    assert scored_rows == [NUM_TOKENS - 1]  # the control: every position
    assert_same_output(output, reference)
    assert_same_gradients(found, gradients(trl, loss(reference.log_probs)))


def test_positions_that_the_host_does_not_know_are_left_to_trl(scored_rows):
    output = with_our_head(tiny_model("llama"))(**batch(), fused_lm_head=True)
    assert scored_rows == [NUM_TOKENS - 1]
    assert_same_output(output, with_trl_head(tiny_model("llama"))(**batch(), fused_lm_head=True))
