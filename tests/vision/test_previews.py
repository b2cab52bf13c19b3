"""Rows with images are previewed and planned as the trainer prepares them, and images are named."""

import re
from pathlib import Path

import pytest
from datasets import Dataset
from helpers.prepared import call_for
from helpers.runs import (
    documents_of,
    documents_of_row,
    plan_page,
    plan_run,
    preview_epoch,
    preview_losses,
    preview_rows,
    run_of_call,
)
from helpers.tiny import tiny_model
from helpers.vision import image_dataset, noise, vision_trainer

COLUMNS = ("input_ids", "labels", "image_ids")


def run_of(model, processor, dataset=None, **options):
    dataset = image_dataset() if dataset is None else dataset
    options = {"max_length": 320} | options
    return run_of_call(call_for(dataset, None, processor, model, **options))


def columns(document):
    return {name: list(document[name]) for name in COLUMNS}


PREVIEWED = [
    {"train_on": "assistant", "max_length": 64},
    {"completion_only_loss": False, "overflow": "split", "max_length": 60},
    {"overflow": "drop", "max_length": 60, "shuffle_dataset": True},
]


@pytest.mark.parametrize("options", PREVIEWED)
def test_the_rows_previewed_are_the_rows_trained(options, model, processor, tmp_path):
    trainer = vision_trainer(model, processor, tmp_path, **options)
    trained = [columns(document) for document in trainer.train_dataset]
    run = run_of(model, processor, **options)
    whole, counts = run.documents()
    assert [columns(document) for document in whole] == trained
    assert counts == trainer.packing_report.preparation
    shown = [document for row in range(8) for document in documents_of_row(run, row)[0]]
    in_order = [columns(document) for document in shown]
    if options.get("shuffle_dataset"):
        assert sorted(map(str, in_order)) == sorted(map(str, trained))
    else:
        assert in_order == trained
    report = trainer.packing_report
    assert report.images.images > 0
    assert preview_epoch(run).images == report.images
    assert preview_epoch(run).bins == report.bins


def test_images_are_named_with_their_size_and_tokens(model, processor):
    run = run_of(model, processor)
    one, two, none = (preview.texts[0] for preview in preview_rows(run))
    document = documents_of_row(run, 0)[0][0]
    tokens = sum(number > 0 for number in document["image_ids"])
    assert f"<|vision_start|>[image 36×20, {tokens} tokens]<|vision_end|>" in one
    assert "<|image_pad|>" not in one + two
    assert re.findall(r"\[image (\d+×\d+), ", two) == ["36×28", "40×36"]
    assert [" 1 image " in one, " 2 images " in two, " image" in none] == [True, True, False]
    assert "Answer 0 is short." in one


def paths(folder, broken: int) -> Dataset:
    rows = []
    for number in range(4):
        path = folder / f"{number}.png"
        noise(24, 24 + 8 * number, number).save(path)
        if number == broken:
            path.write_bytes(path.read_bytes()[:20])
        content = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
        answer = [{"type": "text", "text": "This."}]
        said = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        rows.append({"images": [str(path)], "messages": said})
    return Dataset.from_list(rows)


def test_one_row_is_read_without_the_images_of_the_others(model, processor, tmp_path):
    run = run_of(model, processor, paths(tmp_path, broken=2))
    first, third = preview_rows(run, [1, 2])
    assert "[image 32×24, " in first.texts[0]
    assert third.documents == ()
    assert "image 0 in row 2 of the inspected dataset cannot be read" in third.reason
    with pytest.raises(ValueError, match="image 0 in row 2 of the train dataset cannot be read"):
        preview_losses(run)


def test_runs_that_trl_prepares_are_not_shown(processor):
    with pytest.raises(ValueError, match=r"not packed for llama models.*: TRL's own code"):
        run_of(tiny_model("llama"), processor)
    with pytest.raises(ValueError, match="name the model"):
        run_of(None, processor)


def test_rows_of_other_tools_are_converted_as_the_docs_say(model, processor, tmp_path):
    page = (Path(__file__).parents[2] / "docs/images.md").read_text()
    names: dict = {}
    code = re.search(r"```python\n(import re\n.*?)\n\n\ndataset = ", page, re.S)
    exec(code[1], names)
    turns = [("human", "Look: <image>\nWhat?"), ("gpt", "A dog.")]
    path = str(tmp_path / "0.png")
    noise(24, 32, 0).save(path)
    factory = [{"role": names["ROLES"][role], "content": text} for role, text in turns]
    llava = [{"from": role, "value": text} for role, text in turns]
    texts = []
    for row, removed in (
        ({"images": [path], "messages": factory}, None),
        ({"image": path, "conversations": llava}, "conversations"),
    ):
        dataset = Dataset.from_list([row]).map(names["with_image_parts"], remove_columns=removed)
        run = run_of(model, processor, dataset, train_on="assistant")
        texts.append(documents_of_row(run, 0))
        (shown,) = next(iter(preview_rows(run, [0]))).texts
        assert "Look: <|vision_start|>[image 32×24, " in shown
        assert "⟦A dog.<|im_end|>⟧" in shown
    assert texts[0] == texts[1]


# --- the plan -------------------------------------------------------------------------------------

SETTINGS = {"max_length": 200, "per_device_train_batch_size": 1}


def plan_of(model, processor, **options):
    return plan_run(run_of(model, processor, image_dataset(24), **SETTINGS | options))


@pytest.mark.parametrize("options", [{"max_patches": 300}, {"documents_per_step": 6}])
def test_the_planned_micro_batches_are_those_of_the_trainer(options, model, processor, tmp_path):
    plan = plan_of(model, processor, **options)
    options = SETTINGS | {"packing": True} | options
    trainer = vision_trainer(model, processor, tmp_path, image_dataset(24), **options)
    sampler = trainer._get_train_sampler(documents_of(trainer.train_dataset, None))
    assert [sorted(members) for members in plan.epoch.members] == [sorted(b) for b in sampler]
    assert plan.report.images == trainer.packing_report.images
    assert plan.report.images.most_patches <= 300 or "max_patches" not in options
    assert bool(plan.what_if) == ("max_patches" not in options)


def test_the_page_counts_images_and_shows_them_as_words(model, processor):
    plan = plan_of(model, processor, overflow="split", max_length=64)
    text = str(plan_page(plan))
    images = plan.report.images
    assert f"images, of {images.tokens:,} tokens" in text
    assert "[image, " in text
    assert "&lt;|image_pad|&gt;" not in text
