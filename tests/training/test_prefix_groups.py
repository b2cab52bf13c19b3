"""Runs of prefix_sharing="group": groups in bins and steps, and the losses of their documents."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.tiny import tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer

OPTIONS = {"max_length": 256, "per_device_train_batch_size": 1, "num_train_epochs": 1}
KINDS = {
    "packed": {},
    "padding-free": {"packing": False, "per_device_train_batch_size": 8},
    "documents_per_step": {"documents_per_step": 16, "gradient_accumulation_steps": 2},
}


def documents(prompts=12, answers=5, seed=0):
    """Return answers to prompts in random order; a number in each tells its prompt."""
    rng = np.random.default_rng(seed)
    size = len(tiny_tokenizer())
    questions = rng.integers(6, size, (prompts, 40))
    rows = []
    for of in rng.permutation(np.repeat(np.arange(prompts), answers)):
        answer = rng.integers(6, size, rng.integers(4, 20)).tolist()
        question = questions[of].tolist()
        rows.append({"input_ids": question + answer, "labels": [-100] * 40 + answer})
    return Dataset.from_list(rows)


class Recording(PackedSFTTrainer):
    """Keeps the tokens of each micro-batch."""

    def __init__(self, *args, **kwargs):
        self.rows = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        self.rows.append(inputs["input_ids"].shape[1])
        return super().training_step(model, inputs, num_items_in_batch)


def trainer_of(folder, data=None, model="llama", cls=Recording, **options):
    args = PackedSFTConfig(
        str(folder),
        **OPTIONS | {"learning_rate": 0.0, "logging_steps": 1, "prefix_sharing": "group"} | options,
        report_to="none",
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        run_page=False,
    )
    data = documents() if data is None else data
    return cls(
        tiny_model(model) if isinstance(model, str) else model,
        args,
        train_dataset=data,
        eval_dataset=data,
        processing_class=tiny_tokenizer(),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_groups_come_together_and_losses_stay_those_of_documents(kind, tmp_path):
    trainer = trainer_of(tmp_path, **KINDS[kind])
    trainer.train()
    grouped = trainer.evaluate()
    apart = trainer_of(tmp_path, prefix_sharing="off", **KINDS[kind])
    apart.train()
    assert sum(trainer.rows) < 0.6 * sum(apart.rows)
    assert max(trainer.rows) <= 256
    logs = [t.state.log_history[-2] for t in (trainer, apart)]
    for name in ("train_documents", "train_tokens", "train_trained_tokens"):
        assert logs[0].get(name) == logs[1].get(name)
    # The weights stay the same, so each step's mean is a part of the mean over the data set.
    expected = apart.evaluate()["eval_loss"]
    assert grouped["eval_loss"] == pytest.approx(expected, rel=2e-6)
