"""The balance of experts is a mean over the tokens of a step, whatever its micro-batches hold."""

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import one_at_a_time, packed_step, tiny_documents
from torch import nn

COEFFICIENT = 0.5


def balance(model: nn.Module, documents: list[dict]) -> torch.Tensor:
    """Return the balance of experts over the real tokens of one micro-batch."""
    rows = [torch.tensor(d["input_ids"]) for d in documents]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.stack([torch.arange(ids.shape[1]) < len(row) for row in rows]).long()
    options = {"use_cache": False, "output_router_logits": True}
    return model(input_ids=ids, attention_mask=mask, **options).aux_loss


def test_the_balance_is_weighted_by_the_tokens_of_its_micro_batch(tmp_path):
    """Micro-batches of 60 and 31 tokens weigh 60 : 31; TRL's mean would weigh them 1 : 1."""

    def build():
        model = tiny_model("qwen3_moe")
        model.config.output_router_logits = True
        model.config.router_aux_loss_coef = COEFFICIENT
        return model

    documents = tiny_documents((60, 20, 11))  # no other bins of 60 tokens can be made
    layout = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    layout["router_aux_loss_coef"] = COEFFICIENT
    _, packed = packed_step(build(), documents, str(tmp_path), max_length=60, **layout)
    tokens = one_at_a_time(tiny_model("qwen3_moe"), documents)

    def expected(*weights):
        model = build().train()
        parts = zip(weights, (documents[:1], documents[1:]), strict=True)
        added = COEFFICIENT * sum(weight * balance(model, part) for weight, part in parts)
        added.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return tokens.loss + added.item(), {
            n: tokens.gradients.get(n, 0) + gradients.get(n, 0) for n in packed.gradients
        }

    loss, gradients = expected(60 / 91, 31 / 91)
    assert packed.loss == pytest.approx(loss, rel=1e-5)
    largest = max(float(g.abs().max()) for g in gradients.values())
    for parameter, gradient in packed.gradients.items():
        torch.testing.assert_close(gradient, gradients[parameter], rtol=0, atol=1e-5 * largest)
    assert packed.loss != pytest.approx(expected(1 / 2, 1 / 2)[0], rel=1e-5), "the control"


def test_padding_in_the_balance_is_refused(tmp_path):
    wrong = {"router_aux_loss_coef": 0.1, "pad_to_multiple_of": 8}
    with pytest.raises(ValueError, match=r"pad_to_multiple_of .*router_aux_loss_coef=0\.0"):
        packed_step(tiny_model("mixtral"), tiny_documents(), str(tmp_path), **wrong)
