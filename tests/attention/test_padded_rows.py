"""Documents of a packed row as rows of padded forwards: which share one, and how they come back."""

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from harness import TWO_RUNS
from helpers.tiny import tiny_model
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast

from trl_packing import PackedCollator
from trl_packing.attention.padded_rows import group_documents, pad_packed_calls
from trl_packing.documents.host_row import for_kernels

lengths_of_documents = st.lists(st.integers(1, 200), min_size=1, max_size=40)
few_lengths = st.lists(st.sampled_from([3, 8, 9]), min_size=1, max_size=40)


@given(st.one_of(lengths_of_documents, few_lengths), st.lists(st.integers(1, 150), max_size=3))
def test_a_forward_holds_what_it_may(lengths, thresholds):
    boundaries = [0, *accumulate(lengths)]
    groups = {}
    for equal in (False, True):
        made = list(group_documents(boundaries, thresholds, equal))
        assert sorted(d for group in made for d in group) == list(range(len(lengths)))
        groups[equal] = [[lengths[d] for d in group] for group in made]
    for group in groups[False]:
        cells = max(group) * len(group)
        assert group[0] == max(group), "the longest document comes first"
        assert cells - sum(group) <= cells / 8, "padding"
        assert cells <= sum(lengths)
        for threshold in thresholds:
            assert len({length <= threshold for length in group}) == 1
    assert all(len(set(group)) == 1 for group in groups[True])
    assert len(groups[True]) == len(set(lengths)), "and all of a length share a forward"


LENGTHS = [5, 2, 5, 4, 1]
# Their ids are 1, 2, 3, ... over all of the row.
DOCUMENTS = [
    {"input_ids": list(range(end - length + 1, end + 1))}
    for length, end in zip(LENGTHS, accumulate(LENGTHS), strict=True)
]
FACTORS = torch.tensor([1.0, 10.0, 100.0])
IN_ORDER = torch.arange(1.0, sum(LENGTHS) + 1)[None, :, None] * FACTORS


@dataclass
class PlainOutput:
    hidden: Tensor
    aux_loss: Tensor | None = None


class Rows(nn.Module):
    """Returns values that say where they come from: the token id, times 1, 10 and 100.

    `make(values, labels)` builds the output from values ``(rows, T, 3)``.
    """

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(FACTORS)
        self.make = make

    def forward(self, input_ids, attention_mask=None, labels=None, **kwargs):
        return self.make(input_ids[..., None] * self.weight, labels)


def padded(make, documents=DOCUMENTS):
    """Return what a packed call gave."""
    model = Rows(make)
    pad_packed_calls(model, "padded")
    return model(**PackedCollator()(documents))


def test_values_come_back_in_the_order_of_the_packed_row():
    def output(x, labels):
        # Mixtures of experts have rows and tokens as one dimension; virtual tokens come first.
        virtual = torch.cat([x[:, :1] * 0 - 1, x[:, :1] * 0 - 2, x], 1)
        experts = MoeModelOutputWithPast(router_logits=(x.flatten(0, 1), None))
        return PlainOutput(x), experts, virtual, None, "name"

    hidden, experts, virtual, *_ = padded(output)
    assert hidden.hidden.equal(IN_ORDER)
    assert experts.router_logits[0][None].equal(IN_ORDER)
    assert virtual.equal(IN_ORDER)
    _, experts, *_ = padded(output, [])  # a rank without documents
    assert experts.router_logits[0].shape == (1, 3)


def test_the_balance_of_experts_of_several_forwards_is_refused():
    with pytest.raises(NotImplementedError, match=r"router_aux_loss_coef=0\.0"):
        padded(lambda x, _: PlainOutput(x, x.sum()))


def test_losses_are_weighted_by_their_trained_tokens():
    def mean_of_forward(values, labels):  # as of transformers: over shifted labels
        loss = values[:, :-1, 0][labels[:, 1:] != -100].mean()
        return CausalLMOutputWithPast(loss=loss, logits=values)

    # The first tokens of documents are masked: of a document all but its last token predict.
    predicting = [i for d in DOCUMENTS for i in d["input_ids"][:-1]]
    expected = sum(predicting) / len(predicting)
    assert padded(mean_of_forward).loss.item() == pytest.approx(expected, rel=TWO_RUNS)


def test_losses_with_one_divisor_are_added():
    model = tiny_model("llama")
    row = for_kernels(PackedCollator()(DOCUMENTS))
    expected = model(**row, num_items_in_batch=7).loss.item()
    pad_packed_calls(model, "padded")
    assert model(**row, num_items_in_batch=7).loss.item() == pytest.approx(expected, rel=TWO_RUNS)


@pytest.mark.parametrize("virtual", [0, 1, 3])
def test_scores_of_a_head_that_shifts_come_back_in_the_order_of_the_packed_row(virtual):
    """Per-token scores ``(rows, T - 1)``, zero where the label is masked; virtual tokens first."""

    def scores(x, labels):
        mask = nn.functional.pad(labels, (virtual, 0), value=-100)[:, 1:] != -100
        targets = nn.functional.pad(x[..., 0], (virtual, 0))[:, 1:]
        return CausalLMOutputWithPast(loss=x.sum() * 0, logits=targets * mask)

    batch = PackedCollator()(DOCUMENTS)
    output = padded(scores)
    expected = batch["input_ids"][:, 1:] * (batch["labels"][:, 1:] != -100)
    assert torch.equal(output.logits[:, -expected.shape[1] :], expected.float())
