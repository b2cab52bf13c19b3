"""The page of rows shows the images of a row at their tokens."""

import json
import re

import pytest
from datasets import Dataset
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model
from PIL import Image

from trl_packing import PackedSFTConfig, PackedSFTTrainer, show_rows
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.rows.packed_rows import PackedEpoch
from trl_packing.tools.rows.page import rows_page
from trl_packing.tools.rows.text import micro_batches, show_row
from trl_packing.tools.training_command import TrainerCall

COLORS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255)}


@pytest.fixture(scope="module")
def processor():
    return tiny_processor("qwen2_5_vl")


@pytest.fixture(scope="module")
def model(processor):
    return tiny_vision_model("qwen2_5_vl", processor)


def colored() -> Dataset:
    """Rows whose answers name the colors of their images, widths 24, 32, 40."""
    rows = []
    for number in range(9):
        names = [[*COLORS][(number + n) % 3] for n in range(number % 3)]
        images = [Image.new("RGB", (24 + 8 * (number % 3), 24), name) for name in names]
        parts = [{"type": "image", "text": None} for _ in names]
        question = {"type": "text", "text": f"Question {number}?"}
        answer = {"type": "text", "text": " ".join(names) or "none"}
        said = [
            {"role": "user", "content": [*parts, question]},
            {"role": "assistant", "content": [answer]},
        ]
        rows.append({"images": images, "messages": said})
    return Dataset.from_list(rows)


def config(folder, **options):
    settings = {"max_length": 128, "per_device_train_batch_size": 2, "train_on": "assistant"}
    return PackedSFTConfig(
        str(folder), use_cpu=True, bf16=False, report_to="none", **settings | options
    )


def epoch_of(model, processor, folder, dataset) -> PackedEpoch:
    call = TrainerCall(model, config(folder), dataset, processor)
    return PackedEpoch.of(PreviewedRun.from_call(call))


def data_of(page: str):
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def test_images_stand_at_the_tokens_of_their_document(model, processor, tmp_path):
    epoch = epoch_of(model, processor, tmp_path, colored())
    data = data_of(rows_page(epoch, max_rows=100))
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    seen = 0
    for row in data["rows"]:
        at = [i for i, token in enumerate(row["ids"]) if token == pad]
        assert at == [i for image in row["images"] for i in range(image["start"], image["stop"])]
        for document in row["documents"]:
            inside = range(document["start"] - row["start"], document["stop"] - row["start"])
            images = [image for image in row["images"] if image["start"] in inside]
            answer = colored()[document["row"]]["messages"][1]["content"][0]["text"]
            names = [] if answer == "none" else answer.split()
            assert len(images) == len(names)
            for image in images:
                assert image["size"] == f"{24 + 8 * (document['row'] % 3)} × 24"
                seen += 1
    assert seen == 9


def test_the_page_holds_the_batches_of_the_data_loader(model, processor, tmp_path):
    epoch = epoch_of(model, processor, tmp_path, image_dataset())
    trainer = PackedSFTTrainer(
        model, config(tmp_path), None, image_dataset(), processing_class=processor
    )
    data = data_of(rows_page(epoch, max_rows=100))
    for number, batch in enumerate(trainer.get_train_dataloader()):
        rows = [row for row in data["rows"] if row["microBatch"] == number]
        for name, tensor in {
            "ids": batch["input_ids"][0],
            "labels": batch["labels"][0],
            "positions": batch["position_ids"][0, 0],  # the first of four: the tokens counted
        }.items():
            assert [value for row in rows for value in row[name]] == tensor.tolist()


def test_micro_batches_show_which_tokens_are_images(model, processor, tmp_path):
    epoch = epoch_of(model, processor, tmp_path, colored())
    row = next(row for row in micro_batches(epoch, [1]) if row.num_images)
    heading, line = show_row(row, epoch).split("\n")
    assert f" · {row.num_images} image" in heading
    per_cell = -(-128 // 80)
    images = [
        range(d.start - row.start + i.start, d.start - row.start + i.stop)
        for d in row.documents
        for i in d.images
    ]
    expected = [
        any(cell * per_cell + per_cell // 2 in image for image in images)
        for cell in range(len(line))
    ]
    assert [sign == "▒" for sign in line] == expected
    assert any(expected)
    shown = row.to_dict()["documents"]
    assert sum(len(document.get("images", ())) for document in shown) == row.num_images


def test_rows_are_drawn_with_their_images():
    shown = show_rows([[4, 3], [2]], images=[[(1, 3), (5, 6)], []], capacity=8)
    assert shown == "A▒▒AB▒B·\nCC······"
    html = show_rows([[4, 3]], images=[[(1, 3)]], html=True)
    assert html.count("▒▒") == 1
    assert html.count("background:#9ecae9") == 3
