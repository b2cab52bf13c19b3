"""Runs on documents with images, on any number of gloo ranks.

Rows without images come first: no rank has an image in the first step, and one of two ranks has
none in the second.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from peft import LoraConfig

from helpers.distributed import engines
from helpers.distributed.ranks import on_ranks
from helpers.one_step import ONE_STEP
from helpers.vision import image_dataset, images_of_others, texts, tiny_processor, tiny_vision_model
from trl_packing import PackedSFTConfig, PackedSFTTrainer

#: Weights would decay in the tower, too, where it gets gradients of zeros.
SGD = {"optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant", "weight_decay": 0.5}
SGD |= {"max_length": 320, "max_steps": 3, "packing": False, "isolation_check": "off"}
SGD |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
SGD |= {"train_sampling_strategy": "sequential"}


@dataclass
class ImageRun:
    """A run to train.

    rows: of the training set.
    engine: what shards the model (engines.ENGINES); None leaves it to DDP.
    weights: the `loss_weight` of each row; none where it is empty.
    lora: arguments of a LoraConfig.
    options: of the config.
    resume: the checkpoint.
    leaks: give the tokens of a row the images in the wrong order; the run is refused.
    texts: rows without images in a data set of their own, trained as a mixture.
    """

    output_dir: str
    family: str = "qwen2_5_vl"
    rows: int = 12
    engine: str | None = None
    weights: list[float] = field(default_factory=list)
    lora: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    resume: str | None = None
    leaks: bool = False
    texts: int = 0


def run(scenario: ImageRun) -> dict:
    """Train, evaluate, and return losses, metrics and parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if scenario.engine == "fsdp2":
        engines.fsdp_on_cpu()
    engines.forget_zero3()
    processor = tiny_processor(scenario.family)
    model = tiny_vision_model(scenario.family, processor)
    dataset, rows = image_dataset(scenario.rows), scenario.texts
    order = sorted(range(len(dataset)), key=lambda n: bool(dataset[n]["images"]))
    dataset = dataset.select(order)
    if scenario.weights:
        dataset = dataset.add_column("loss_weight", scenario.weights)
    settings = ONE_STEP | SGD | engines.options(scenario.engine, scenario.family)
    config = PackedSFTConfig(scenario.output_dir, **settings | scenario.options)
    engines.start(scenario.engine)
    trainer = PackedSFTTrainer(
        model=model,
        args=config,
        train_dataset={"pictures": dataset, "texts": texts(rows)} if rows else dataset,
        eval_dataset=image_dataset(5),
        processing_class=processor,
        peft_config=LoraConfig(**scenario.lora) if scenario.lora else None,
    )
    assert trainer._trl_path is None, trainer._trl_path
    if scenario.leaks:
        return {"error": _refused(trainer)}
    trainer.train(resume_from_checkpoint=scenario.resume)
    is_sharded = engines.is_sharded(scenario.engine, trainer)  # FSDP2's root is not, in evaluation
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "metrics": trainer.evaluate(),
        "is_sharded": is_sharded,
        "parameters": {
            name.removeprefix("module."): value
            for name, value in engines.whole_parameters(scenario.engine, trainer).items()
        },
    }


def _refused(trainer: PackedSFTTrainer) -> str:
    """Return the error of a run in which documents have the images of others."""
    with images_of_others():
        try:
            trainer.train()
        except RuntimeError as error:
            return str(error)
    return ""


run_on_two_ranks = partial(on_ranks, run)
