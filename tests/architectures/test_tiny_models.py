"""The tiny models are small in every length, hold every kind of layer, and learn on every path."""

import pytest
import torch

from architectures.tiny_models import DOCUMENT_IDS, tiny_config, tiny_model
from architectures.tiny_tables import VOCAB_SIZE

SOME = [
    "bert",  # an encoder made to look back only
    "gpt_oss",  # sinks, which start at zero
    "jamba",  # attention, recurrence and experts by period
    "llama4",  # the text model of a composite, chunked attention
    "llava",  # a vision-language model: the text model is chosen by another configuration
    "mimo_v2_flash",  # sinks, a kind of layer and a kind of MLP that vary apart
    "qwen3_next",  # linear attention
]


@pytest.mark.parametrize("name", SOME)
def test_every_loss_moves_weights_and_windows_are_short(name):
    model = tiny_model(name)
    for parameter_name, parameter in model.named_parameters():
        assert parameter.any(), f"{parameter_name}: a path behind a closed gate cannot leak"
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(DOCUMENT_IDS.start, DOCUMENT_IDS.stop, (1, 60), generator=generator)
    logits = model(input_ids=input_ids, use_cache=False).logits
    assert logits.shape == (1, 60, VOCAB_SIZE)
    assert 1 < logits.abs().max() < 50
    torch.nn.functional.cross_entropy(logits[0], input_ids[0]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    again = tiny_model(name)(input_ids=input_ids, use_cache=False).logits
    torch.testing.assert_close(again, logits, rtol=0, atol=0)  # nothing is drawn by chance
    words = ("window", "chunk_", "block_size", "local_attention", "topk", "original_max")
    fields = tiny_config(name).get_text_config().to_dict()
    fields |= fields.get("rope_parameters") or {}
    lengths = {k: v for k, v in fields.items() if any(w in k for w in words) and type(v) is int}
    assert all(length <= 32 for length in lengths.values()), "longer than a short document"
