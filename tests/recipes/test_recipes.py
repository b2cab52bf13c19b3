"""recipes/: every YAML file parses, every memory table adds up, and every recipe runs.

Each recipe is run on a tiny model with the YAML file beside it, and must print what the "Expected
output" of its docstring says: the same words, other numbers ("…" stands for anything).
"""

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from helpers.tiny import save_tiny_model, tiny_rows
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from trl import SFTConfig, TrlParser

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.tools.exit_messages import exits_in_one_line

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"

# A recipe → the YAML file that its test runs.
RECIPES = {
    "full": "full_0.1b",
    "lora": "lora_0.1b",
    "qlora": "lora_0.1b",
    "dora": "lora_0.1b",
    "chat_data": "chat_data",
    "tool_calling": "tool_calling",
    "response_template": "response_template",
    "streaming": "streaming",
    "resuming": "resuming",
    "evaluation": "evaluation",
}
YAMLS = sorted(path.name for path in FOLDER.glob("*.yaml"))


def module(recipe: str) -> ModuleType:
    return importlib.import_module(f"trl_packing.recipes.{recipe}")


def commands_of(name: str) -> list[str]:
    """Return the recipes that the comment at the top of a YAML file runs it with."""
    return re.findall(rf"recipes/(\w+)\.py --config recipes/{name}", (FOLDER / name).read_text())


def parse(recipe: str, arguments: list[str]) -> tuple[Any, PackedSFTConfig]:
    parser = TrlParser((module(recipe).Arguments, PackedSFTConfig))
    return parser.parse_args_and_config([*arguments, "--use_cpu", "true", "--bf16", "false"])


def runs() -> list[Any]:
    """Return every pair of a YAML file and a recipe that its comment names."""
    pairs = [(name, recipe) for name in YAMLS for recipe in commands_of(name)]
    return [pytest.param(*pair, id=" ".join(pair)) for pair in pairs if pair[1] in RECIPES]


# --- YAML files -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "recipe"), runs())
def test_a_yaml_file_parses_with_the_recipe_that_it_names(name, recipe):
    _, args = parse(recipe, ["--config", str(FOLDER / name)])
    written = yaml.safe_load((FOLDER / name).read_text())
    for key in ("max_length", "learning_rate", "gradient_accumulation_steps"):
        if key in written:
            assert getattr(args, key) == written[key]


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_file_names_a_command_that_is_there(name):
    recipes = commands_of(name)
    assert recipes
    assert all((FOLDER / f"{recipe}.py").exists() for recipe in recipes)


def test_every_recipe_has_a_yaml_file():
    named = {recipe for name in YAMLS for recipe in commands_of(name)}
    assert set(RECIPES) <= named


@pytest.mark.parametrize("line", ["max_lenght: 5", "lora_r: 8", "packing_strategy: best"])
def test_a_key_or_a_value_that_cannot_be_is_refused(tmp_path, line):
    path = tmp_path / "wrong.yaml"
    path.write_text((FOLDER / "full_0.1b.yaml").read_text() + line + "\n")
    with pytest.raises(ValueError, match=line.split(":")[0]):
        parse("full", ["--config", str(path)])


ENGINES = [
    (name, found[1])
    for name in YAMLS
    if (found := re.search(r"--config_file recipes/(\S+)", (FOLDER / name).read_text()))
]


@pytest.mark.parametrize(("name", "engine_name"), ENGINES)
def test_a_yaml_file_checkpoints_activations_once(name, engine_name):
    """By accelerate's FSDP or by the training arguments: both is an error of transformers."""
    if not (FOLDER / engine_name).exists():
        pytest.skip(f"no {engine_name} here yet")
    engine = yaml.safe_load((FOLDER / engine_name).read_text())
    by_engine = engine.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
    by_trainer = yaml.safe_load((FOLDER / name).read_text()).get("gradient_checkpointing", True)
    assert by_engine != by_trainer


