"""A guard that has refused refuses again: a check counts once its verdict allows the run.

Every test here trains or evaluates again on the trainer that was refused, as a notebook does when
its cell runs a second time.
"""

import copy

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import make_trainer
from helpers.leaks import OneDocument

import trl_packing.isolation.guard

LEAKS = "documents LEAK into each other"


def trainer_for(model, folder, *, documents=None, collator=None, **options):
    rows = Dataset.from_list(documents or tiny_documents())
    settings = {"max_length": 120, "max_steps": 1, "per_device_eval_batch_size": 2} | options
    return make_trainer(folder, rows, model, evaluated=rows, collator=collator, **settings)


@pytest.fixture
def out_of_memory(monkeypatch):
    """Return a function that makes the n-th isolation check from now on run out of memory."""
    check = trl_packing.isolation.guard.check_probes
    calls = []

    def at(number):
        def fails_once(*arguments, **options):
            calls.append(None)
            if len(calls) == number:
                raise torch.OutOfMemoryError("out of memory, a test says")
            return check(*arguments, **options)

        monkeypatch.setattr(trl_packing.isolation.guard, "check_probes", fails_once)
        return calls

    return at


LEAKING = {
    "mpt": (lambda: tiny_model("mpt"), {"attention": "model"}),
    "bloom": (lambda: tiny_model("bloom"), {"attention": "mask"}),  # refuses, rather than leaks
    "a collator": (lambda: tiny_model("llama"), {"collator": OneDocument()}),
}


@pytest.mark.parametrize("calls", ["train train", "evaluate evaluate", "evaluate train evaluate"])
@pytest.mark.parametrize("case", LEAKING)
def test_whatever_was_refused_is_refused_again(case, calls, tmp_path):
    build, options = LEAKING[case]
    run = trainer_for(build(), tmp_path, **{"attention": "documents"} | options)
    before = copy.deepcopy(run.model.state_dict())
    for call in calls.split():
        with pytest.raises(RuntimeError, match=f"{LEAKS}|cannot run packed documents"):
            getattr(run, call)()
    torch.testing.assert_close(run.model.state_dict(), before, rtol=0, atol=0)


def test_a_leak_of_long_documents_is_not_known_to_be_none_by_the_mode_that_refused(tmp_path):
    """A check that passed in one mode spares the other mode the long documents."""
    documents = tiny_documents((5, 12, 20, 70))
    model = tiny_model("phi3+longrope")  # exact below 32 tokens
    run = trainer_for(model, tmp_path, documents=documents, attention="documents")
    for call in (run.evaluate, run.train, run.evaluate):
        with pytest.raises(RuntimeError, match=f"{LEAKS}.*one side of the model's length thresh"):
            call()


def test_a_check_that_passed_is_not_made_again(tmp_path, out_of_memory):
    """The control: a model that isolates documents is checked once in each mode."""
    run = trainer_for(tiny_model("llama"), tmp_path)
    calls = out_of_memory(0)
    for call in (run.train, run.evaluate, run.train, run.evaluate):
        call()
    assert len(calls) == 2


@pytest.mark.parametrize("at", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_search_that_fails_leaves_the_way_that_was_checked(at, tmp_path, out_of_memory):
    """Evaluation was checked on documents; training tries slower ways, and breaks off in one."""
    run = trainer_for(tiny_model("llama"), tmp_path)
    run.evaluate()

    def leak(module, inputs, output):
        return output + 0.1 * output.mean() if module.training else output

    run.model.model.embed_tokens.register_forward_hook(leak)
    out_of_memory(at)
    with pytest.raises(torch.OutOfMemoryError):
        run.train()
    assert run.attention.backend == "documents"
    assert run.model.config._attn_implementation == "sdpa", "as it came"
    run.evaluate()
    with pytest.raises(RuntimeError, match=LEAKS):
        run.train()
