"""recipes/vision.py reads several data sets, with images and without, as one mixture."""

import json
from types import SimpleNamespace

from trl_packing.recipes.recipe_data import load_data
from trl_packing.recipes.vision import Arguments, in_folder

from trl_packing import PackedSFTConfig

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_sets_with_images_and_without_are_one_mixture(tmp_path):
    alpaca = {"instruction": "Add.", "input": "1 and 1", "output": "2"}
    files = {
        "pictures": [{"images": [f"{n}.png"], "messages": MESSAGES} for n in range(3)],
        "chat": [{"messages": MESSAGES}] * 2,
        "alpaca": [alpaca] * 3,
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    own = {"prompt_template": "{instruction}\n{input}", "completion_column": "output"}
    more = [{"epochs": 2}, {"source": "talk"}, {**own, "chat": True}]
    paths = [{"path": str(tmp_path / f"{name}.jsonl")} for name in files]
    entries = [path | options for path, options in zip(paths, more, strict=True)]
    run = PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    processor = SimpleNamespace(chat_template="any")

    def load(**named):
        rows, _ = load_data(Arguments(**named), run, processor, kept=("images", "image"))
        return in_folder(rows, "photos")

    rows = load(datasets=entries)
    assert run.mixture == {"pictures": {"epochs": 2}}
    assert {name: len(dataset) for name, dataset in rows.items()} == {
        "pictures": 3,
        "talk": 2,
        "alpaca": 3,
    }
    assert rows["pictures"]["images"][:] == [[f"photos/{n}.png"] for n in range(3)]
    assert rows["talk"].column_names == ["messages"]
    assert rows["alpaca"][2] == {
        "prompt": [{"role": "user", "content": "Add.\n1 and 1"}],
        "completion": [{"role": "assistant", "content": "2"}],
    }
    alone = load(dataset_name=entries[0]["path"])
    assert alone["images"][:] == rows["pictures"]["images"][:]
