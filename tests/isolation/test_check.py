"""The check passes isolated models, reports leaks, and leaves no trace on the model."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.leaks import (
    AddRowMean,
    OneDocument,
    PreviousToken,
    documents,
    dynamic_ntk,
    longrope,
    packed_model,
    with_fused_head,
    with_layer,
)
from helpers.tiny import (
    PACKED_MODELS,
    VOCAB_SIZE,
    tiny_model,
)
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from trl_packing import (
    check_isolation,
)
from trl_packing.attention import document_sdpa
from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.attention.interface import _attention_function
from trl_packing.isolation.check import check_fused_head

# --- models that keep documents apart ---------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", PACKED_MODELS)
def test_supported_models_are_isolated(name, training):
    model = packed_model(name)
    report = check_isolation(model, documents(3, 60, 200), training=training)
    assert report
    assert report.verdict == "isolated", str(report)
    assert report.model == type(model).__name__
    assert report.attention == model.config._attn_implementation
    assert report.mode == ("training" if training else "evaluation")
    assert report.leak > 1000 * report.difference


@pytest.mark.parametrize(
    ("vocabulary", "std", "seed"), [(49_152, 0.3, 3), (151_000, 0.02, 0), (151_000, 0.02, 2)]
)
def test_a_shallow_model_with_a_large_vocabulary_is_isolated(vocabulary, std, seed):
    # The head's sums over the vocabulary round more than two layers do.
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": std}
    config = LlamaConfig(vocab_size=vocabulary, **sizes, **heads)
    model = LlamaForCausalLM(config)
    install_attention(model, resolve_attention(model))
    model = with_fused_head(model)
    assert check_fused_head(model)
    report = check_isolation(model, documents(3, 60, 200), training=True, fused_head=True)
    assert report, str(report)
    assert report.leak > 1000 * report.noise, str(report)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "gpt2"])
def test_isolation_shows_through_the_fused_head(name):
    model = with_fused_head(packed_model(name))
    assert check_isolation(model, documents(3, 60, 200), training=True, fused_head=True)


@pytest.mark.parametrize("depth", [2, 16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_kernel_s_rounding_is_no_leak(implementation, depth):
    """Masked by position_ids, sums run in another order: 20 times the last bit of a logit here."""
    model = tiny_model("llama", attn_implementation=implementation, num_hidden_layers=depth)
    report = check_isolation(model, documents(30, 200, 400))
    assert report, str(report)


@pytest.mark.parametrize("initializer_range", [0.2, 0.02, 0.002])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "packed_documents"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bf16_models_are_not_refused(name, implementation, initializer_range):
    model = tiny_model(name, dtype=torch.bfloat16, initializer_range=initializer_range)
    model.set_attn_implementation(implementation)
    report = check_isolation(model, documents(30, 200, 400), training=True)
    assert report.verdict != "leaks", str(report)


def test_documents_on_one_side_of_a_threshold_are_isolated():
    for lengths in ((10, 20, 60), (100, 200, 210)):
        assert check_isolation(longrope(), documents(*lengths)), lengths
    assert check_isolation(dynamic_ntk(), documents(10, 20, 60))


def test_the_longest_document_may_fill_all_learned_positions():
    model = packed_model("gpt2")
    assert check_isolation(model, documents(512, 20))
    assert check_isolation(model, documents(512, 512))
    assert check_isolation(model, max_length=4096), "no probe runs past them by itself"


def test_dropout_that_a_model_reads_from_its_config_is_off():
    config = AutoConfig.for_model(
        "persimmon",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        pad_token_id=0,
        attention_dropout=0.5,
    )
    model = AutoModelForCausalLM.from_config(config).train()
    report = check_isolation(model, documents(10, 60))
    assert report, str(report)
    assert model.config.attention_dropout == 0.5


# --- models that leak ---------------------------------------------------------------------------


def assert_leaks(model, *arguments, **options):
    report = check_isolation(model, *arguments, **options)
    assert report.verdict == "leaks", str(report)
    assert not report
    assert report.difference > 100 * report.noise
    assert "LEAK" in str(report)
    assert report.model in str(report)
    return report


@pytest.mark.parametrize("training", [False, True])
def test_a_row_that_says_it_is_one_document_leaks(training):
    assert_leaks(packed_model("llama"), collator=OneDocument(), training=training)


@pytest.mark.parametrize("implementation", ["sdpa", "packed_documents"])
def test_a_leak_shows_in_bf16(implementation):
    model = tiny_model("llama", dtype=torch.bfloat16)
    model.set_attn_implementation(implementation)
    for training in (False, True):
        report = check_isolation(model, collator=OneDocument(), training=training)
        assert report.verdict == "leaks", str(report)


@pytest.mark.parametrize("share", [0.1, 1e-3])
def test_a_leak_much_weaker_than_attention_s_shows(share):
    assert_leaks(with_layer(AddRowMean, share=share))


@pytest.mark.parametrize("lengths", [(10, 20, 210), (10, 200, 210), (10, 210)], ids=str)
@pytest.mark.parametrize("model", [longrope, dynamic_ntk])
def test_a_threshold_between_the_documents_leaks(model, lengths):
    """However the documents lie around it; a probe of short documents passes."""
    report = assert_leaks(model(), documents(*lengths))
    assert report.probe == "after 210 tokens"
    assert check_isolation(model(), max_length=64)


def test_dynamic_ntk_leaks_among_documents_beyond_the_threshold_too():
    assert_leaks(dynamic_ntk(), documents(100, 200))


def test_a_leak_in_training_only_shows_in_training():
    model = with_layer(AddRowMean, only_in_training=True)
    assert check_isolation(model, training=False)
    assert assert_leaks(model, training=True).mode == "training"


@pytest.mark.parametrize("fused_head", [False, True])
@pytest.mark.parametrize("layer", [AddRowMean, PreviousToken])
def test_a_leak_that_is_not_attention_s_shows(layer, fused_head):
    model = with_fused_head(with_layer(layer))
    assert_leaks(model, documents(10, 60), fused_head=fused_head)


def test_a_kernel_that_computes_something_else_does_not_pass_for_rounding(monkeypatch):
    """Documents stay apart here, but they are not what the model makes of them alone."""

    def without_window(query, key, value, cu_seqlens, options, max_length):
        options = options._replace(window=None)
        return document_sdpa.document_attention(query, key, value, cu_seqlens, options)

    wrong = _attention_function(without_window, "sdpa")
    monkeypatch.setitem(AttentionInterface._global_mapping, document_sdpa.NAME, wrong)
    assert check_isolation(packed_model("llama"))
    assert_leaks(packed_model("mistral"))


def test_numbers_that_are_none_are_no_isolation():
    model = packed_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        check_isolation(model)


class Own(nn.Module):
    """A model from outside transformers: causal mean of earlier tokens, by position_ids or not."""

    def __init__(self, leaks, returns="logits"):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50)
        self.leaks, self.returns = leaks, returns

    def forward(self, input_ids, position_ids, **kwargs):
        x = self.embedding(input_ids)
        starts = torch.zeros_like(position_ids) if self.leaks else position_ids == 0
        document = starts.long().cumsum(-1)
        seen = (document[..., None] == document[:, None]).tril().float()
        logits = self.head(x + seen @ x / seen.sum(-1, keepdim=True))
        if self.returns == "logits":
            return SimpleNamespace(logits=logits)
        return logits if self.returns == "tensor" else (logits, None)


@pytest.mark.parametrize("returns", ["logits", "tensor", "tuple"])
def test_a_model_from_outside_transformers_is_judged_alike(returns):
    assert check_isolation(Own(leaks=False, returns=returns))
    tokens = [[i % 50 for i in range(length)] for length in (10, 90)]
    assert check_isolation(Own(leaks=False, returns=returns), tokens)
    report = assert_leaks(Own(leaks=True, returns=returns), tokens)
    assert (report.model, report.attention) == ("Own", "its native attention")


# --- nothing is left behind ---------------------------------------------------------------------


def everything(model):
    """Return all that a model holds: parameters, buffers, attributes and modes of its modules."""
    state = {}
    for path, module in model.named_modules():
        held = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            if torch.is_tensor(value):
                state[path, name] = (value.detach().clone(), id(value))
            elif not isinstance(value, dict):
                state[path, name] = value
    return state


def rng_states():
    python, (_, numpy, position, *_) = random.getstate(), np.random.get_state()
    return python, numpy.tolist(), position, torch.random.get_rng_state().tolist()


def assert_same_state(model, before):
    after = everything(model)
    for key, value in before.items():
        if isinstance(value, tuple) and torch.is_tensor(value[0]):
            assert torch.equal(after[key][0], value[0]), key
            assert after[key][1] == value[1], key
        else:
            assert after[key] is value or after[key] == value, key


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "build",
    [longrope, dynamic_ntk, lambda: packed_model("gpt2_dropout"), lambda: packed_model("gpt_oss")],
    ids=["longrope", "dynamic NTK", "dropout", "gpt_oss"],
)
def test_model_and_random_states_are_left_as_they_were(build, trained, asked):
    model = with_fused_head(build()).train(trained)
    model.get_input_embeddings().eval()  # frozen: its mode is not that of the rest
    model(input_ids=torch.tensor(documents(100)))  # dynamic frequencies keep what they last saw
    model.get_input_embeddings().neftune_noise_alpha = 5
    before, rng = everything(model), rng_states()
    config = copy.deepcopy(model.config.to_dict())
    check_isolation(model, documents(3, 60, 300), training=asked, fused_head=True)
    assert_same_state(model, before)
    assert rng_states() == rng
    assert model.config.to_dict() == config
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def count_forwards(model, *arguments, **options):
    count = 0

    def add_one(*_):
        nonlocal count
        count += 1

    handle = model.register_forward_pre_hook(add_one)
    check_isolation(model, *arguments, **options)
    handle.remove()
    return count


def test_forwards_are_few_and_equally_many_on_every_rank():
    """Ranks differ in their random state and in nothing else: a forward of FSDP waits for all."""
    model = packed_model("llama")
    counts = set()
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        counts.add(count_forwards(model, documents(3, 60, 200), training=True))
    (count,) = counts
    assert count <= 28
    assert count_forwards(model) <= 12


# --- wrapped models -----------------------------------------------------------------------------


# torch.compile reads .grad of hidden states where a graph breaks (torch 2.13).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_models_are_judged_without_compiling_a_graph_for_every_probe():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    for model, verdict in ((packed_model("llama"), "isolated"), (with_layer(AddRowMean), "leaks")):
        compiled = torch.compile(model, backend=backend)
        report = check_isolation(compiled, documents(3, 60, 200), training=True)
        assert (report.verdict, report.model) == (verdict, "LlamaForCausalLM")
        assert not graphs
        ids = torch.tensor(documents(17))
        expected = model(input_ids=ids, use_cache=False).logits
        # Hooks of the check that got into a graph would cut this to a few positions.
        torch.testing.assert_close(compiled(input_ids=ids, use_cache=False).logits, expected)
        assert graphs
        graphs.clear()
