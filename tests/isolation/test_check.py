"""The check passes isolated models, reports leaks, and leaves no trace on the model."""

import copy
import dataclasses
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from architectures import tiny_models as architectures
from architectures.tiny_step import tiny_documents
from harness import alone, assert_exact, run
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
from helpers.tiny import PACKED_MODELS, tiny_model
from transformers import AttentionInterface

from trl_packing import check_isolation
from trl_packing.attention import document_sdpa
from trl_packing.attention.interface import _attend
from trl_packing.isolation import check
from trl_packing.isolation.check import IsolationReport, check_fused_head
from trl_packing.isolation.probes import MIN_TOKENS, SHORT


def assert_leaks(model, *arguments, **options):
    report = check_isolation(model, *arguments, **options)
    assert report.verdict == "leaks", str(report)
    assert not report
    assert report.difference > 100 * report.noise
    return report


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", PACKED_MODELS)
def test_supported_models_are_isolated_and_their_leaks_show(name, training):
    model = packed_model(name)
    report = check_isolation(model, documents(3, 60, 200), training=training)
    assert report, str(report)
    assert report.leak > 1000 * report.difference
    assert_leaks(model, collator=OneDocument(), training=training)


def test_a_shallow_model_with_a_large_vocabulary_is_isolated():
    # The head's sums over the vocabulary round more than two layers do.
    model = with_fused_head(packed_model("llama", vocab_size=49_152, initializer_range=0.3))
    assert check_fused_head(model)
    report = check_isolation(model, documents(3, 60, 200), training=True, fused_head=True)
    assert report, str(report)
    assert report.leak > 1000 * report.noise, str(report)


class ScaledHead(torch.nn.Linear):
    """A head like Dory's, whose scale of each token is 1 until it is trained."""

    def __init__(self, head, trained):
        super().__init__(head.in_features, head.out_features, bias=False)
        self.weight = head.weight
        self.scale = torch.nn.Parameter(torch.ones(head.out_features), requires_grad=trained)

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.parametrize("trained", [True, False])
def test_what_a_head_trains_beside_a_matrix_gets_its_gradient(trained, tmp_path):
    model = tiny_model("llama")
    model.set_output_embeddings(ScaledHead(model.lm_head, trained))
    rows = [{"input_ids": ids, "labels": ids} for ids in documents(9, 20, 30)]
    expected = alone(model, rows)
    assert_exact(run(model, rows, tmp_path, per_device_train_batch_size=3), expected)
    assert ("lm_head.scale" in expected.exact.gradients) == trained
    assert check_fused_head(with_fused_head(model)) != trained


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_another_kernel_s_rounding_is_no_leak(implementation):
    """Masked by position_ids, sums run in another order: 20 times the last bit of a logit here."""
    model = tiny_model("llama", attn_implementation=implementation, num_hidden_layers=16)
    report = check_isolation(model, documents(30, 200, 400))
    assert report, str(report)


