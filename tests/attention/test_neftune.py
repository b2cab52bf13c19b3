"""NEFTune's noise on a document is that of the document alone, whatever it shares a row with.

The tokens of document i all have the id `FIRST + i`, so that noise is told apart by its document:
padded rows repeat a token of their own document where they are padded.
"""

import pytest
import torch
import torch.nn.functional as F
from harness import make_trainer
from helpers.plain_runs import packed, trainer_of
from helpers.tiny import tiny_model
from peft import PromptTuningConfig
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packing import enable_packing

FIRST, WIDTH, ALPHA = 10, 32, 5.0
LENGTHS = [4, 60, 9, 30, 7, 21, 13, 5]
DOCUMENTS = [{"input_ids": [FIRST + i] * length} for i, length in enumerate(LENGTHS)]
SETTINGS = {"num_train_epochs": 6, "learning_rate": 0.0, "neftune_noise_alpha": ALPHA}


class Record(TrainerCallback):
    """Records the noise ``(tokens, WIDTH)`` of each document in training."""

    def __init__(self):
        self.noise = {}

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0:  # when the isolation check is done
            embeddings = model.get_input_embeddings()
            embeddings.register_forward_hook(self.record)  # behind the one that makes the noise

    def record(self, module, args, output):
        (ids,) = args
        noise = (output - F.embedding(ids, module.weight)).detach()
        for token in ids.unique().tolist():
            self.noise.setdefault(token, []).append(noise[ids == token])


def recorded(folder, peft_config=None, **options):
    record = Record()
    arguments = {"peft_config": peft_config}
    options = SETTINGS | {"max_length": 80, "per_device_train_batch_size": 2} | options
    make_trainer(folder, DOCUMENTS, callbacks=[record], arguments=arguments, **options).train()
    return record.noise


def recorded_by_plain_trainer(folder):
    model = tiny_model("llama")
    record = Record()
    enable_packing(model)
    rows = packed([d | {"labels": d["input_ids"]} for d in DOCUMENTS])
    trainer_of(model, rows, folder, callbacks=[record], max_steps=-1, **SETTINGS).train()
    return record.noise


def assert_noise_of_documents_alone(noise):
    """Each document: uniform between ± α / √(L · d), by Kolmogorov and Smirnov's distance."""
    for number, length in enumerate(LENGTHS):
        found = torch.cat(noise[FIRST + number]).flatten().double()
        bound = ALPHA / (length * WIDTH) ** 0.5
        n = len(found)
        assert n >= 6 * length * WIDTH  # each of six epochs
        assert found.abs().max() <= bound * (1 + 1e-5)
        expected = (found.sort().values / bound + 1) / 2  # its distribution, if it is uniform
        distance = (expected - (torch.arange(n) + 0.5) / n).abs().max() + 0.5 / n
        assert distance < 2.0 / n**0.5  # by chance once in 1,500 times: the seed is fixed


WAYS = {
    "static shapes": {"static_shapes": True},
    "padded rows": {"attention": "padded"},
    "virtual tokens": {
        "peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    },
    "by TRL, alone": {"cls": SFTTrainer, "per_device_train_batch_size": 1},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=list(WAYS))
def test_a_document_gets_the_noise_that_it_gets_alone(options, tmp_path):
    assert_noise_of_documents_alone(recorded(tmp_path, **options))


def test_plain_trainer_gives_it_too(tmp_path, monkeypatch):
    assert_noise_of_documents_alone(recorded_by_plain_trainer(tmp_path / "scaled"))
    name = "trl_packing.plain_trainer.enable.scale_noise_by_document"
    monkeypatch.setattr(name, lambda model: None)
    with pytest.raises(AssertionError):
        assert_noise_of_documents_alone(recorded_by_plain_trainer(tmp_path / "not"))


def test_noise_of_any_size_leaves_the_isolation_check_alone(tmp_path):
    """A check with noise would call a model with so much of it leaky, or inconclusive."""
    noise = recorded(tmp_path, neftune_noise_alpha=1e4, max_steps=1, isolation_check="error")
    assert max(x.abs().max() for found in noise.values() for x in found) > 100
