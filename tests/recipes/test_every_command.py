"""Every command in `recipes/` and in the README trains the rows that its preview shows.

It trains two steps, with its YAML file unchanged. Stand-ins are the model, a tiny one, and the hub,
which serves rows of the same columns.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from architectures.tiny_models import build_tiny, tiny_config
from datasets import Dataset, IterableDataset, load_dataset
from helpers.chat_templates import tokenizer_for
from helpers.recipes import FOLDER, ROOT, YAMLS, assert_prints, commands_of, module
from helpers.runs import call_of_command, run_of_call
from helpers.tiny import save_tiny_model, tiny_rows
from torch import nn
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from trl_packing import PackedSFTTrainer

VISION: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
COMPARISONS = ("compare_packing", "padding_free")
PRINTED = ("chat_data", "response_template", "streaming", "tool_calling")  # as their docstrings say


def chats() -> list[dict[str, Any]]:
    rows = tiny_rows("conversational_language_modeling", 64)
    return [row | {"source": "a" if i % 3 else "b"} for i, row in enumerate(rows)]


def thoughts() -> list[dict[str, Any]]:
    rows = tiny_rows("conversational_language_modeling", 12)
    for answer in [message for row in rows for message in row["messages"][1::2]]:
        answer["content"] = f"<think>\nLet me see.\n</think>\n\n{answer['content']}"
    return rows


def pairs(*names: str) -> list[dict[str, Any]]:
    rows = tiny_rows("question_answer", 48)
    return [dict(zip(names, (row["question"], row["answer"]), strict=True)) for row in rows]


def looks() -> list[dict[str, Any]]:
    return list(module("demo_pictures").demo_rows(16))


ALPACA = "### Instruction:\n{instruction}\n\n### Response:\n{output}"
# Rows with the columns of the data sets on the hub.
HUB = {
    "openai/gsm8k": lambda: pairs("question", "answer"),
    "tatsu-lab/alpaca": lambda: [
        {**row, "input": "", "text": ALPACA.format(**row)} for row in pairs("instruction", "output")
    ],
    "hkust-nlp/dart-math-uniform": lambda: pairs("query", "response"),
    "llamafactory/glaive_toolcall_en": lambda: tiny_rows("tools", 24),
    "HuggingFaceTB/smoltalk2": thoughts,
    "trl-lib/llava-instruct-mix": looks,
}


def hub(path: str, name: str | None = None, *, split: str = "train", **options: Any) -> Any:
    """Serve a data set as `load_dataset` does; files are read as they are."""
    if path.count("/") != 1 or Path(path).exists():
        return load_dataset(path, name, split=split, **options)
    assert re.fullmatch(r"\w+(\[:\d+\])?", split), split
    rows = Dataset.from_list(HUB.get(path, chats)())
    return rows.to_iterable_dataset(num_shards=4) if options.get("streaming") else rows


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("vision")
    for part in module("demo_pictures").demo_model(seed=0):
        part.save_pretrained(folder)
    text = save_tiny_model(tmp_path_factory.mktemp("text"), "llama", chat=True)
    hybrid = str(tmp_path_factory.mktemp("qwen3_5"))
    tokenizer = tokenizer_for("qwen3_5_think")
    config = tiny_config("qwen3_5", {"text_config": {"vocab_size": len(tokenizer)}})
    for part in (build_tiny("qwen3_5", VISION[type(config)], config), tokenizer):
        part.save_pretrained(hybrid)  # the class of the checkpoint, with its tower
    return {"text": text, "vision": str(folder), "qwen3_5": hybrid}


def previewed(recipe: str | None, words: list[str]) -> Any:
    """Return the documents that `trl-packing inspect` shows."""
    script = [] if recipe is None else [f"recipes/{recipe}.py"]
    return run_of_call(call_of_command(*script, *words)).documents()[0]


def tokens_of(documents: Any) -> list[tuple[list[int], list[int]]]:
    return [(list(d["input_ids"]), list(d["labels"])) for d in documents]


def commands() -> list[Any]:
    """Return the options of every command, by its recipe; the quick ones are not marked slow."""
    found = {(recipe, f"--config recipes/{name}") for name in YAMLS for recipe in commands_of(name)}
    texts = [(ROOT / "README.md").read_text(), *(f.read_text() for f in FOLDER.glob("*.yaml"))]
    texts += [module(f.stem).__doc__ or "" for f in FOLDER.glob("[!m]*.py")]
    for text in texts:
        lines = text.replace("\\\n", " ").replace("#  ", " ")
        for recipe, options in re.findall(r"recipes/(\w+)\.py((?: +--config [^#\n]*)?)", lines):
            if "--config recipes/" in options:
                found.add((recipe, " ".join(options.split()).rstrip("`,")))
    quick = ("recipes/sft_mixture.yaml", "recipes/qwen3_5.yaml")
    return [
        pytest.param(*each, marks=() if each[1].endswith(quick) else pytest.mark.slow)
        for each in sorted(found)
        if "dataset_name" not in each[1]  # with a file of the reader
    ]


def assert_adapts_the_language_model_in_one_row(trainer: PackedSFTTrainer) -> None:
    """Assert that recurrent layers kept the row, and that all matrices but the tower's adapt."""
    assert trainer.attention.backend in ("documents", "by_document")
    modules = dict(trainer.model.named_modules())
    adapted = {name for name, module in modules.items() if hasattr(module, "lora_A")}
    assert any("linear_attn.in_proj_qkv" in name for name in adapted)
    plain = {name for name, module in modules.items() if type(module) is nn.Linear}
    left = {name for name in plain if ".lora_" not in name and ".base_layer" not in name}
    assert all(".visual." in name or name.endswith("lm_head") for name in left)
    assert not any(".visual." in name for name in adapted)


@pytest.mark.parametrize(("recipe", "options"), commands())
def test_the_command_trains(recipe, options, models, tmp_path, monkeypatch, capsys):
    if "4bit" in options or "qlora" in options:
        pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("trl_packing.data.files.load_dataset", hub)
    monkeypatch.chdir(ROOT)
    trained = []
    train = PackedSFTTrainer.train
    monkeypatch.setattr(
        PackedSFTTrainer,
        "train",
        lambda self, *a, **k: trained.append(self) or train(self, *a, **k),
    )
    words = [*shlex.split(options), "--max_steps", "2", "--output_dir", str(tmp_path)]
    kind = "vision" if recipe == "vision" else "text"
    if options.endswith("qwen3_5.yaml"):
        kind = "qwen3_5"
    words += ["--model_name_or_path", models[kind]]
    if options.endswith("long.yaml"):
        words += ["--sequence_parallel_size", "1"]  # one process here
    is_shown = recipe not in (*COMPARISONS, "streaming")  # its script reads the hub itself
    shown = tokens_of(previewed(recipe, words)) if is_shown else None
    if recipe == "vision":
        words += ["--dataloader_num_workers", "0"]  # four, on a machine of two cores, warn
    if recipe in COMPARISONS:
        words += ["--num_documents", "8"]
    module(recipe).main([*words, "--logging_steps", "1"])
    assert trained
    if recipe in PRINTED:
        assert_prints(recipe, capsys.readouterr().out)
    assert all(0 < trainer.state.global_step <= 2 for trainer in trained)
    assert all(trainer._trl_path is None for trainer in trained)
    if kind == "qwen3_5":
        assert_adapts_the_language_model_in_one_row(trained[0])
    if shown is not None:
        assert any(label != -100 for _, labels in shown for label in labels)
        rows = trained[0].train_dataset
        assert isinstance(rows, IterableDataset) or shown == tokens_of(rows)
