"""Modules that mix documents are found by measuring, run by document, and left alone otherwise."""

import copy

import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import alone, assert_exact, make_trainer, run
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaModel

from trl_packing import enable_packing

DOCUMENTS = tiny_documents((5, 12, 20, 9))


def shifted(x):
    """Return `x` plus what stands one token before: each document alone begins with zeros."""
    return x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1]


class Shifts(nn.Module):
    """A layer with a state, in a model that has none."""

    def __init__(self, inner, only_in_training=False):
        super().__init__()
        self.inner, self.only_in_training = inner, only_in_training

    def forward(self, hidden_states):
        x = self.inner(hidden_states)
        return x if self.only_in_training and not self.training else shifted(x)


class ShiftsAndAttends(nn.Module):
    """The same in front of attention, which boundaries of the row would break."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states, cu_seq_lens_q=None, **kwargs):
        kwargs |= {"cu_seq_lens_q": cu_seq_lens_q}
        return self.inner(hidden_states=shifted(hidden_states), **kwargs)


class ShiftingModel(LlamaModel):
    """Mixes documents in the backbone itself, in no module inside."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = shifted(output.last_hidden_state)
        return output


def llama_with(only_in_training=False):
    model = tiny_model("llama")
    model.model.layers[1].mlp = Shifts(model.model.layers[1].mlp, only_in_training)
    return model


def attention_with():
    model = tiny_model("llama")
    model.model.layers[1].self_attn = ShiftsAndAttends(model.model.layers[1].self_attn)
    return model


def shifting_outside():
    model = tiny_model("llama")
    model.model.__class__ = ShiftingModel
    return model


def with_adapter():
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    return get_peft_model(llama_with(), config)


FOUND = {
    "rwkv": (lambda: tiny_model("rwkv"), {"ZeroPad2d", "RwkvSelfAttention"}),
    "minimax": (lambda: tiny_model("minimax"), {"MiniMaxLightningAttention"}),
    "recurrent_gemma": (lambda: tiny_model("recurrent_gemma"), {"RecurrentGemmaRecurrentBlock"}),
    "llama": (lambda: tiny_model("llama"), set()),
    "a layer": (llama_with, {"Shifts"}),
    "a layer below PEFT": (with_adapter, {"Shifts"}),
    "the backbone": (shifting_outside, set()),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_modules_that_mix_documents_are_found(name):
    make, expected = FOUND[name]
    model = make()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    enable_packing(model, attention="by_document", isolation_check="warn")
    found = {type(m).__name__ for m in model.modules() if "forward" in vars(m)}
    assert {name for name in found if not name.endswith(("Model", "ForCausalLM"))} == expected
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


MIXING = {llama_with: "by_document", attention_with: "by_document", shifting_outside: "padded"}


@pytest.mark.parametrize(("make", "backend"), MIXING.items())
def test_a_run_on_a_model_that_mixes_documents_is_exact(make, backend, tmp_path):
    model = make()
    found = run(model, DOCUMENTS, tmp_path)
    assert found.trainer.attention.backend == backend
    assert_exact(found, alone(model, DOCUMENTS))


def test_a_layer_that_mixes_only_in_training_is_found_after_an_evaluation(tmp_path):
    model = llama_with(only_in_training=True)
    rows = Dataset.from_list(DOCUMENTS)
    trainer = make_trainer(tmp_path, rows, model, evaluated=rows, max_length=80, max_steps=1)
    trainer.evaluate()
    assert trainer.attention.backend == "documents"
    trainer.train()
    assert trainer.attention.backend == "by_document"


def test_without_a_check_nothing_finds_the_modules(tmp_path):
    options = {"attention": "by_document", "isolation_check": "off"}
    words = r"attention='by_document' and isolation_check='off' exclude each other: .*; set isol"
    with pytest.raises(ValueError, match=words):
        enable_packing(llama_with(), **options)
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, DOCUMENTS, llama_with(), **options)
