"""The preview of a training command shows the rows that the command trains, for every recipe.

The recipe itself builds its trainer, on a tiny model and local rows in place of those on the hub.
"""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from helpers.recipes import FOLDER, YAMLS, commands_of, module
from helpers.tiny import save_tiny_model, tiny_rows

from trl_packing import PackedSFTTrainer
from trl_packing.cli import main
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import TrainingCommand


def instructions() -> list[dict[str, Any]]:
    rows = tiny_rows("question_answer", 24)
    return [{"instruction": r["question"], "input": "", "output": r["answer"]} for r in rows]


def texts() -> list[dict[str, Any]]:
    rows = tiny_rows("question_answer", 24)
    return [{"text": f"{r['question']}\n### Response:\n{r['answer']}", "n": 1} for r in rows]


def chats() -> list[dict[str, Any]]:
    rows = tiny_rows("conversational_language_modeling", 24)
    return [row | {"source": "a" if i % 3 else "b"} for i, row in enumerate(rows)]


def questions() -> list[dict[str, Any]]:
    rows = tiny_rows("question_answer", 24)
    return [{"query": r["question"], "response": [r["answer"], "No."]} for r in rows]


def looks(folder: Path) -> list[dict[str, Any]]:
    """Conversations with one picture, two, or none, as paths in a folder."""
    rows = []
    for number, row in enumerate(module("demo_pictures").demo_rows(24)):
        names = [f"{number}_{n}.png" for n in range(len(row["images"]))]
        for name, image in zip(names, row["images"], strict=True):
            image.save(folder / name)
        rows.append({"images": names, "messages": row["messages"]})
    return rows


