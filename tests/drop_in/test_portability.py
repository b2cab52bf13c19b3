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


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_and_evaluation_leave_the_attention_as_it_came(implementation, tmp_path):
    model = tiny_model("llama")
    model.set_attn_implementation(implementation)
    seen = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(str(model.config._attn_implementation))

    rows = Dataset.from_list(DOCUMENTS)
    run = trainer_for(model, DOCUMENTS, tmp_path, evaluated=rows, callbacks=[Look()])
    found = [run.model.config._attn_implementation]
    for act in (run.train, run.evaluate, lambda: run.predict(rows)):
        act()
        found.append(run.model.config._attn_implementation)
    assert found == [implementation] * 4
    assert not any(type(name) is not str for name in found)
    assert seen[0].startswith("packed_documents"), "the kernel that trained it"


@pytest.fixture(params=[lambda model: model, lora], ids=["full", "lora"])
def saved(request, tmp_path):
    """Return a trained model, its logits of `IDS`, and a pickle of it within the run."""

    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            self.saved = pickle.dumps(model)

    saves, model = Save(), request.param(tiny_model("llama"))
    run = trainer_for(model, DOCUMENTS, tmp_path, callbacks=[saves], learning_rate=0.01)
    run.train()
    return run.model, run.model.eval()(input_ids=IDS, use_cache=False).logits, saves.saved


def test_a_model_saved_while_ours_is_in_use_does_not_name_it(saved):
    _, expected, pickled_model = saved
    assert b"trl_packing" not in pickled_model
    assert b"packed_documents" not in pickled_model
    loaded = pickle.loads(pickled_model).eval()
    found = loaded(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def enabled(model, folder):
    enable_packing(model)
    return model


def of_trainer(model, folder):
    return trainer_for(model, DOCUMENTS, folder).model


def of_trained(model, folder):
    run = trainer_for(model, DOCUMENTS, folder)
    run.train()
    return run.model


@pytest.mark.parametrize("make", [enabled, of_trainer, of_trained], ids=lambda f: f.__name__)
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
