"""The loss of a plain trainer's rows: that of transformers, in less memory."""

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from trl_packing.loss.next_token import next_token_loss


@pytest.mark.parametrize("length", [1, 2, 1024, 1025, 2600])
@pytest.mark.parametrize("num_items", [None, 77])
def test_it_is_the_loss_of_transformers(length, num_items):
    torch.manual_seed(0)
    logits = torch.randn(2, length, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (2, length))
    labels[:, ::3] = -100
    expected = ForCausalLMLoss(logits, labels, 11, num_items) if length > 1 else logits.sum() * 0
    (reference,) = torch.autograd.grad(expected, logits)
    loss = next_token_loss(logits, labels, num_items)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0, check_dtype=False)
    torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-9)  # float64 logits


def test_no_copy_of_all_logits_waits_for_the_backward():
    logits = torch.randn(1, 8192, 64, dtype=torch.bfloat16, requires_grad=True)
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        next_token_loss(logits, torch.zeros(1, 8192, dtype=torch.int64))
    saved.pop(logits.untyped_storage().data_ptr(), None)
    assert sum(saved.values()) < logits.nbytes / 4
