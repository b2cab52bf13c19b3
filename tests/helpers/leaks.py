"""Tiny models that leak, or leak beyond a threshold, and the documents to probe them with."""

import torch
from architectures import tiny_models as architectures
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from helpers.packed_models import packed_model
from helpers.tiny import VOCAB_SIZE, documents_of_lengths
from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.documents.boundaries import boundaries_of_row
from trl_packing.loss.lm_head import add_trained_positions_head


def hopeless():
    """A model that leaks through every backend, padded rows among them: all cells are mixed."""
    model = architectures.tiny_model("llama")
    layer = model.model.layers[0]
    layer.mlp = AddRowMean(layer.mlp, over=(0, 1))
    return model


def documents(*lengths):
    return [d["input_ids"] for d in documents_of_lengths(lengths)]


def with_fused_head(model):
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    add_trained_positions_head(model)
    return model


def longrope():
    """Phi-3, which takes other frequencies once any position of the batch passes 64."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [4.0] * 4, "original_max_position_embeddings": 64}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    sizes |= {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "max_position_embeddings": 512}
    lengths = {"original_max_position_embeddings": 64, "rope_parameters": rope}
    config = AutoConfig.for_model("phi3", **sizes, **heads, **lengths)
    model = AutoModelForCausalLM.from_config(config)
    install_attention(model, resolve_attention(model))
    return model.eval()


def dynamic_ntk():
    """Llama whose frequencies follow the longest position of the batch beyond 64."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return packed_model("llama", max_position_embeddings=64, rope_parameters=rope)


class OneDocument(PackedCollator):
    """The classic leak: the row's boundaries say that it is one document."""

    def __call__(self, documents):
        batch = super().__call__(documents)
        whole = boundaries_of_row(torch.tensor([batch["input_ids"].shape[1]]))
        return {**batch, **{name: value for name, value in whole.items() if name in batch}}


class AddRowMean(nn.Module):
    """Mixes all tokens of the row, behind the back of every attention."""

    def __init__(self, inner, only_in_training=False, share=0.1, over=(1,)):
        super().__init__()
        self.inner = inner
        self.over = over
        self.only_in_training = only_in_training
        self.share = share

    def forward(self, x):
        x = self.inner(x)
        if self.only_in_training and not self.training:
            return x
        return x + self.share * x.mean(self.over, True)


class PreviousToken(AddRowMean):
    """Mixes neighbors, as a short convolution does: only the first token of a document leaks."""

    def forward(self, x):
        x = self.inner(x)
        return x + self.share * x.roll(1, 1)


def with_layer(wrap, name="llama", **options):
    model = packed_model(name)
    layer = model.model.layers[0]
    layer.mlp = wrap(layer.mlp, **options)
    return model
