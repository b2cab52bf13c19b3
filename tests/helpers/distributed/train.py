"""Train a tiny model as a scenario says and return everything that happened.

Tests call `run` in their own process for a single rank, and `run_on_ranks` for more.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from unittest.mock import patch

from helpers.distributed.ranks import on_ranks


@dataclass
class Scenario:
    """A run to train. `lengths` and `eval_lengths` are those of the documents.

    leaks_on_rank: where the first layer adds the mean of all tokens so far, of any document.
    own_loss: a subclass takes the loss from the logits.
    ignores_loss_kwargs: as gemma3's and Qwen-VL's classes say of themselves.
    weighted: documents have the `loss_weights` of `token_weights`.
    packed_before: two documents after each other are a row, with their `seq_lengths`.
    prefixes: every document begins as one of so many prompts of up to 64 tokens.
    columns: further ones of the evaluation set.
    sets: documents of each data set of a training set that is a dictionary; empty for a single one.
    shards: of the stream; two ranks do not divide three, so each reads all of them.
    counted_clock: time passes by a second a micro-batch, a hundred an evaluation and a thousand a
        save, and not otherwise.
    engine: what shards the model (engines.ENGINES); None leaves it to DDP.
    config: of the model; lora: a LoraConfig; by_name: the model is saved and given as a name.
    evaluates: "before" training or "after" it; saves: the model, which is then read again.
    """

    output_dir: str
    lengths: list[int]
    model: str = "llama"
    engine: str | None = None
    config: dict = field(default_factory=dict)
    lora: dict = field(default_factory=dict)
    by_name: bool = False
    evaluates: str = "before"
    saves: bool = False
    leaks_on_rank: str | None = None
    own_loss: bool = False
    ignores_loss_kwargs: bool = False
    weighted: bool = False
    packed_before: bool = False
    prefixes: int = 0
    columns: dict[str, list] = field(default_factory=dict)
    sets: dict[str, int] = field(default_factory=dict)
    eval_lengths: list[int] = field(default_factory=list)
    packing: bool = True
    batch_size: int = 1
    accumulation: int = 1
    epochs: int = 1
    max_steps: int = -1
    stream: bool = False
    shards: int = 3
    save_steps: int = 0
    resume: str | None = None
    forgets_epoch_on_resume: bool = False
    counts_correct: bool = False
    counted_clock: bool = False
    options: dict = field(default_factory=dict)


def token_weights(input_ids: list[int]) -> list[float]:
    """Return a weight for every token, from its id: 0, 0.25, … 1.5."""
    return [token % 7 / 4 for token in input_ids]


def run(scenario: Scenario) -> dict:
    """Return batches, losses, parameters and evaluation of a run.

    batches: the `input_ids` of every micro-batch that was trained on this rank.
    inputs: what the model takes of it, as tensors, and the labels.
    attention: the way that kept documents apart.
    documents_read: those that preparation has counted, of all ranks; the ends of a stream too.
    trained_in: the optimizer step of every micro-batch, from 0.
    history, totals: what was logged, and the metrics that `train` returned.
    largest_targets: the largest label of every row that `compute_metrics` was given, in order.
    """
    import torch
    from accelerate import PartialState
    from harness import make_trainer
    from peft import LoraConfig

    from helpers.distributed import engines
    from helpers.tiny import tiny_model
    from trl_packing import PackedSFTTrainer
    from trl_packing.training.metrics import ThroughputMeter

    torch.set_num_threads(1)
    if scenario.engine == "fsdp2":
        engines.fsdp_on_cpu()
    largest_targets: list[int] = []
    kept: list[dict[str, torch.Tensor]] = []
    trained_in: list[int] = []
    now = [0.0]

    class Recorder(PackedSFTTrainer):
        def __init__(self, model, *args, **kwargs):
            engines.start(scenario.engine)
            if scenario.by_name:
                folder = f"{scenario.output_dir}/model"
                if rank == "0":
                    model.save_pretrained(folder)
                PartialState().wait_for_everyone()
                model = folder
            super().__init__(model, *args, **kwargs)

        def train(self, *args, **kwargs):
            clock = patch.object(ThroughputMeter, "clock", staticmethod(lambda: now[0]))
            with clock if scenario.counted_clock else nullcontext():
                return super().train(*args, **kwargs)

        def evaluation_loop(self, *args, **kwargs):
            now[0] += 100
            return super().evaluation_loop(*args, **kwargs)

        def _save_rng_state(self, output_dir):
            now[0] += 1000
            super()._save_rng_state(output_dir)

        def training_step(self, model, inputs, *args, **kwargs):
            now[0] += 1
            trained_in.append(self.state.global_step)
            names = ("input_ids", "position_ids", "labels")
            kept.append({name: inputs[name].clone() for name in names})
            return super().training_step(model, inputs, *args, **kwargs)

        def get_train_dataloader(self):
            dataloader = super().get_train_dataloader()
            if scenario.forgets_epoch_on_resume:
                del dataloader.batch_sampler.set_epoch
            return dataloader

    class WithOwnLoss(Recorder):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
            return model(**inputs).logits.square().mean()

    def correct(prediction):
        largest_targets.extend(prediction.label_ids.max(1).tolist())
        chosen = prediction.predictions[:, :-1].argmax(-1)
        targets = prediction.label_ids[:, 1:]
        return {"rows": len(targets), "correct": int((chosen == targets)[targets != -100].sum())}

    def leak(module, inputs, output):
        counts = torch.arange(1, output.shape[1] + 1)[:, None]
        return output + 0.1 * output.cumsum(1) / counts

    rank = os.environ.get("RANK", "0")
    size = scenario.batch_size
    saves = scenario.save_steps
    settings = {"max_length": 32, "learning_rate": 0.02, "lr_scheduler_type": "constant"}
    settings |= {"packing": scenario.packing, "logging_steps": 1, "isolation_check": "off"}
    settings |= {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    settings |= {"gradient_accumulation_steps": scenario.accumulation}
    settings |= {"num_train_epochs": scenario.epochs, "max_steps": scenario.max_steps}
    settings |= {"save_strategy": "steps" if saves else "no", "save_steps": saves or 500}
    settings |= engines.options(scenario.engine, scenario.model) | scenario.options
    engines.forget_zero3()
    model = tiny_model(scenario.model, **scenario.config)
    model.accepts_loss_kwargs = not scenario.ignores_loss_kwargs
    if scenario.leaks_on_rank == rank:
        model.model.layers[0].mlp.register_forward_hook(leak)
    arguments = {
        "compute_metrics": correct if scenario.counts_correct else None,
        "peft_config": LoraConfig(**scenario.lora) if scenario.lora else None,
    }
    trainer = make_trainer(
        scenario.output_dir,
        training_set(scenario),
        model,
        cls=WithOwnLoss if scenario.own_loss else Recorder,
        evaluated=evaluation_set(scenario),
        arguments=arguments,
        **settings,
    )
    when = scenario.evaluates if scenario.eval_lengths else None
    metrics = trainer.evaluate() if when == "before" else {}
    output = trainer.train(resume_from_checkpoint=scenario.resume)
    is_sharded = engines.is_sharded(scenario.engine, trainer)
    metrics = trainer.evaluate() if when == "after" else metrics
    history = trainer.state.log_history
    return {
        "batches": [inputs["input_ids"].flatten().tolist() for inputs in kept],
        "inputs": kept,
        "steps": trainer.state.global_step,
        "attention": trainer.attention.backend,
        "trained_in": trained_in,
        "history": history,
        "totals": output.metrics,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "grad_norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "largest_targets": largest_targets,
        "metrics": metrics,
        "shares": trainer._before_training.sharing.reason() is None,
        "documents_read": trainer.packing_report.preparation.before.documents,
        "saved": saved(trainer, scenario.output_dir) if scenario.saves else {},
        "is_sharded": is_sharded,
        "scores_native_logits": any(
            hasattr(vars(m).get("forward"), "scores_native_logits") for m in trainer.model.modules()
        ),
        "parameters": engines.whole_parameters(scenario.engine, trainer),
    }


def rows_of(scenario: Scenario, lengths: list[int], seed: int) -> list[dict]:
    from helpers.tiny import documents_of_lengths

    rows = documents_of_lengths(lengths, prompt=2, seed=seed)
    prompts = documents_of_lengths([64] * scenario.prefixes, seed=7)
    for number, row in enumerate(rows if prompts else []):
        prompt = prompts[number % len(prompts)]["input_ids"][: 24 + 8 * (number % 6)]
        labels = [-100] * len(prompt) if number % 4 else prompt
        row["input_ids"], row["labels"] = prompt + row["input_ids"], labels + row["labels"]
    for row in rows if scenario.weighted else []:
        row["loss_weights"] = token_weights(row["input_ids"])
    if scenario.packed_before:
        for row, behind in zip(rows[::2], rows[1::2], strict=True):
            row["seq_lengths"] = [len(row["input_ids"]), len(behind["input_ids"])]
            row["input_ids"] = row["input_ids"] + behind["input_ids"]
            row["labels"] = row["labels"] + behind["labels"]
        rows = rows[::2]
    return rows


def data_set(scenario: Scenario, rows: list[dict]):
    from datasets import Dataset

    dataset = Dataset.from_list(rows)
    return dataset.to_iterable_dataset(scenario.shards) if scenario.stream else dataset


def training_set(scenario: Scenario):
    rows = rows_of(scenario, scenario.lengths, seed=0)
    if not scenario.sets:
        return data_set(scenario, rows)
    left = iter(rows)
    return {
        name: data_set(scenario, [next(left) for _ in range(number)])
        for name, number in scenario.sets.items()
    }


def evaluation_set(scenario: Scenario):
    rows = rows_of(scenario, scenario.eval_lengths, seed=1)
    for name, values in scenario.columns.items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    return data_set(scenario, rows) if rows else None


def saved(trainer, folder: str) -> dict:
    """Return what is in the file that `trainer.save_model` writes: tied weights are in it once."""
    from safetensors.torch import load_file

    trainer.save_model(f"{folder}/final")
    trainer.accelerator.wait_for_everyone()
    return load_file(f"{folder}/final/model.safetensors")


def assert_same_run(found: dict, expected: dict, tolerance: float, *more: str) -> None:
    """The same losses and parameters, and `more`, as far as float32 rounds them."""
    import torch

    for name in ("losses", "parameters", *more):
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=tolerance)


def assert_continues(resumed: dict, whole: dict) -> None:
    """The same batches to the end, and the same parameters to the last bit."""
    import torch

    count = len(resumed["batches"])
    assert 0 < count < len(whole["batches"])
    assert resumed["batches"] == whole["batches"][-count:]
    assert resumed["steps"] == whole["steps"]
    for name, parameter in whole["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


run_on_ranks = partial(on_ranks, run)