def test_a_configuration_does_not_warn_of_what_trl_sets(tmp_path):
    options = {"use_cpu": True, "bf16": False}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        args = PackedSFTConfig(str(tmp_path), **options)
        assert not [w for w in warned if "gradient_checkpointing" in str(w.message)]
        SFTConfig(str(tmp_path), **options)
    renamed = hasattr(args, "activation_checkpointing")  # transformers 5.23
    assert renamed == any("gradient_checkpointing" in str(w.message) for w in warned)


# --- the memory arithmetic ------------------------------------------------------------------------

TABLES = [name for name in YAMLS if "# Memory" in (FOLDER / name).read_text()]


def value(expression: str) -> float:
    """Return the bytes that "2 B × 8,192 tokens × 4,096 / 8" comes to."""
    plain = expression.replace("tokens", "").replace(" B", "").replace("×", "*").replace(",", "")
    assert re.fullmatch(r"[\d.e*/ ]+", plain), expression
    return eval(plain)


def table_of(text: str) -> tuple[list[tuple[str, float]], float]:
    """Return the rows of a memory table, expression and GB, and its total in GB."""
    rows = [
        (found[1], float(found[2]))
        for found in re.finditer(r"(?m)^#   .*?\s{2,}([\d.]+ .*?)\s{2,}([\d.]+) GB$", text)
    ]
    total = re.search(r"(?m)^# +about ([\d.]+) GB$", text)
    assert total is not None
    return rows, float(total[1])


def assert_adds_up(text: str) -> None:
    rows, total = table_of(text)
    assert len(rows) >= 4
    for expression, gigabytes in rows:
        assert value(expression) / 1e9 == pytest.approx(gigabytes, abs=0.051), expression
    assert sum(gigabytes for _, gigabytes in rows) == pytest.approx(total, abs=0.51)


@pytest.mark.parametrize("name", TABLES)
def test_the_memory_arithmetic_adds_up(name):
    assert_adds_up((FOLDER / name).read_text())


def test_all_big_models_have_their_arithmetic_and_a_wrong_one_is_seen():
    assert len(TABLES) >= 7
    text = (FOLDER / "lora_8b.yaml").read_text()
    with pytest.raises(AssertionError):
        assert_adds_up(text.replace("16.4 GB", "61.4 GB"))
    with pytest.raises(AssertionError):
        assert_adds_up(text.replace("about 20 GB", "about 12 GB"))


LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    ("config", "all_weights", "ends", "layer", "matrices", "rank_16"),
    [
        (LLAMA_70B, 70.55e9, 2.10e9, 0.856e9, 68.45e9, 207e6),
        (QWEN3_8B, 8.19e9, 1.24e9, 0.193e9, 6.95e9, 43.6e6),
    ],
    ids=["70B", "8B"],
)
def test_the_arithmetic_counts_the_parameters(config, all_weights, ends, layer, matrices, rank_16):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    counted = {
        all_weights: model.num_parameters(),
        ends: model.lm_head.weight.numel() + model.get_input_embeddings().weight.numel(),
        layer: sum(p.numel() for p in model.model.layers[0].parameters()),
        matrices: sum(m.weight.numel() for m in linear),
        rank_16: 16 * sum(m.in_features + m.out_features for m in linear),
    }
    for written, number in counted.items():
        assert written == pytest.approx(number, rel=0.005)


