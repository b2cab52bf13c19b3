"""Runs on data sets with images: evaluation, workers, resuming, LoRA, settings."""

import copy
import shutil

import pytest
import torch
from datasets import Dataset
from harness import TWO_RUNS, assert_exact
from helpers.one_step import ONE_STEP
from helpers.vision import image_dataset, noise
from peft import LoraConfig
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision.test_exact import LAYOUTS, alone, packed

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.vision import run_images, support

pytestmark = pytest.mark.slow  # whole runs


def trainer_of(model, processor, folder, dataset=None, **options):
    settings = {"max_length": 320, "packing": True} | ONE_STEP | options
    more = {
        key: settings.pop(key) for key in ("eval_dataset", "compute_metrics") if key in settings
    }
    return PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(folder), **settings),
        train_dataset=image_dataset() if dataset is None else dataset,
        processing_class=processor,
        **more,
    )


def test_evaluation_loss_is_that_of_the_documents_alone(model, processor, tmp_path):
    evaluated = image_dataset(6)
    trainer = trainer_of(model, processor, tmp_path, eval_dataset=evaluated)
    loss, _ = alone(model, processor, evaluated, completion_only_loss=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=TWO_RUNS)


def test_padded_evaluation_gives_the_same_loss_and_sees_the_images(model, processor, tmp_path):
    seen = {}

    def keep(predictions):
        seen["logits"] = predictions.predictions
        return {}

    evaluated = image_dataset(4)
    trainer = trainer_of(model, processor, tmp_path, eval_dataset=evaluated, compute_metrics=keep)
    loss, _ = alone(model, processor, evaluated, completion_only_loss=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=TWO_RUNS)
    assert len(seen["logits"]) == 4


def test_a_stream_of_texts_is_evaluated_beside_images(model, processor, tmp_path):
    ids = processor.tokenizer("a color and another color")["input_ids"]
    texts = Dataset.from_list([{"input_ids": ids, "labels": ids}] * 3)
    streamed = trainer_of(model, processor, tmp_path, eval_dataset=texts.to_iterable_dataset())
    loaded = trainer_of(model, processor, tmp_path, eval_dataset=texts)
    assert streamed.evaluate()["eval_loss"] == pytest.approx(loaded.evaluate()["eval_loss"])


def test_workers_change_nothing(model, processor, tmp_path):
    options = LAYOUTS["three of a bin"]
    loss, gradients, _ = packed(model, processor, image_dataset(), tmp_path, **options)
    with_workers = {"dataloader_num_workers": 2, "dataloader_persistent_workers": False}
    found, others, _ = packed(
        model, processor, image_dataset(), tmp_path, **options, **with_workers
    )
    assert found == loss
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)


def test_a_resumed_run_ends_in_the_same_weights(model, processor, tmp_path):
    options = {
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 1,
        "max_length": 200,
    }
    whole = trainer_of(model, processor, tmp_path / "whole", **options)
    whole.train()
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "rest" / "checkpoint-2")
    rest = trainer_of(model, processor, tmp_path / "rest", **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "rest" / "checkpoint-2"))
    expected = dict(whole.model.named_parameters())
    assert all(torch.equal(p, expected[n]) for n, p in rest.model.named_parameters())


def test_lora_trains_with_images(model, processor, tmp_path):
    trainer = PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(tmp_path), max_length=320, **ONE_STEP),
        train_dataset=image_dataset(),
        processing_class=processor,
        peft_config=LoraConfig(target_modules=["q_proj", "qkv"], r=2),
    )
    trainer.train()
    assert trainer._trl_path is None


def test_assistant_turns_are_trained_as_in_text(model, processor, tmp_path):
    dataset = image_dataset(form="messages")
    trainer = trainer_of(model, processor, tmp_path, dataset, train_on="assistant")
    for number, document in enumerate(trainer.train_dataset):
        trained = [label for label in document["labels"] if label != -100]
        words = processor.tokenizer.decode(trained)
        row = dataset[number]["messages"][-1]["content"][0]["text"]
        assert words == row + "<|im_end|>"


def test_documents_per_step_and_weights_reach_the_loss(model, processor, tmp_path):
    dataset = image_dataset().add_column("loss_weight", [0.0] * 4 + [1.0] * 4)
    found = packed(model, processor, dataset, tmp_path, **LAYOUTS["documents_per_step"])
    kept = image_dataset().select(range(4, 8))
    assert_exact(found, alone(model, processor, kept, completion_only_loss=True))


@pytest.mark.parametrize(
    "options",
    [
        {"append_eos": True},
        {"static_shapes": True},
        {"response_template": "Answer"},
    ],
)
def test_settings_that_images_cannot_serve_are_refused(options, model, processor, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options))):
        trainer_of(model, processor, tmp_path, **options)


def with_payload():
    part = {"type": "image", "image": noise(9, 9, 0)}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "a"}]}]
    return Dataset.from_list([{"images": [], "messages": messages}] * 8)


def with_addresses():
    images = [["https://localhost/a.png"]] * 8
    return Dataset.from_dict({"images": images, "text": ["<|image_pad|> a"] * 8})


TRLS = {
    "stream": {"dataset": lambda: image_dataset().to_iterable_dataset()},
    "stream with images": {"eval_dataset": lambda: image_dataset().to_iterable_dataset()},
    "wrapped": {"packing_strategy": lambda: "wrapped"},
    "several forms": {"dataset": lambda: image_dataset().add_column("text", ["a"] * 8)},
    "tools": {"dataset": lambda: image_dataset().add_column("tools", [None] * 8)},
    "skip_prepare_dataset": {"dataset_kwargs": lambda: {"skip_prepare_dataset": True}},
    "hold data of their own": {"dataset": with_payload},
    "images are addresses": {"dataset": with_addresses},
}


@pytest.mark.parametrize("reason", TRLS)
def test_runs_that_only_trl_can_serve_take_its_path(reason, model, processor, tmp_path):
    changes = {name: make() for name, make in TRLS[reason].items()}
    collator = DataCollatorForVisionLanguageModeling
    settings = {"max_length": 320, **ONE_STEP} | {
        name: value for name, value in changes.items() if not name.endswith("dataset")
    }
    trainer = PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(tmp_path), **settings),
        train_dataset=changes.get("dataset", image_dataset()),
        eval_dataset=changes.get("eval_dataset"),
        processing_class=processor,
    )
    assert reason in trainer._trl_path
    assert isinstance(trainer.data_collator, collator)


def test_images_take_trls_path_with_an_older_transformers(monkeypatch):
    data = Dataset.from_list([{"text": "a", "images": []}])
    monkeypatch.setattr(support.transformers, "__version__", "5.22.4")
    reason = run_images.RunImages().why_not_packed("none", data, None, None, None)
    assert reason == "the data set has images, and transformers 5.22.4 is older than 5.23"
