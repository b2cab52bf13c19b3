"""The head that scores trained positions only says what the model's own logits say.

Tolerances, float32: a logit is a sum of 32 products, a log-probability one of 320 exponentials: a
hundred roundings by 2**-24 of values below 20 stay within 1e-4, and gradients, of size 1, in 1e-5.
"""

import inspect

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
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    options = shape | {"vocab_size": VOCAB_SIZE, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **options, **arguments)
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
# A loss multiplies the log-probabilities by these: one number, or one for each position.
LOSSES = {
    "sum": lambda log_probs: -log_probs.sum() / 7,
    "dft": lambda log_probs: -(log_probs * log_probs.exp().detach()).sum(),
    "weights": lambda log_probs: (log_probs * torch.linspace(-1, 2, NUM_TOKENS - 1)).sum(),
    "few weights": lambda log_probs: log_probs.sum() + 15 * log_probs[0, 5:9].sum(),
}
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def with_trl_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model


def with_our_head(model):
    add_trained_positions_head(with_trl_head(model))
    return model


def batch(share=0.5):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, VOCAB_SIZE, (1, NUM_TOKENS), generator=generator)
    chosen = torch.rand(ids.shape, generator=generator) < share
    return {"input_ids": ids, "labels": ids.masked_fill(~chosen, IGNORE_INDEX)}


def from_own_logits(model, input_ids, labels):
    """Return log-probabilities and entropies, top-1 and which positions are trained."""
    logits = model(input_ids=input_ids, use_cache=False).logits[:, :-1].float()
    targets = labels[:, 1:].clamp(min=0)
    chosen = labels[:, 1:] != IGNORE_INDEX
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


def assert_same_output(ours, expected):
    for field in ("log_probs", "entropy", "is_top1", "label_mask", "loss"):
        close = {"rtol": 0, "atol": 10 * TOLERANCE, "msg": field}
        torch.testing.assert_close(getattr(ours, field), getattr(expected, field), **close)


@pytest.mark.parametrize("chunk", [2**26, VOCAB_SIZE * 7 + 1])
@each_loss
@each_model
def test_the_head_says_what_the_model_s_own_logits_say(build, loss, chunk, monkeypatch):
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", chunk)
    model = with_our_head(build())
    reference = build()
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


def test_without_a_trained_position_the_loss_is_a_differentiable_zero():
    model = with_our_head(tiny_model("llama"))
    output = model(**batch(share=0.0), fused_lm_head=True)
    assert output.loss.item() == 0
    given = gradients(model, output.loss)
    assert given.keys() == {n for n, _ in model.named_parameters()}
    assert all(g.abs().max() == 0 for g in given.values())


@pytest.mark.parametrize("name", ["plain", "soft-cap", "bias"])
@each_loss
def test_autocast_to_bf16_rounds_as_trl_s_head_does(name, loss):
    """Logits are rounded alike and summed in float32. Gradients pass through bf16: 8 bits of it."""
    found = []
    for wrap in (with_our_head, with_trl_head):
        model = wrap(MODELS[name]())
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**batch(), fused_lm_head=True)
        found.append((output, gradients(model, loss(output.log_probs))))
    assert_same_output(found[0][0], found[1][0])
    for parameter, expected in found[1][1].items():
        atol = 8 * 2**-8 * expected.abs().max().item()
        torch.testing.assert_close(found[0][1][parameter], expected, rtol=0, atol=atol)


def test_logits_of_untrained_positions_are_never_there(monkeypatch):
    """A fifth of 512 positions × 4,096 entries is trained, and taken 16 at a time."""
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 16 * 4096)
    ids = torch.randint(6, 300, (1, 512))
    labels = ids.masked_fill(torch.arange(512) % 5 > 0, IGNORE_INDEX)
    given = {"input_ids": ids, "labels": labels, "use_cache": False, "fused_lm_head": True}

    def largest(wrap):
        model = wrap(tiny_model("llama", vocab_size=4096))
        return largest_allocation(lambda: model(**given).loss.backward())

    assert largest(with_our_head) <= 4096 * 32 * 4, "the head's own gradient is the largest"
    assert largest(with_trl_head) >= 512 * 4096 * 4, "TRL's head on a CPU scores every position"


def test_every_other_call_is_trl_s():
    model, reference = with_our_head(tiny_model("llama")), with_trl_head(tiny_model("llama"))
    given = batch()
    shifted = {**given, "shift_labels": given["labels"], "fused_lm_head": True}
    for call in ({"input_ids": given["input_ids"]}, given, shifted):
        ours, expected = model(**call), reference(**call)
        for field, value in expected.items():
            if torch.is_tensor(value):
                assert torch.equal(ours[field], value), field
    assert inspect.signature(model.forward) == inspect.signature(reference.forward)
    generate = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    ids = given["input_ids"][:, :5]
    assert torch.equal(model.generate(ids, **generate), reference.generate(ids, **generate))


# --- TRL's kernels, where Triton runs: here by their own torch code -------------------------------


@pytest.fixture
def scored_rows(monkeypatch):
    """Take this CPU for a device with Triton; records the positions that TRL's kernels score."""
    monkeypatch.setattr(head, "_use_triton", lambda device: True)
    apply = trl_utils._ChunkedLogProbFunction.apply
    rows = []

    class Spy:
        @staticmethod
        def apply(hidden, *args):
            rows.append(len(hidden))
            return apply(hidden, *args)

    monkeypatch.setattr(trl_utils, "_ChunkedLogProbFunction", Spy)
    return rows


@each_loss
@each_model
def test_kernels_are_given_trained_positions_only(build, loss, scored_rows):
    """Also of a batch whose labels the host does not know."""
    ours = with_our_head(build())
    trl = with_trl_head(build())
    known = batch()
    cache_values(known["labels"], known["labels"].numpy() != IGNORE_INDEX)
    num_trained = int((known["labels"][:, 1:] != IGNORE_INDEX).sum())
    reference = trl(**known, fused_lm_head=True)
    expected = gradients(trl, loss(reference.log_probs))
    for given in (known, batch()):
        output = ours(**given, fused_lm_head=True)
        assert_same_output(output, reference)
        assert_same_gradients(gradients(ours, loss(output.log_probs)), expected)
    assert scored_rows == [NUM_TOKENS - 1, num_trained, num_trained]
    assert 0 < num_trained < NUM_TOKENS - 1
