"""TRL's own published tests of `SFTTrainer`, run with `PackedSFTTrainer` in its place.

They are not part of this repository. Point TRL_TESTS at the `tests` folder of a TRL checkout:

    git clone --depth 1 --branch v1.16.0 https://github.com/huggingface/trl /tmp/trl
    TRL_TESTS=/tmp/trl/tests pytest tests/drop_in/test_trl_suite.py

No hub is needed: they run in a folder where `trl-internal-testing/tiny-…ForCausalLM` and
`trl-internal-testing/zen` are directories, which `from_pretrained` and `load_dataset` prefer. They
hold models and rows of `tiny` and `vision`, not the published ones, so a few tests fail with any
trainer: the suite runs with TRL's class first, and what passes there must pass with ours.
"""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import trl
from datasets import Dataset
from helpers.tiny import (
    CHATML_GENERATION,
    MODELS,
    tiny_dataset,
    tiny_model,
    tiny_rows,
    tiny_tokenizer,
)
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model, tiny_vlm

TRL_TESTS = os.environ.get("TRL_TESTS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not TRL_TESTS, reason="set TRL_TESTS to the tests folder of a TRL checkout"),
]

ON_PURPOSE = {
    "test_padding_free_without_packing_and_max_length_raises": "max_length is enforced instead",
    "test_eval_packing": "data sets hold documents, not packed rows",
    "test_only_train_packing": "data sets hold documents, not packed rows",
}

# Loaded by pytest before TRL's tests are: `from trl import SFTTrainer` then finds ours.
PLUGIN = """
import os
import torch, transformers, trl

torch.set_num_threads(1)
if not torch.cuda.is_available():  # the default, bf16, is refused without one; autocast works
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
if os.environ["TRAINER"] == "packed":
    import trl_packing
    trl.SFTTrainer = trl_packing.PackedSFTTrainer
"""

# "Qwen3Moe" of a class is "qwen3_moe" here.
ARCHITECTURES = {name.replace("_", ""): name for name in MODELS}
# id -> config -> form of `tiny_rows`
FORMS = ("language_modeling", "prompt_completion")
CHATS = {form: f"conversational_{form}" for form in FORMS}
DATASETS = {
    "zen": {
        **{f"standard_{form}": form for form in FORMS},
        **{chat: chat for chat in CHATS.values()},
        "standard_implicit_prompt_preference": "question_answer",
    },
    "harmony": CHATS,
    "toolcall": {"language_modeling": "tools"},
}


def _write_model(folder: Path, architecture: str) -> None:
    """A model id: weights, and a tokenizer with the peculiarities that TRL's tests rely on."""
    if architecture == "Llava":
        model, processing_class = tiny_vlm("llava")
    elif architecture == "Qwen2_5_VL":  # text only: its own processor needs torchvision
        model, processing_class = tiny_vlm("qwen2_5_vl")[0], tiny_vlm("llava")[1]
    elif architecture == "LlavaNext":
        processing_class = tiny_processor("llava_next")
        tower = {"num_hidden_layers": 2}
        model = tiny_vision_model("llava_next", processing_class, vision=tower)
    elif name := ARCHITECTURES.get(architecture.lower()):
        model = tiny_model(name)
        processing_class = tiny_tokenizer(chat="generation")
        if architecture == "GPTNeoX":
            processing_class.chat_template = None
        elif architecture == "Mistral":
            processing_class.pad_token = None
        elif architecture == "Qwen3":
            templates = Path(trl.__file__).parent / "chat_templates"
            template = (templates / "qwen3.jinja").read_text(encoding="utf-8")
            processing_class.chat_template = template
    else:
        return
    model.save_pretrained(folder)
    processing_class.save_pretrained(folder)


def _rows(name: str, form: str, number: int) -> Dataset:
    """Return the rows of a config of a data set, as trl-internal-testing has them."""
    rows = tiny_rows(form, number)
    if name == "standard_implicit_prompt_preference":
        rows = [{"chosen": r["question"], "rejected": r["answer"]} for r in rows]
    elif form == "tools":
        rows = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    return Dataset.from_list(rows)


def _write_dataset(folder: Path, configs: dict[str, dict[str, Dataset]]) -> None:
    """Write a data set id: the splits of every config, and a card that names them."""
    folder.mkdir(parents=True)
    card = ["---", "configs:"]
    for name, splits in configs.items():
        card += [f"- config_name: {name}", "  data_files:"]
        for split, rows in splits.items():
            rows.to_parquet(folder / f"{name}-{split}.parquet")
            card += [f"  - split: {split}", f"    path: {name}-{split}.parquet"]
    (folder / "README.md").write_text("\n".join([*card, "---"]), encoding="utf-8")


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    """A folder that looks like the hub to whoever works in it."""
    root = tmp_path_factory.mktemp("hub")
    source = (Path(TRL_TESTS) / "test_sft_trainer.py").read_text(encoding="utf-8")
    for name, kind in {*re.findall(r"trl-internal-testing/(tiny-(\w+?)For[\w.-]+)", source)}:
        _write_model(root / "trl-internal-testing" / name, kind)
    for dataset, configs in DATASETS.items():
        made = {
            name: {"train": _rows(name, form, 17), "test": _rows(name, form, 2)}
            for name, form in configs.items()
        }
        _write_dataset(root / "trl-internal-testing" / dataset, made)
    images = {
        "conversational_language_modeling": {"train": tiny_dataset("images", 8)},
        "conversational_prompt_completion": {"train": image_dataset(8)},
    }
    for name in ("zen-image", "zen-multi-image"):
        _write_dataset(root / "trl-internal-testing" / name, images)
    other = tiny_tokenizer(chat=True)
    other.chat_template = CHATML_GENERATION
    other.save_pretrained(root / "Qwen/Qwen3-4B")
    (root / "swap_plugin.py").write_text(PLUGIN, encoding="utf-8")
    return root


def _outcomes(hub: Path, trainer: str) -> dict[str, tuple[str, str]]:
    """Run TRL's suite; test name → (passed, failed or skipped; the reason's last line)."""
    report = hub / f"{trainer}.xml"
    paths = [str(hub), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "pytest", str(Path(TRL_TESTS) / "test_sft_trainer.py")]
    command += ["-q", "-p", "swap_plugin", "-p", "no:cacheprovider", f"--junitxml={report}"]
    ours = {"TRAINER": trainer, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    options = {"cwd": hub, "env": os.environ | ours, "capture_output": True, "text": True}
    done = subprocess.run([*command, "-m", "not slow"], check=False, **options)
    assert report.exists(), done.stdout + done.stderr
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if bad is None else "skipped" if bad.tag == "skipped" else "failed"
        message = "" if bad is None else bad.get("message", "").strip()
        outcomes[case.get("name", "")] = (outcome, message)
    return outcomes


def test_what_passes_with_trl_passes_with_ours(hub):
    theirs, ours = _outcomes(hub, "trl"), _outcomes(hub, "packed")
    assert theirs.keys() == ours.keys()
    passing = {name for name, (outcome, _) in theirs.items() if outcome == "passed"}
    assert passing
    failed = {name: why for name, (outcome, why) in ours.items() if outcome == "failed"}
    purpose = {name for name in failed if name.partition("[")[0] in ON_PURPOSE}
    assert {name: failed[name] for name in passing & {*failed} - purpose} == {}
