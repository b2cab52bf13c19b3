"""A model that was trained here goes anywhere: pickled, copied, and read without this package."""

import copy
import pickle

import pytest
import torch
from datasets import Dataset
from helpers.by_hand import trainer_for
from helpers.tiny import documents_of_lengths, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_packing import PackedCollator, enable_packing

DOCUMENTS = documents_of_lengths([3, 21, 17, 5, 30, 9], prompt=2)
IDS = torch.tensor([DOCUMENTS[2]["input_ids"]])


def lora(model):
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def alone(model, documents):
    rows = [torch.tensor([d["input_ids"]]) for d in documents]
    return torch.cat([model(input_ids=row, use_cache=False).logits for row in rows], 1)


class Look(TrainerCallback):
    """Keeps the attention and a pickle of the model within the run."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.attention = str(model.config._attn_implementation)
        self.pickled = pickle.dumps(model)


@pytest.mark.parametrize("wrap", [lambda model: model, lora], ids=["full", "lora"])
def test_a_run_leaves_the_attention_as_it_came_and_a_pickle_does_not_name_ours(wrap, tmp_path):
    model = wrap(tiny_model("llama", attn_implementation="eager"))
    look = Look()
    rows = Dataset.from_list(DOCUMENTS)
    options = {"callbacks": [look], "learning_rate": 0.01}
    run = trainer_for(model, DOCUMENTS, tmp_path, evaluated=rows, **options)
    for act in (run.train, run.evaluate, lambda: run.predict(rows)):
        act()
        assert type(run.model.config._attn_implementation) is str
        assert run.model.config._attn_implementation == "eager"
    assert look.attention.startswith("packed_documents"), "the kernel that trained it"
    assert b"trl_packing" not in look.pickled
    assert b"packed_documents" not in look.pickled
    loaded = pickle.loads(look.pickled).eval()
    trained = run.model.eval()
    found, expected = (m(input_ids=IDS, use_cache=False).logits for m in (loaded, trained))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def enabled(model, folder):
    enable_packing(model)
    return model


def of_trained(model, folder):
    run = trainer_for(model, DOCUMENTS, folder)
    run.train()
    return run.model


@pytest.mark.parametrize("make", [enabled, of_trained], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrap", [lambda model: model, lora], ids=["full", "lora"])
def test_a_copy_computes_with_its_own_weights(make, wrap, tmp_path):
    """In ordinary calls, in packed ones and in those of the fused head, which TRL's is under."""
    model = make(wrap(tiny_model("llama")), tmp_path).eval().requires_grad_(False)
    reference = wrap(tiny_model("llama")).eval().requires_grad_(False)
    copied = copy.deepcopy(model)
    for each in (reference, copied):
        for parameter in each.parameters():
            parameter.mul_(1.1)
    expected = alone(reference, DOCUMENTS)
    batch = PackedCollator()(DOCUMENTS)
    labels = batch.pop("labels")
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(alone(copied, DOCUMENTS), expected, **close)
    torch.testing.assert_close(copied(**batch).logits, expected, **close)
    if make is not enabled:
        fused = copied(**batch, labels=labels, fused_lm_head=True)
        log_probs = expected[0, :-1].log_softmax(-1).gather(-1, labels[0, 1:, None].clamp(min=0))
        trained = log_probs[:, 0][labels[0, 1:] != -100]
        torch.testing.assert_close(fused.log_probs[fused.label_mask], trained, **close)
    # The control: the model that was copied says something else.
    assert float((alone(model, DOCUMENTS) - expected).abs().max()) > 0.01
