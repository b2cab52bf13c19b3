"""The tiny models are small in every length, hold every kind of layer, and learn on every path."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from architectures import tiny_models
from architectures.tiny_models import (
    DOCUMENT_IDS,
    NotBuilt,
    tiny_config,
    tiny_model,
)
from architectures.tiny_tables import VOCAB_SIZE

SOME = [
    "bert",  # an encoder made to look back only
    "deepseek_v3",  # latent attention, grouped experts
    "gemma3",  # a composite, windows
    "gpt_neo",  # layers named in a list of its own
    "jamba",  # attention, recurrence and experts by period
    "llama",
    "llama+dynamic",
    "llama4",  # the text model of a composite, chunked attention
    "llava",  # a vision-language model: the text model is chosen by another configuration
    "mamba2",  # no attention at all
    "mimo_v2_flash",  # sinks, a kind of layer and a kind of MLP that vary apart
    "phi3+longrope",
    "qwen2",  # windows off by default
    "qwen2_vl",  # positions in time, height and width
    "qwen3_next",  # linear attention
    "zamba2",  # layers that are both
]


def fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield str(name), value
        if isinstance(value, dict):
            yield from fields(value)


@pytest.mark.parametrize("name", SOME)
def test_a_row_runs_forward_and_backward_and_every_loss_moves_weights(name):
    model = tiny_model(name)
    assert model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(DOCUMENT_IDS.start, DOCUMENT_IDS.stop, (1, 60), generator=generator)
    logits = model(input_ids=input_ids, use_cache=False).logits
    assert logits.shape == (1, 60, VOCAB_SIZE)
    assert 1 < logits.abs().max() < 50
    torch.nn.functional.cross_entropy(logits[0], input_ids[0]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all(gradient.any() for gradient in gradients)
    again = model(input_ids=input_ids, use_cache=False).logits
    torch.testing.assert_close(again, logits, rtol=0, atol=0)  # nothing is drawn by chance


@pytest.mark.parametrize("name", SOME)
def test_a_token_moves_the_logits_of_the_tokens_after_it(name):
    """The models serve this: a leak between documents is far above rounding."""
    model = tiny_model(name).eval()
    input_ids = torch.arange(40, 80)[None]
    other = input_ids.clone()
    other[0, 10] = 5
    with torch.no_grad():
        rows = [model(input_ids=ids, use_cache=False).logits for ids in (input_ids, other)]
    moved = (rows[0] - rows[1]).abs().amax(-1)[0]
    assert moved[11:].max() > 0.1


@pytest.mark.parametrize("name", SOME)
def test_every_window_and_chunk_is_shorter_than_a_short_document(name):
    config = tiny_config(name).get_text_config().to_dict()
    words = ("window", "chunk_", "block_size", "local_attention", "topk", "original_max")
    lengths = {
        field: value
        for field, value in fields(config)
        if any(word in field for word in words) and type(value) is int
    }
    assert all(length <= 32 for length in lengths.values()), lengths


def test_a_window_is_on_where_it_is_off_by_default():
    config = tiny_config("qwen2")
    assert config.sliding_window == 8
    assert config.layer_types == ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("jamba", {"linear_attention", "full_attention"}),
        ("lfm3", {"conv", "full_attention", "sliding_attention"}),
        ("nemotron_h", {"linear_attention", "moe", "full_attention", "mlp"}),
        ("qwen3_next", {"linear_attention", "full_attention"}),
    ],
)
def test_every_kind_of_layer_occurs(name, kinds):
    if name not in tiny_models.names():
        pytest.skip(f"this transformers has no {name}")
    assert set(tiny_config(name).layer_types) == kinds


def test_dense_and_sparse_layers_both_occur():
    layers = tiny_model("deepseek_v3").model.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False, True]


def test_nearly_every_architecture_has_a_tiny_configuration():
    refused = {}
    for name in tiny_models.names():
        try:
            tiny_config(name)
        except NotBuilt as reason:
            refused[name] = str(reason)
    assert len(refused) <= len(tiny_models.names()) - 165, refused
    assert all("not built:" in reason for reason in refused.values())


def test_vision_language_models_are_those_that_are_not_language_models_already():
    vision = tiny_models.vision_names()
    assert not set(vision) & set(tiny_models.names())
    assert {"llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"} <= set(vision)


def test_nearly_every_vision_language_model_runs_on_text_alone():
    input_ids = torch.arange(40, 60)[None]
    refused = {}
    for name in tiny_models.vision_names():
        try:
            model = tiny_model(name)
        except NotBuilt as reason:
            refused[name] = str(reason)
            continue
        assert sum(parameter.numel() for parameter in model.parameters()) < 1e7, name
        with torch.no_grad():
            logits = model(input_ids=input_ids, use_cache=False).logits
        assert logits.shape == (1, 20, VOCAB_SIZE), name
    assert len(refused) <= len(tiny_models.vision_names()) - 45, refused
    assert all("not built:" in reason for reason in refused.values())


def test_sections_of_rope_fill_the_head():
    for name in ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm4v_moe"):
        if name in tiny_models.vision_names():
            text = tiny_config(name).get_text_config()
            factor = text.rope_parameters.get("partial_rotary_factor", 1.0)
            assert sum(text.rope_parameters["mrope_section"]) == 16 * factor / 2, name


def test_a_seed_gives_the_same_weights_and_leaves_the_callers_chance_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_no_parameter_is_zero():
    """Gates and sinks start at zero in some models, and a path behind a closed gate cannot leak."""
    for name in ("gemma2", "gpt_oss", "granite_swa"):
        if name in tiny_models.names():
            for parameter_name, parameter in tiny_model(name).named_parameters():
                assert parameter.any(), (name, parameter_name)


def test_an_unknown_name_says_where_the_known_ones_are():
    with pytest.raises(ValueError, match=r"'llamma'.*tiny_models\.names\(\)"):
        tiny_config("llamma")


@pytest.mark.parametrize(
    ("name", "reason"),
    [("vision-encoder-decoder", "encoder-decoder"), ("kosmos-2", "does not run on text alone")],
)
def test_a_vision_model_that_is_no_language_model_says_so(name, reason):
    with pytest.raises(NotBuilt, match=f"{name} is not built: .*{reason}"):
        tiny_model(name)


def test_what_cannot_be_built_says_why():
    if "gemma4_assistant" not in tiny_models.names():
        pytest.skip("this transformers has no draft heads")
    with pytest.raises(NotBuilt, match="draft head of another model"):
        tiny_model("gemma4_assistant")
