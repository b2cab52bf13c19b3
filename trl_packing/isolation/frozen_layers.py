"""Measures whether quantized layers pass on the gradient of the layers behind them.

    moved     layer(x + d) − layer(x), at random x and d
    passed    ⟨gradient of ⟨layer(x), moved⟩ for x, d⟩, which is ⟨moved, moved⟩ for a linear layer

Weights before a layer that passes less train on a wrong gradient, packed or not. Where activations
are rounded, none passes, such as with the dynamic int8 activations of torchao 0.18.
"""

import logging

import torch
from torch import nn

logger = logging.getLogger(__name__)


def check_frozen_layers(model: nn.Module) -> None:
    """Warn of the first layer with weights of a library's own class that passes no right gradient.

    Weights of bitsandbytes are whole numbers, and pass it.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or type(layer.weight) is nn.Parameter:
            continue
        if layer.weight.is_floating_point() and not passes_gradient(layer):
            logger.warning(
                f"the layer {name} ({type(layer.weight).__name__}) does not pass its gradient, so "
                "weights before it train on a wrong one; quantize weights only, not activations, "
                "or load the base unquantized"
            )
            return


@torch.enable_grad()
def passes_gradient(layer: nn.Linear) -> bool:
    """Return whether the gradient behind `layer` passes it, as far as rounding lets see."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 16, layer.in_features, generator=generator)
    inputs, step = drawn.to(layer.weight.device, layer.weight.dtype)
    outputs = layer(inputs.requires_grad_())
    if not outputs.requires_grad:
        return False
    moved = (layer(inputs + step) - outputs).detach()
    (passed,) = torch.autograd.grad(outputs, inputs, moved)
    return bool(((passed * step).sum() / moved.square().sum() - 1).abs() < 0.5)
