"""The tiny models are small in every length, hold every kind of layer, and learn on every path."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from architectures import tiny_models
from architectures.tiny_models import DOCUMENT_IDS, NotBuilt, tiny_config, tiny_model
from architectures.tiny_tables import VOCAB_SIZE

SOME = [
    "bert",  # an encoder made to look back only
    "deepseek_v3",  # latent attention, grouped experts
    "gemma3",  # a composite, windows
    "jamba",  # attention, recurrence and experts by period
    "llama",
    "llama4",  # the text model of a composite, chunked attention
    "llava",  # a vision-language model: the text model is chosen by another configuration
    "mamba2",  # no attention at all
    "mimo_v2_flash",  # sinks, a kind of layer and a kind of MLP that vary apart
    "qwen2_vl",  # positions in time, height and width
    "qwen3_next",  # linear attention
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
def test_every_window_and_chunk_is_shorter_than_a_short_document(name):
    config = tiny_config(name).get_text_config().to_dict()
    words = ("window", "chunk_", "block_size", "local_attention", "topk", "original_max")
    lengths = {
        field: value
        for field, value in fields(config)
        if any(word in field for word in words) and type(value) is int
    }
    assert all(length <= 32 for length in lengths.values()), lengths


def test_nearly_every_architecture_has_a_tiny_configuration():
    refused = {}
    for name in tiny_models.names():
        try:
            tiny_config(name)
        except NotBuilt as reason:
            refused[name] = str(reason)
    assert len(refused) <= len(tiny_models.names()) - 165, refused
    assert all("not built:" in reason for reason in refused.values())


def test_a_seed_gives_the_same_weights_and_leaves_the_callers_chance_alone():
    expected = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    first, second, other = tiny_model("llama"), tiny_model("llama"), tiny_model("llama", seed=1)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=expected))
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_no_parameter_is_zero():
    """Gates and sinks start at zero in some models, and a path behind a closed gate cannot leak."""
    for name in ("gemma2", "gpt_oss", "granite_swa"):
        if name in tiny_models.names():
            for parameter_name, parameter in tiny_model(name).named_parameters():
                assert parameter.any(), (name, parameter_name)