def kept_in_a_layer(config: Any, tokens: int, *, lora: bool = False) -> float:
    """Return how many bf16 numbers one decoder layer keeps for its backward pass."""
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        model = adapted.base_model.model
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), hidden, *positions)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model.model.layers[0](hidden, position_embeddings=positions, attention_mask=None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 2


@pytest.mark.parametrize(
    ("config", "lora", "alone", "with_gradients"),
    [
        (LLAMA_70B, False, 199_000, 285_000),
        (LLAMA_70B, True, 226_000, 312_000),
        (QWEN3_8B, False, 108_000, 145_000),
        (QWEN3_8B, True, 116_000, 153_000),
    ],
)
def test_the_arithmetic_counts_what_a_layer_keeps(config, lora, alone, with_gradients):
    """Measured on a layer an eighth (a quarter) as wide, with the same proportions.

    While a layer is computed backwards, three gradients of its widest activations come on top.
    """
    share = config.hidden_size // 1024
    small = type(config)(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=config.intermediate_size // share,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads // share,
        num_key_value_heads=config.num_key_value_heads // share,
        head_dim=128,
    )
    kept = [kept_in_a_layer(small, tokens, lora=lora) for tokens in (32, 96)]
    measured = share * (kept[1] - kept[0]) / 64  # without what does not grow with the tokens
    assert alone == pytest.approx(measured, rel=0.05)
    assert with_gradients == pytest.approx(measured + 3 * config.intermediate_size, rel=0.05)


# --- what a newcomer reads ------------------------------------------------------------------------


def expected_output(recipe: str) -> list[str]:
    """Return the lines that the docstring of a recipe promises: the last indented part of it."""
    text = (module(recipe).__doc__ or "").rstrip()
    assert "\nExpected output" in text, f"{recipe}.py has no expected output"
    found = re.search(r"(?:\n(?:    [^\n]*)?)+$", text)
    assert found is not None
    return [line.strip() for line in found[0].splitlines() if line.strip()]


def pattern_of(line: str) -> str:
    """Return what matches `line` with other numbers and folders, and anything for "…".

    What the model itself writes, before and after, is anything too.
    """
    line = re.sub("^(before|after)  .*", r"\1  …", line)
    pattern = re.escape(re.sub(r"outputs/[\w./-]*\w", "FOLDER", re.sub("─+", "─", line)))
    pattern = re.sub(r"\d[\d,]*(?:\\\.\d+)?(?:e\\-\d+)?", r"-?[\\d.,]+(?:e[+-]?\\d+)?", pattern)
    pattern = pattern.replace("FOLDER", r"\S+")
    pattern = re.sub(r"(?:\\ )+", r"\\s+", pattern)
    return pattern.replace("─", "─+").replace("…", ".*")


def assert_prints(recipe: str, output: str) -> None:
    """Assert that `output` has the expected lines, in their order."""
    at = 0
    for line in expected_output(recipe):
        if line == "…":
            continue
        found = re.compile(pattern_of(line)).search(output, at)
        assert found is not None, f"not printed, or not here: {line!r}\n{output[at:]}"
        at = found.end()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_docstring_says_how_to_run_it_and_what_comes_out(recipe):
    text = module(recipe).__doc__
    assert f"recipes/{recipe}.py --config recipes/" in text
    assert len(expected_output(recipe)) >= 3
    assert len((FOLDER / f"{recipe}.py").read_text().splitlines()) <= 130
    for path in re.findall(r"(?:recipes|docs)/[\w./]+\.(?:py|yaml|md)", text):
        assert (ROOT / path).exists() or "/accelerate/" in path, path


def test_other_words_are_not_taken_for_the_expected_output(monkeypatch):
    promised = ["documents    200 · 39,312 tokens", "Trained 4,884,480 of … (3.5%)."]
    monkeypatch.setattr(f"{__name__}.expected_output", lambda recipe: promised)
    assert_prints("lora", "documents  7 · 1 tokens\nTrained 5 of 1,024 parameters (29.5%).")
    for output in (
        "documents  7 · 1 tokens\nTrained all of them (3.5%).",
        "Trained 5 of 1,024 parameters (29.5%).\ndocuments  7 · 1 tokens",
    ):
        with pytest.raises(AssertionError, match="not printed"):
            assert_prints("lora", output)


def test_the_readme_lists_every_recipe_and_every_yaml_file():
    text = (FOLDER / "README.md").read_text()
    for name in (*(f"{recipe}.py" for recipe in RECIPES), *YAMLS):
        assert f"`{name}`" in text
    named = set(re.findall(r"`([\w./]+\.(?:py|yaml))`", text))
    assert [name for name in named if not (FOLDER / name).exists()] == []
    runnable = {path.name for path in FOLDER.glob("*.py")} - {"recipe_data.py", "make_demo_data.py"}
    assert runnable <= named


@pytest.mark.parametrize("recipe", RECIPES)
def test_without_a_model_it_says_what_is_missing(recipe, capsys):
    with pytest.raises(SystemExit):
        module(recipe).main([])
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0] == f"usage: {recipe}.py --config FILE [--OPTION VALUE]"
    assert "required: --model_name_or_path" in said[-1]
    assert len(said) == 2


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_refusal_is_one_line_without_a_traceback(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "bad.yaml").write_text("learning_rate: [1")
    (tmp_path / "unknown.yaml").write_text("lerning_rate: 1.0e-4")
    given = ["--model_name_or_path", "nothing", "--dataset_name", str(tmp_path / "nothing.jsonl")]
    if recipe == "qlora":
        given += ["--use_cpu", "true"]
    lacks_package = recipe == "qlora" and find_spec("bitsandbytes") is None
    for options, sentence in (
        (["--nonsense", "1"], "--nonsense"),
        (["--train_on", "assistant", "--assistant_only_loss", "true"], "both say what is trained"),
        (["--config", str(tmp_path / "nothing.yaml")], "nothing.yaml"),
        (["--config", str(tmp_path / "bad.yaml")], "bad.yaml"),
        (["--config", str(tmp_path / "unknown.yaml")], "lerning_rate"),
        ([], "bitsandbytes is not installed" if lacks_package else "nothing.jsonl"),
    ):
        with pytest.raises(SystemExit) as refusal:
            module(recipe).main([*given, *options])
        said = refusal.value.code
        assert said.startswith(f"{recipe}.py: ")
        assert "\n" not in said
        assert sentence in said


