"""recipes/vision.py reads several data sets, with images and without, as one mixture."""

import json

from trl_packing.recipes.recipe_data import SourceConfig
from trl_packing.recipes.vision import Arguments, load

import pytest

from trl_packing import PackedSFTConfig

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def files(tmp_path):
    """Two files: rows with paths of images, and rows without."""
    pictures = [{"images": [f"{n}.png"], "messages": MESSAGES} for n in range(3)]
    rows = {"pictures": pictures, "chat": [{"messages": MESSAGES}] * 2}
    for name, made in rows.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


def config(folder, **options) -> PackedSFTConfig:
    return PackedSFTConfig(str(folder), use_cpu=True, bf16=False, **options)


def test_entries_are_sources_and_paths_of_images_are_in_the_folder(files, tmp_path):
    entries = [{"path": files["pictures"], "epochs": 2}, {"path": files["chat"], "source": "talk"}]
    arguments, args = Arguments(datasets=entries, image_folder="photos"), config(tmp_path)
    rows = load(arguments, args)
    assert isinstance(arguments.datasets[0], SourceConfig)
    assert {name: len(dataset) for name, dataset in rows.items()} == {"pictures": 3, "talk": 2}
    assert rows["pictures"]["images"][:] == [[f"photos/{n}.png"] for n in range(3)]
    assert rows["talk"].column_names == ["messages"]
    assert args.mixture == {"pictures": {"epochs": 2}}


def test_a_data_set_without_images_may_name_its_columns(files, tmp_path):
    rows = tmp_path / "alpaca.jsonl"
    rows.write_text('{"instruction": "Add.", "input": "1 and 1", "output": "2"}\n' * 3)
    own = {"prompt_template": "{instruction}\n{input}", "completion_column": "output"}
    entries = [{"path": files["pictures"]}, {"path": str(rows), **own, "chat": True}]
    sets = load(Arguments(datasets=entries), config(tmp_path))
    assert sets["alpaca"][2] == {
        "prompt": [{"role": "user", "content": "Add.\n1 and 1"}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    assert "images" in sets["pictures"].column_names


def test_one_data_set_needs_no_entries(files, tmp_path):
    rows = load(Arguments(dataset_name=files["pictures"]), config(tmp_path))
    assert rows["images"][:] == [[f"{n}.png"] for n in range(3)]


@pytest.mark.parametrize(
    ("more", "entry", "settings", "sentence"),
    [
        ({"dataset_name": "a.jsonl"}, {}, {}, "dataset_name and datasets both name the data"),
        ({}, {"prompt_column": "a"}, {}, "the data set chat: no column 'a' among messages"),
        ({}, {"weight": 1}, {"mixture": {"chat": {"epochs": 1}}}, "say the same; give one"),
        ({}, {"wait": 1}, {}, "entry 1: 'wait' is unknown"),
    ],
)
def test_entries_that_cannot_be_are_refused(more, entry, settings, sentence, files, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        load(
            Arguments(datasets=[{"path": files["chat"], **entry}], **more),
            config(tmp_path, **settings),
        )
