"""A quantized layer that passes a wrong gradient is named before the first step."""

import pytest
import torch
from helpers.drop_in import trainer_for
from helpers.tiny import tiny_model
from peft import LoraConfig
from torch import nn


class Quantized(nn.Parameter):
    """A class of its own, as the weights of torchao 0.18."""


class Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, share):
        ctx.share = share
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.share, None


class Layer(nn.Linear):
    """Passes a share of the gradient; None rounds the activations, as dynamic int8 does."""

    share: float | None = 1.0

    def forward(self, inputs):
        if self.share is None:
            scale = inputs.abs().amax(-1, keepdim=True) / 127
            return super().forward((inputs / scale).round() * scale)
        return super().forward(Passes.apply(inputs, self.share))


def run(folder, share) -> None:
    model = tiny_model()
    for block in model.model.layers:
        block.mlp.down_proj.__class__ = Layer
        block.mlp.down_proj.share = share
        block.mlp.down_proj.weight = Quantized(block.mlp.down_proj.weight.detach())
    lora = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM")
    trainer_for(folder, model=model, arguments={"peft_config": lora}, max_steps=1).train()


@pytest.mark.parametrize("share", [1.0, 0.1, 0.0, None])
def test_a_layer_that_passes_a_wrong_gradient_is_named(tmp_path, caplog, share):
    run(tmp_path, share)
    found = [r.message for r in caplog.records if "does not pass its gradient" in r.message]
    assert len(found) == (share != 1.0)
    assert all("layers.0.mlp.down_proj (Quantized)" in message for message in found)