ROWS = {
    "chat_data": instructions,
    "tool_calling": lambda: tiny_rows("tools", 24),
    "response_template": texts,
    "evaluation": chats,
    "streaming": chats,
    "every_turn": chats,
    "shared_prefixes": questions,
}
CHAT_YAMLS = ("full_8b", "full_70b", "lora_8b", "dora_8b", "qlora_70b")
HOLDS_OUT = ("--test_split_size", "0.2")
FURTHER = {
    "sft_packed": (*HOLDS_OUT, "--num_samples", "0"),
    "compare_packing": (*HOLDS_OUT, "--num_documents", "10"),
    "padding_free": (*HOLDS_OUT, "--num_documents", "10"),
    "evaluation": ("--dataset_test_split", "train[:4]"),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("vision_model")
    for part in module("demo_pictures").demo_model(seed=0):
        part.save_pretrained(folder)
    return str(folder)


def options(recipe: str, name: str | None, model: str, folder: Path) -> list[str]:
    """Return the arguments of `recipe` with a YAML file, on a local model and local rows."""
    rows = ROWS.get(recipe)
    if rows is None:
        is_chat = name is None or name.startswith(CHAT_YAMLS)
        rows = chats if is_chat else lambda: tiny_rows("question_answer", 24)
    file = folder / "rows" / "train.jsonl"
    file.parent.mkdir(exist_ok=True)
    made = looks(folder) if recipe == "vision" else rows()
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    data = file.parent if recipe == "streaming" else file
    split = ["train"]
    return [
        *(("--config", str(FOLDER / name)) if name else ()),
        *("--model_name_or_path", model, "--output_dir", str(folder / "out")),
        *("--dataset_name", str(data)),
        *(("--dataset_config", "default") if recipe == "streaming" else ()),
        *(("--dataset_train_split", *split) if split else ()),
        *(("--image_folder", str(folder)) if recipe == "vision" else ()),
        *FURTHER.get(recipe, ()),
    ]


class Built(BaseException):
    """The trainer of a recipe is built."""


def trained_documents(recipe: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Return the documents of the first trainer that the recipe builds."""
    build, trainers = PackedSFTTrainer.__init__, []

    def build_and_stop(self: PackedSFTTrainer, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        trainers.append(self)
        raise Built

    with patch.object(PackedSFTTrainer, "__init__", build_and_stop), pytest.raises(Built):
        module(recipe).main(arguments)
    return [*trainers[0].train_dataset]


def previewed_documents(words: list[str]) -> list[dict[str, Any]]:
    run = PreviewedRun.from_call(TrainingCommand.from_words(words).call)
    return [*run.documents()[0]]


def tokens_of(documents: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(list(d["input_ids"]), list(d["labels"])) for d in documents]


# The entries of sft_mixture.yaml are on the hub; a test below has several data sets.
FILES = [name for name in YAMLS if name != "sft_mixture.yaml"]
PAIRS = sorted({(recipe, name) for name in FILES for recipe in commands_of(name)})


def test_every_file_is_previewed():
    assert {name for _, name in PAIRS} == set(FILES)


@pytest.mark.parametrize(("recipe", "name"), [*PAIRS, ("sft_packed", None)])
def test_the_rows_previewed_are_the_rows_trained(
    recipe, name, model, vision_model, tmp_path, capsys
):
    if name and name.startswith("qlora"):
        pytest.importorskip("bitsandbytes")
    if recipe == "vision":
        model = vision_model
    arguments = options(recipe, name, model, tmp_path)
    trained = tokens_of(trained_documents(recipe, arguments))
    assert len(trained) > 5
    assert any(label != -100 for _, labels in trained for label in labels)
    assert tokens_of(previewed_documents([f"recipes/{recipe}.py", *arguments])) == trained
    if recipe == "sft_packed":
        assert tokens_of(previewed_documents(arguments)) == trained


def test_sources_with_columns_of_their_own_are_inspected_as_they_are_trained(model, tmp_path):
    """Rows of all data sets are numbered as one; those held out are in none of them."""
    files = {"alpaca": instructions(), "math": tiny_rows("question_answer", 24), "talk": chats()}
    own = {
        "alpaca": {"prompt_template": "{instruction}\n{input}", "completion_column": "output"},
        "math": {"prompt_column": "question", "completion_column": "answer", "chat": False},
        "talk": {},
    }
    entries = []
    for name, rows in files.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        entries.append({"path": str(path), **own[name]})
    settings = {"model_name_or_path": model, "output_dir": str(tmp_path), "datasets": entries}
    config = tmp_path / "run.yaml"

    def words(settings: dict[str, Any]) -> list[str]:
        config.write_text(yaml.safe_dump(settings | {"test_split_size": 0.2}))
        return ["--config", str(config)]

    trained = tokens_of(trained_documents("sft_packed", words(settings)))
    run = PreviewedRun.from_call(TrainingCommand.from_words(words(settings)).call)
    assert len(trained) == len(run.dataset) == 72 - 15
    rows = range(0, 57, 8)
    shown = [d for row in rows for d in run.documents_of_row(row)[0]]
    assert tokens_of(shown) == [trained[row] for row in rows]
    assert tokens_of([*run.documents()[0]]) == trained
    entries[1]["prompt_column"], entries[1]["completion_column"] = "answer", "question"
    assert tokens_of(previewed_documents(words(settings))) != trained


def test_another_recipe_would_show_other_rows(model, tmp_path):
    """The negative control: the recipe decides, so the comparison above can fail."""
    rows = [
        {"prompt": r["question"], "completion": r["answer"]}
        for r in tiny_rows("question_answer", 8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", model, "--data", str(tmp_path / "rows.jsonl")]
    named = ["--model_name_or_path", model, "--dataset_name", words[-1]]
    plain = tokens_of(previewed_documents(["recipes/resuming.py", *named]))
    chat = tokens_of(previewed_documents(["recipes/sft_packed.py", *named]))
    assert plain != chat
    assert tokens_of(previewed_documents(words)) == chat
    assert tokens_of(previewed_documents([*words, "--chat", "false"])) == plain


def test_the_command_shows_what_the_demo_trains(capsys):
    script = str(FOLDER / "sft_packed.py")
    assert main(["inspect", script, "--rows", "0", "4999", "--json"]) == 0
    shown = [row["documents"][0] for row in json.loads(capsys.readouterr().out)["rows"]]
    trained = trained_documents("sft_packed", [])
    assert tokens_of(shown) == tokens_of([trained[0], trained[4999]])


def test_the_command_shows_the_pictures_of_the_demo(capsys):
    script = str(FOLDER / "vision.py")
    assert main(["inspect", script, "--rows", "0", "1", "2", "3", "--json"]) == 0
    found = [row["documents"][0] for row in json.loads(capsys.readouterr().out)["rows"]]
    trained = trained_documents("vision", [])
    assert tokens_of(found) == tokens_of(trained[:4])
    rows = module("demo_pictures").demo_rows(600)
    for number, document in enumerate(found):
        sizes = [[*image.size[::-1]] for image in rows[number]["images"]]
        assert document.get("image_sizes") == sizes
    assert main(["inspect", script, "--rows", *map(str, range(8))]) == 0
    shown = capsys.readouterr().out
    assert shown.count("[image ") == sum(len(rows[number]["images"]) for number in range(8))