def test_an_error_inside_a_training_step_keeps_its_traceback():
    def training_step():
        raise ValueError("a shape is wrong")

    @exits_in_one_line
    def main(function):
        function()

    with pytest.raises(ValueError, match="a shape is wrong"):
        main(training_step)
    with pytest.raises(SystemExit, match=r"^test_recipes.py: invalid literal"):
        main(lambda: int("x"))


def test_a_rank_says_its_number_and_an_unexpected_error_its_type(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    @exits_in_one_line
    def main():
        return {}["no key"]

    with pytest.raises(SystemExit) as refusal:
        main()
    assert refusal.value.code == (
        "test_recipes.py (rank 1): KeyError: 'no key' (TRL_PACKING_TRACEBACK=1 shows where)"
    )


# --- 4 bits ---------------------------------------------------------------------------------------


def test_qlora_without_cuda_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refusal:
        module("qlora").main(["--config", str(FOLDER / "qlora_70b.yaml")])
    assert re.fullmatch(r"qlora.py: .*CUDA.*lora.py.*--use_cpu true", str(refusal.value))


def test_qlora_without_bitsandbytes_says_what_to_install(monkeypatch):
    qlora = module("qlora")
    monkeypatch.setattr(qlora, "find_spec", lambda name: None)
    arguments = ["--config", str(FOLDER / "qlora_70b.yaml"), "--use_cpu", "true"]
    with pytest.raises(SystemExit, match=r"pip install 'trl-packing\[qlora\]'"):
        qlora.main(arguments)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def instructions() -> list[dict[str, str]]:
    rows = tiny_rows("question_answer", 48)
    return [{"instruction": r["question"], "input": "", "output": r["answer"]} for r in rows]


def texts() -> list[dict[str, str]]:
    rows = tiny_rows("question_answer", 48)
    texts = [f"### Instruction:\n{r['question']}\n\n### Response:\n{r['answer']}" for r in rows]
    return [{"text": text, "number": str(i)} for i, text in enumerate(texts)]


ROWS = {
    "chat_data": instructions,
    "tool_calling": lambda: tiny_rows("tools", 24),
    "response_template": texts,
}


def data_of(recipe: str, folder: Path) -> list[str]:
    """Write the data of a recipe, and return the options that name it."""
    split = ["--dataset_train_split", "train"]
    chats = tiny_rows("conversational_language_modeling", 64)
    if recipe == "streaming":
        for shard in range(4):
            write(folder / "shards" / f"{shard}.jsonl", chats[shard::4])
        return ["--dataset_name", str(folder / "shards"), "--dataset_config", "default", *split]
    if recipe == "evaluation":
        chats = [row | {"source": "gsm8k" if i % 3 else "alpaca"} for i, row in enumerate(chats)]
        write(folder / "splits" / "train.jsonl", chats)
        write(folder / "splits" / "test.jsonl", chats[:12])
        name = ["--dataset_name", str(folder / "splits"), "--dataset_config", "default"]
        return [*name, *split, "--dataset_test_split", "test"]
    rows = ROWS.get(recipe, lambda: tiny_rows("question_answer", 48))()
    return ["--dataset_name", write(folder / "rows.jsonl", rows), *split]


def options(recipe: str, model: str, folder: Path) -> list[str]:
    """Return the arguments of a short run on `model` with the YAML file of the recipe."""
    return [
        *("--config", str(FOLDER / f"{RECIPES[recipe]}.yaml"), "--model_name_or_path", model),
        *data_of(recipe, folder),
        *("--output_dir", str(folder / "out"), "--max_length", "512"),
        *("--max_steps", "10", "--gradient_accumulation_steps", "1", "--logging_steps", "5"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
    ]


def run(recipe: str, model: str, folder: Path, *further: str) -> PackedSFTTrainer:
    return module(recipe).main([*options(recipe, model, folder), *further])


def decreases(trainer: PackedSFTTrainer) -> bool:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1] < losses[0]


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


@pytest.mark.slow
def test_full_changes_every_weight(model, tmp_path, capsys):
    trainer = run("full", model, tmp_path)
    assert_prints("full", capsys.readouterr().out)
    assert decreases(trainer)
    before, after = weights(Path(model)), weights(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_lora_saves_an_adapter_and_leaves_the_model_alone(model, tmp_path, capsys):
    trainer = run("lora", model, tmp_path)
    assert_prints("lora", capsys.readouterr().out)
    assert decreases(trainer)
    adapter = weights(tmp_path / "out", "adapter_model.safetensors")
    assert adapter
    assert all("lora_" in name for name in adapter)
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)
    base, before = trainer.model.base_model.model.state_dict(), weights(Path(model))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(base[name.replace("q_proj", "q_proj.base_layer")], before[name])


@pytest.mark.slow
def test_dora_merged_is_the_model_with_its_adapter(model, tmp_path, capsys):
    merged = tmp_path / "merged"
    trainer = run("dora", model, tmp_path, "--merged_dir", str(merged))
    assert_prints("dora", capsys.readouterr().out)
    assert decreases(trainer)
    adapter = weights(tmp_path / "out", "adapter_model.safetensors")
    assert any("magnitude" in name for name in adapter)
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        logits = [
            m.eval()(ids).logits
            for m in (trainer.model, *map(AutoModelForCausalLM.from_pretrained, (merged, model)))
        ]
    # float32, W + BA in one matrix or apart: a few roundings of logits of size 1
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)
    assert (logits[1] - logits[2]).abs().max() > 1e-2