@pytest.mark.parametrize("implementation", ["sdpa", "packed_documents"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_bf16_models_are_not_refused_and_their_leaks_show(name, implementation):
    model = tiny_model(name, dtype=torch.bfloat16)
    model.set_attn_implementation(implementation)
    report = check_isolation(model, documents(30, 200, 400), training=True)
    assert report.verdict != "leaks", str(report)
    for training in (False, True) if name == "llama" else ():
        report = check_isolation(model, collator=OneDocument(), training=training)
        assert report.verdict == "leaks", str(report)


def test_a_leak_that_bf16_hides_shows_on_float32_weights(monkeypatch):
    for share, verdict in ((0.01, "leaks"), (0.0, "isolated")):
        model = with_layer(AddRowMean, share=share).to(torch.bfloat16)
        before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
        report = check_isolation(model, documents(30, 200))
        assert (report.verdict, report.in_float32) == (verdict, share > 0), str(report)
        for name, parameter in model.named_parameters():
            assert id(parameter) == before[name][0]
            assert torch.equal(parameter, before[name][1])
    model = with_layer(AddRowMean, share=0.01).to(torch.bfloat16)
    monkeypatch.setattr(check, "_COPY_BYTES", 0)  # the copy would be too large
    report = check_isolation(model, documents(30, 200))
    assert (report.verdict, report.in_float32) == ("isolated", False), str(report)


def test_the_words_say_how_far_rounding_lets_a_leak_show():
    """bf16 weights of SmolLM2 in which a third of a leak may be rounding."""
    report = IsolationReport("isolated", 0.84, 1.44, 20.4, "documents", "Llama", "sdpa", "training")
    assert "isolated, as far as rounding lets it show" in str(report)
    assert "as far as" not in str(dataclasses.replace(report, difference=0.2))


def test_the_longest_document_may_fill_all_learned_positions():
    assert check_isolation(packed_model("gpt2"), documents(512, 512))
    assert check_isolation(packed_model("gpt2"), max_length=4096), "no probe runs past them"


def test_dropout_that_a_model_reads_from_its_config_is_off():
    model = architectures.tiny_model("persimmon", attention_dropout=0.5)
    rows = [d["input_ids"] for d in tiny_documents((10, 60))]
    report = check_isolation(model, rows, training=True)
    assert report, str(report)
    assert model.config.attention_dropout == 0.5


def test_a_leak_much_weaker_than_attention_s_shows():
    assert_leaks(with_layer(AddRowMean, share=1e-3))


@pytest.mark.parametrize("lengths", [(10, 20, 210), (10, 200, 210), (10, 210)], ids=str)
@pytest.mark.parametrize("model", [longrope, dynamic_ntk])
def test_a_threshold_between_the_documents_leaks(model, lengths):
    """However the documents lie around it; documents on one side of it pass."""
    report = assert_leaks(model(), documents(*lengths))
    assert report.probe == "after 210 tokens"
    assert check_isolation(model(), max_length=64)
    assert check_isolation(model(), documents(10, 20, 60))


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

    wrong = partial(_attend, without_window, "sdpa")
    monkeypatch.setitem(AttentionInterface._global_mapping, document_sdpa.NAME, wrong)
    assert check_isolation(packed_model("llama"))
    assert_leaks(packed_model("mistral"))


@pytest.mark.parametrize("rounds_alike", [False, True])
def test_a_document_that_rounds_more_than_the_first_is_measured_again(rounds_alike, monkeypatch):
    """Unless its own rounding explains the difference, it leaks."""
    alone, leak = torch.ones(4, 3), torch.full((4, 3), 2.0)

    def measure(self, probe, rounds):
        return [alone], [alone if probe.name == SHORT else alone + 1e-3], [leak]

    def rounded(self, probe):
        return alone if rounds_alike else alone + 1e-3

    monkeypatch.setattr("trl_packing.isolation.check._Runs.measure", measure)
    monkeypatch.setattr("trl_packing.isolation.check._Runs.rounded", rounded)
    report = check_isolation(packed_model("llama"), documents(40, 60))
    assert report.verdict == ("leaks" if rounds_alike else "isolated")


class NoNumbersInALaterRow(AddRowMean):
    """Computes NaN in rows that are longer than the first ones of the short probe."""

    def forward(self, x):
        x = self.inner(x)
        return x * torch.nan if x.shape[1] > 23 + MIN_TOKENS else x


def test_a_later_row_without_numbers_is_a_leak():
    report = check_isolation(with_layer(NoNumbersInALaterRow))
    assert (report.verdict, bool(report)) == ("leaks", False), str(report)
    assert math.isnan(report.difference)


def test_numbers_that_are_none_are_no_isolation():
    model = packed_model("llama")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        check_isolation(model)


def everything(model):
    """Return parameters, all buffers, modes of modules, random states and the configuration."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    modules = list(model.modules())
    return {
        "tensors": {name: tensor.detach().clone() for name, tensor in tensors},
        "modes": [module.training for module in modules],
        "attributes": [sorted(vars(module)) for module in modules],
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules),
        "random": (random.getstate(), np.random.get_state()[1].tolist()),
        "torch": torch.random.get_rng_state(),
        "config": copy.deepcopy(model.config.to_dict()),
    }


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", ["longrope", "dynamic_ntk", "gpt2_dropout", "gpt_oss"])
def test_model_and_random_states_are_left_as_they_were(name, trained):
    own = {"longrope": longrope, "dynamic_ntk": dynamic_ntk}
    model = with_fused_head(own[name]() if name in own else packed_model(name)).train(trained)
    model.get_input_embeddings().eval()  # frozen: its mode is not that of the rest
    model(input_ids=torch.tensor(documents(100)))  # dynamic frequencies keep what they last saw
    for asked in (None, False, True):
        before = everything(model)
        check_isolation(model, documents(3, 60, 300), training=asked, fused_head=True)
        after = everything(model)
        for what in ("tensors", "torch"):
            torch.testing.assert_close(after.pop(what), before.pop(what), rtol=0, atol=0)
        assert after == before


@pytest.mark.parametrize("ignores_mask", [False, True])
def test_the_row_is_longer_than_what_an_index_keeps(ignores_mask, monkeypatch):
    """Shorter rows show nothing: the index keeps all keys, and attention masks those of others."""
    model = architectures.tiny_model("deepseek_v32", index_topk=150)
    indexer = type(next(m for m in model.modules() if type(m).__name__.endswith("Indexer")))
    forward = indexer.forward

    def rank_all_keys(self, hidden, queries, positions, mask, *args, **kwargs):
        causal = torch.ones_like(mask, dtype=torch.bool).tril()
        return forward(self, hidden, queries, positions, causal, *args, **kwargs)

    if ignores_mask:
        monkeypatch.setattr(indexer, "forward", rank_all_keys)
    report = check_isolation(model, attention="model")
    assert bool(report) != ignores_mask
    if ignores_mask:
        assert (report.verdict, report.probe) == ("leaks", "behind 150 tokens")


def test_ties_of_an_index_are_no_leaks_of_tokens():
    """The scores of one head of an index are often equal; the length of the row decides then."""
    report = assert_leaks(architectures.tiny_model("deepseek_v32", index_n_heads=1))
    assert "DIFFER in a packed row, whatever the others contain" in str(report)
    report = assert_leaks(packed_model("llama"), collator=OneDocument())  # the control
    assert "documents LEAK into each other" in str(report)
