"""One run, by TRL's padded trainer or ours: documents and loss of every optimizer step."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from helpers.distributed import ranks

TRAINERS = ("SFTTrainer", "PackedSFTTrainer")
TOLERANCE = 1e-5


@dataclass
class Run:
    """A run to train.

    trainer: one of `TRAINERS`.
    rows: of the data set, tokenized.
    settings: of TRL's `SFTConfig`, and of ours where `trainer` is.
    resume: from the checkpoint of this step, in `output_dir`.
    seeded_before_training: with what torch is seeded between constructor and `train`.
    shards: of an `IterableDataset` of the rows; None for a `Dataset`.
    shuffle: arguments of its `shuffle`.
    """

    output_dir: str
    trainer: str
    rows: list[dict]
    settings: dict = field(default_factory=dict)
    resume: int | None = None
    seeded_before_training: int | None = None
    shards: int | None = None
    shuffle: dict | None = None


def trained(run: Run) -> dict:
    """Train, and return what every step was made of.

    documents: of every optimizer step from the first, those of this rank, each a tuple of tokens.
    losses: as logged after every step.
    """
    import torch
    from datasets import Dataset
    from harness import make_trainer
    from trl import SFTTrainer

    from trl_packing import PackedSFTTrainer

    torch.set_num_threads(1)
    documents: dict[int, list[tuple[int, ...]]] = {}
    parent = {"SFTTrainer": SFTTrainer, "PackedSFTTrainer": PackedSFTTrainer}[run.trainer]

    class Recorder(parent):
        def compute_loss(self, model, inputs, *args, **kwargs):
            found = documents_of(inputs)
            documents.setdefault(self.state.global_step, []).extend(found)
            return super().compute_loss(model, inputs, *args, **kwargs)

    settings = {"packing": False, "max_length": 32, "learning_rate": 1e-3, "logging_steps": 1}
    settings |= {"per_device_train_batch_size": 4} | run.settings
    rows = Dataset.from_list(run.rows)
    rows = rows if run.shards is None else rows.to_iterable_dataset(run.shards)
    rows = rows if run.shuffle is None else rows.shuffle(**run.shuffle)
    trainer = make_trainer(run.output_dir, rows, cls=Recorder, **settings)
    if run.seeded_before_training is not None:
        torch.manual_seed(run.seeded_before_training)
    checkpoint = f"{run.output_dir}/checkpoint-{run.resume}" if run.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"documents": documents, "losses": losses}


def documents_of(inputs: dict) -> list[tuple[int, ...]]:
    """Return the documents of a batch, padded or packed, without the filler of an idle rank."""
    ids = inputs["input_ids"]
    if "position_ids" not in inputs:
        mask = inputs["attention_mask"].bool()
        return [tuple(row[kept].tolist()) for row, kept in zip(ids, mask, strict=True)]
    starts = (inputs["position_ids"][0] == 0).nonzero().flatten().tolist()
    stops = [*starts[1:], ids.shape[1]]
    found = [tuple(ids[0, a:b].tolist()) for a, b in zip(starts, stops, strict=True)]
    return [document for document in found if document != (0,)]


def both(folder: Path, ours: dict | None = None, **arguments) -> list[dict]:
    """Train the same run by TRL's trainer and by ours; `ours` are settings of ours alone."""
    settings = arguments.pop("settings", {})
    return [
        trained(Run(str(folder / trainer), trainer, settings=settings | own, **arguments))
        for trainer, own in zip(TRAINERS, ({}, ours or {}), strict=True)
    ]


def assert_same_steps(theirs: dict, ours: dict) -> None:
    """Compare documents, and losses in float32.

    The two sum the same numbers in another order, some roundings of 6e-8 a step on losses of about
    6; runs of twenty steps stay below `TOLERANCE`.
    """
    import torch

    assert [*theirs["documents"]] == [*ours["documents"]]
    for step, documents in theirs["documents"].items():
        assert sorted(documents) == sorted(ours["documents"][step]), f"step {step}"
    torch.testing.assert_close(ours["losses"], theirs["losses"], rtol=0, atol=TOLERANCE)


def joined(results: list[dict]) -> dict:
    """Return the documents that all ranks trained in each step, and the losses, the same on all."""
    assert all(rank["losses"] == results[0]["losses"] for rank in results)
    found: dict[int, list] = {}
    for step in sorted({step for rank in results for step in rank["documents"]}):
        found[step] = [d for rank in results for d in rank["documents"].get(step, [])]
    return {"documents": found, "losses": results[0]["losses"]}


on_ranks = partial(ranks.on_ranks, trained)