@pytest.mark.slow
def test_qlora_trains_on_the_cpu_when_asked(model, tmp_path, capsys):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trainer = run("qlora", model, tmp_path, "--use_cpu", "true")
    assert_prints("qlora", capsys.readouterr().out)
    assert decreases(trainer)
    base = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert base.dtype == torch.uint8
    assert weights(tmp_path / "out", "adapter_model.safetensors")


@pytest.mark.slow
def test_chat_data_trains_the_assistants_turns(model, tmp_path, capsys):
    trainer = run("chat_data", model, tmp_path)
    assert_prints("chat_data", capsys.readouterr().out)
    assert decreases(trainer)
    assert trained(trainer, 2) == "Four, as two and two have been in every village that ever " + (
        "counted sheep.<|im_end|>"
    )


def trained(trainer: PackedSFTTrainer, row: int) -> str:
    """Return the tokens of a document that are trained, as text."""
    document = trainer.train_dataset[row]
    labels = np.asarray(document["labels"])
    ids = np.asarray(document["input_ids"])[labels != -100]
    return trainer.processing_class.decode(ids)


@pytest.mark.slow
def test_tool_calls_are_trained_and_tool_results_are_not(model, tmp_path, capsys):
    trainer = run("tool_calling", model, tmp_path)
    assert_prints("tool_calling", capsys.readouterr().out)
    assert decreases(trainer)
    text = trained(trainer, 3)
    assert '"name": "weather"' in text
    assert "It is 3 degrees." in text
    assert text.count("3 degrees") == 1  # the tool said it too


