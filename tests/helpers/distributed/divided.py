"""Runs whose rows are divided over ranks, and runs of the same that divide them wrongly."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from datasets import Dataset

from helpers import flash_attn_double
from helpers.distributed.ranks import on_ranks
from helpers.distributed.train import Scenario, run


@contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """Divide rows inside the block as the name of a `fault` says; None divides them rightly."""
    import torch

    from trl_packing import PackedCollator, PackedSFTTrainer
    from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
    from trl_packing.documents.host_row import PackedBatch

    count, collate = PackedSFTTrainer._get_num_items_in_batch, PackedCollator.__call__

    def collated(self, documents):
        batch = collate(self, documents)
        tensors, host = dict(batch), batch.host
        if fault == "boundaries of a part":
            lengths = torch.from_numpy(lengths_from_numbers(batch["seq_idx"][0].numpy()))
            found = boundaries_of_row(lengths)
            tensors |= {name: found[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
            host = replace(host, boundaries=found["cu_seq_lens_q"].long().numpy())
        if fault == "labels shifted in a part":
            tensors["labels"][:, -1] = -100
            host = replace(host, is_trained=tensors["labels"][0].numpy() != -100)
        return PackedBatch(tensors, host)

    def counted(self, *args):
        return count(self, *args) * (2 if fault == "tokens counted twice" else 1)

    with (
        patch.object(PackedCollator, "__call__", collated if fault else collate),
        patch.object(PackedSFTTrainer, "_get_num_items_in_batch", counted),
    ):
        yield


FAULTS = ("boundaries of a part", "labels shifted in a part", "tokens counted twice")


def run_divided(case: tuple[Scenario, int, str | None]) -> dict:
    """Return what `run` does for a scenario, each row divided over so many ranks, or its error.

    A model that is loaded with FlashAttention-2 gets a double of it.
    """
    scenario, size, fault = case
    options = scenario.options | {"sequence_parallel_size": size}
    with broken(fault), pytest.MonkeyPatch.context() as monkeypatch:
        if "attn_implementation" in scenario.config:
            flash_attn_double.install(monkeypatch)
        try:
            return run(replace(scenario, options=options))
        except (ValueError, RuntimeError) as error:
            return {"error": str(error)}


run_divided_on_ranks = partial(on_ranks, run_divided)


def needs_of_step(case: tuple[str, int]) -> tuple[int, list[tuple[str, int]]]:
    """Return the bytes that a step saves for its backward on this rank, and its collectives.

    Its row of 2,048 tokens is divided over so many ranks. Weights are not counted.
    """
    from harness import make_trainer

    from helpers.distributed.isolation import Collectives
    from helpers.saved import kept_by_autograd
    from helpers.tiny import documents_of_lengths, tiny_model
    from trl_packing import PackedSFTTrainer

    folder, size = case
    model = tiny_model(max_position_embeddings=2048)
    hooks, taken = kept_by_autograd(model)
    collectives = Collectives()

    class Measured(PackedSFTTrainer):
        def training_step(self, *args, **kwargs):
            with hooks, collectives:
                return super().training_step(*args, **kwargs)

    settings = {"max_length": 2048, "max_steps": 1, "gradient_checkpointing": False}
    rows = documents_of_lengths([1500, 548])
    trainer = make_trainer(
        folder, rows, model, cls=Measured, sequence_parallel_size=size, **settings
    )
    trainer.train()
    return taken(), collectives.calls


def words_of_refusals(folder: str) -> list[str]:
    """Return what a run of two ranks says of classes of a user that divided rows cannot take."""
    from harness import make_trainer
    from peft import PromptTuningConfig
    from torch.utils.data import SequentialSampler

    from helpers.tiny import documents_of_lengths, tiny_model
    from trl_packing import PackedCollator, PackedSFTTrainer
    from trl_packing.isolation import guard

    class Collator(PackedCollator):
        def __call__(self, documents):
            return super().__call__(documents)

    class Sampled(PackedSFTTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(dataset)

    class Evaluated(PackedSFTTrainer):
        def _get_eval_sampler(self, dataset):
            return SequentialSampler(dataset)

    rows = documents_of_lengths([5, 6, 20, 9])
    virtual = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    words = []
    for size, given in (
        (3, {}),
        (2, {"collator": Collator()}),
        (2, {"arguments": {"peft_config": virtual}}),
        (2, {"cls": Sampled}),
        (2, {"cls": Evaluated, "evaluated": Dataset.from_list(rows)}),
    ):
        settings = {"max_length": 32, "sequence_parallel_size": size}

        def start(given=given, settings=settings):
            trainer = make_trainer(folder, rows, **given, **settings)
            trainer.evaluate() if "evaluated" in given else trainer.train()

        with pytest.raises(ValueError, match="sequence_parallel_size") as refused:
            start()
        words.append(str(refused.value))

    def fail(_module, _args, kwargs):
        if os.environ["RANK"] == "1" and kwargs.get("cu_seq_lens_q") is not None:
            raise KeyError("a mistake of one rank")

    model = tiny_model()
    model.model.layers[0].register_forward_pre_hook(fail, with_kwargs=True)
    trainer = make_trainer(folder, rows, model, max_length=32, sequence_parallel_size=2)
    with (
        patch.object(guard, "_PATIENCE", 10.0),
        pytest.raises(RuntimeError, match="cannot run packed documents") as refused,
    ):
        trainer.train()
    return [*words, str(refused.value)]
