"""Trainers for `tests/drop_in`, which must behave as TRL's own `SFTTrainer` does.

`PackedSFTTrainer` of this module is TRL's class if the environment says `TRAINER=trl`. The tests
that use it state what TRL 1.16 does, and pass with that class too:

    TRAINER=trl pytest tests/drop_in

Tests marked `packed_only` are then skipped. They cover differences on purpose: documents instead
of packed rows in `train_dataset`, an enforced `max_length`, errors for bad input.
"""

import math
import os

import pytest
import torch
from harness import QUIET
from trl import SFTConfig, SFTTrainer

from helpers.tiny import FORMS, tiny_dataset, tiny_model, tiny_tokenizer

if os.environ.get("TRAINER") == "trl":
    from trl import SFTTrainer as PackedSFTTrainer
else:
    from trl_packing import PackedSFTTrainer

TEXT_FORMS = [form for form in FORMS if form not in ("question_answer", "packed", "images")]

packed_only = pytest.mark.skipif(
    PackedSFTTrainer is SFTTrainer, reason="on purpose different from TRL's SFTTrainer"
)
both_modes = pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])


def config(folder, **changes) -> SFTConfig:
    """Return a plain `SFTConfig` for two short fp32 steps."""
    settings = {"logging_steps": 1, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    settings |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    settings |= {"max_length": 128, "max_steps": -1 if "num_train_epochs" in changes else 2}
    return SFTConfig(str(folder), **QUIET | settings | changes)


def tokenizer_for(form: str):
    return tiny_tokenizer(chat=form.startswith("convers") or form in ("tools", "images"))


def trainer_for(
    folder,
    dataset="language_modeling",
    *,
    cls=None,
    model="llama",
    processing_class=None,
    arguments=None,
    **config_changes,
):
    """Return a trainer of `cls` on a data set, or on a form of `helpers.tiny`.

    `arguments` go to the constructor, `config_changes` to the configuration.
    """
    form = dataset if isinstance(dataset, str) else ""
    return (cls or PackedSFTTrainer)(
        model=tiny_model(model) if isinstance(model, str) else model,
        args=config(folder, **config_changes),
        train_dataset=tiny_dataset(form) if form else dataset,
        processing_class=processing_class or tokenizer_for(form),
        **(arguments or {}),
    )


def parameters(trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def unchanged(before: dict[str, torch.Tensor], trainer) -> list[str]:
    """Return the names of the parameters that are what they were `before`."""
    now = trainer.model.get_parameter
    return [name for name, value in before.items() if torch.equal(value, now(name))]


def train_moves_all(trainer) -> None:
    """Train, then assert that the logged loss is finite and that every parameter has changed."""
    before = parameters(trainer)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[-1]["train_loss"])
    assert unchanged(before, trainer) == []


def logged(trainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def trained_losses(trainer) -> list[float]:
    """Train, and return the logged losses."""
    trainer.train()
    return logged(trainer, "loss")


def documents(dataset) -> list[tuple[list[int], list[int]]]:
    """Return the ids and labels of every document."""
    return [(row["input_ids"], row["labels"]) for row in dataset]


def sgd_run(folder, cls, form="prompt_completion", *, rows=22, dataset=None, **changes):
    """Return a trainer after a run with SGD, whose steps are proportional to the gradients."""
    settings = {"optim": "sgd", "learning_rate": 0.1, "num_train_epochs": 1}
    settings |= {"train_sampling_strategy": "sequential", "processing_class": tokenizer_for(form)}
    dataset = tiny_dataset(form, rows) if dataset is None else dataset
    trainer = trainer_for(folder, dataset, cls=cls, **settings | changes)
    trainer.train()
    return trainer


def assert_same_run(ours, theirs, keys=("loss", "grad_norm", "num_tokens", "mean_token_accuracy")):
    """Assert equal logs and parameters.

    The tolerance allows for other attention kernels and summation orders in fp32.
    """
    assert ours.state.global_step == theirs.state.global_step
    for key in keys:
        assert logged(ours, key) == pytest.approx(logged(theirs, key), rel=1e-4, abs=1e-5), key
    torch.testing.assert_close(parameters(ours), parameters(theirs), atol=1e-5, rtol=1e-4)