@pytest.mark.slow
def test_response_template_trains_what_follows_it(model, tmp_path, capsys):
    trainer = run("response_template", model, tmp_path)
    assert_prints("response_template", capsys.readouterr().out)
    assert decreases(trainer)
    assert trained(trainer, 0) == "Beautiful.<|im_end|>"


@pytest.mark.slow
def test_streaming_trains_for_max_steps(model, tmp_path, capsys):
    trainer = run("streaming", model, tmp_path, "--dataloader_num_workers", "0")
    output = capsys.readouterr().out
    assert_prints("streaming", output)
    assert "Shards in the stream: 4. Ranks: 1" in output
    assert trainer.state.global_step == 10
    assert decreases(trainer)


class Killed(BaseException):
    """Nothing in between catches it, as nothing catches SIGKILL."""


@pytest.fixture
def killed_in_second_save(monkeypatch) -> Iterator[None]:
    """Stop while the second checkpoint is being written, as if the process were gone."""
    saves = []
    original = PackedSFTTrainer._save_rng_state

    def save(self: Any, output_dir: str) -> None:
        saves.append(output_dir)
        if len(saves) == 2:
            raise Killed
        original(self, output_dir)

    monkeypatch.setattr(PackedSFTTrainer, "_save_rng_state", save)


@pytest.mark.slow
def test_resuming_goes_on_before_the_checkpoint_that_was_being_written(
    model, tmp_path, capsys, killed_in_second_save
):
    steps = ("--save_steps", "3")
    with pytest.raises(Killed):
        run("resuming", model, tmp_path, *steps)
    assert "No checkpoint in" in capsys.readouterr().out
    run("resuming", model, tmp_path, *steps)
    output = capsys.readouterr().out
    assert_prints("resuming", output)
    assert "checkpoint-6 was being written" in output
    assert "Going on from checkpoint-3." in output
    run("resuming", model, tmp_path / "whole", *steps)
    resumed, whole = weights(tmp_path / "out"), weights(tmp_path / "whole" / "out")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any(not torch.equal(whole[name], t) for name, t in weights(Path(model)).items())


def test_right_documents_are_those_without_an_error():
    evaluation = module("evaluation")
    from transformers import EvalPrediction

    labels = np.array([[-100, 5, 6, 7], [-100, -100, 8, -100], [-100, 5, 6, -100]])
    # What position i predicts is label i + 1.
    predicted = np.array([[5, 6, 7, 0], [9, 8, 9, 9], [5, 0, 9, 9]])
    found = evaluation.right_documents(EvalPrediction(predicted, labels))
    assert found == {"right_documents": pytest.approx(2 / 3)}


