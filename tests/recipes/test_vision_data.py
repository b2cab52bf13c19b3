"""recipes/vision.py reads several data sets, with images and without, as one mixture."""

from types import SimpleNamespace

from helpers.prepared import write_rows
from helpers.recipes import module

from trl_packing import PackedSFTConfig

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
FILES = {
    "pictures": [{"images": [f"{n}.png"], "messages": MESSAGES} for n in range(3)],
    "chat": [{"messages": MESSAGES}] * 2,
}


def test_sets_with_images_and_without_are_one_mixture(tmp_path):
    files = [write_rows(tmp_path / f"{name}.jsonl", rows) for name, rows in FILES.items()]
    paths = [{"path": file} for file in files]
    entries = [paths[0] | {"epochs": 2}, paths[1] | {"source": "talk"}]
    vision = module("vision")
    run = PackedSFTConfig(str(tmp_path), use_cpu=True, bf16=False)

    def load(**named):
        processor = SimpleNamespace(chat_template="any")
        arguments, kept = vision.Arguments(**named), ("images", "image")
        rows, _ = module("recipe_data").load_data(arguments, run, processor, kept=kept)
        return vision.in_folder(rows, "photos")

    rows = load(datasets=entries)
    assert run.mixture == {"pictures": {"epochs": 2}}
    assert rows["pictures"]["images"][:] == [[f"photos/{n}.png"] for n in range(3)]
    assert rows["talk"].column_names == ["messages"]
    alone = load(dataset_name=paths[0]["path"])
    assert alone["images"][:] == rows["pictures"]["images"][:]