@pytest.mark.slow
def test_evaluation_reports_sources_and_keeps_the_best_model(model, tmp_path, capsys):
    trainer = run(
        *("evaluation", model, tmp_path, "--counts_right", "true", "--max_steps", "8"),
        *("--eval_steps", "4", "--save_steps", "4"),
    )
    output = capsys.readouterr().out
    assert_prints("evaluation", output)
    evaluated = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert [e["step"] for e in evaluated] == [0, 4, 8, 8]
    best = min(evaluated[1:3], key=lambda entry: entry["eval_loss"])
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best['step']}")
    assert evaluated[3]["eval_loss"] == pytest.approx(best["eval_loss"], abs=1e-6)
    table = {
        name: map(float, n) for name, *n in re.findall(r"(eval_\w+) +([\d.]+) +([\d.]+)", output)
    }
    assert len(table) == 5
    for name, (before, after) in table.items():
        assert before == pytest.approx(evaluated[0][name], rel=1e-3)
        assert after == pytest.approx(evaluated[3][name], rel=1e-3)
        assert after <= before if name == "eval_right_documents" else after < before
    assert evaluated[3]["eval_perplexity"] == pytest.approx(np.exp(evaluated[3]["eval_loss"]))


# --- in two processes -----------------------------------------------------------------------------


def on_two_ranks(recipe: str, model: str, folder: Path, *further: str) -> str:
    """Run a recipe as a user does, in two processes, and return what it printed."""
    arguments = [*options(recipe, model, folder), *further]
    return torchrun(folder, str(FOLDER / f"{recipe}.py"), *arguments)


def torchrun(folder: Path, *arguments: str) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


SGD = ("--optim", "sgd", "--learning_rate", "0.05", "--max_steps", "4")


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "saved"), [("full", "model"), ("lora", "adapter_model")])
def test_two_processes_train_as_one_with_twice_the_accumulation(recipe, saved, model, tmp_path):
    """Tolerance, float32: the order of a sum over two micro-batches, in four steps of SGD."""
    folder = tmp_path / "two"
    folder.mkdir()
    output = on_two_ranks(recipe, model, folder, *SGD)
    assert "2 ranks × 1 accumulated" in output
    assert output.count("trl_packing ─") == 1
    assert output.count("is in ") == 1
    two = weights(folder / "out", f"{saved}.safetensors")
    trained = {}
    for accumulation in ("2", "1"):
        folder = tmp_path / accumulation
        run(recipe, model, folder, *SGD, "--gradient_accumulation_steps", accumulation)
        trained[accumulation] = weights(folder / "out", f"{saved}.safetensors")
    torch.testing.assert_close(two, trained["2"], rtol=0, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(two, trained["1"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_two_processes_read_parts_of_their_own_of_a_stream(model, tmp_path):
    output = on_two_ranks("streaming", model, tmp_path, "--max_steps", "4")
    assert "Shards in the stream: 4. Ranks: 2; each reads its own part, 2 at a time." in output
    assert output.count("is in ") == 1
    assert weights(tmp_path / "out")


FSDP2 = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}


@pytest.mark.slow
def test_full_trains_sharded_weights_with_its_configuration_for_fsdp2(model, tmp_path):
    """As in recipes/accelerate/fsdp2.yaml, FSDP checkpoints the activations; float32, not bf16."""
    settings = yaml.safe_load((FOLDER / "full_8b_fsdp2.yaml").read_text())
    settings |= {"fsdp": True, "fsdp_config": FSDP2 | {"activation_checkpointing": True}}
    (tmp_path / "sharded.yaml").write_text(yaml.safe_dump(settings))
    chats = write(tmp_path / "rows.jsonl", tiny_rows("conversational_language_modeling", 48))
    arguments = ["--model_name_or_path", model, "--dataset_name", chats, "--output_dir", "out"]
    small = ["--max_length", "128", "--max_steps", "3", "--use_cpu", "true", "--bf16", "false"]
    config = ["--config", str(tmp_path / "sharded.yaml")]
    output = torchrun(
        tmp_path, "-m", "helpers.distributed.recipe", "full", *config, *arguments, *small
    )
    assert "Every parameter is sharded." in output
    assert "2 ranks" in output
    saved = weights(tmp_path / "out")
    for weight, before in weights(Path(model)).items():
        assert saved[weight].shape == before.shape
        assert weight.endswith("norm.weight") or not torch.equal(saved[weight], before)
