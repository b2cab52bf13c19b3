"""The doctor: what it finds on this machine, and what it says of machines that are not here."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_config
from huggingface_hub import constants

import trl_packing.isolation.guard
from trl_packing import versions
from trl_packing.attention.backends import CHOICES
from trl_packing.cli import main
from trl_packing.packing import tree_row
from trl_packing.tools.doctor import doctor as doctor_module
from trl_packing.tools.doctor.backends import (
    Trial,
    Trials,
    advice,
    tiny_llama,
    trial_of_prefixes,
    try_backends,
)
from trl_packing.tools.doctor.doctor import Device, diagnose
from trl_packing.tools.doctor.findings import Diagnosis, Finding, Section

GB = 10**9
CPU = Device("cpu", "2 cores", 16 * GB)
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * GB, (8, 0))
T4 = Device("cuda", "Tesla T4", 16 * GB, (7, 5))


@pytest.fixture(scope="module")
def trials() -> Trials:
    return try_backends("cpu", torch.float32)


def found(diagnosis: Diagnosis, name: str) -> list[Finding]:
    return [f for s in diagnosis.sections for f in s.findings if f.name == name]


# --- attention ------------------------------------------------------------------------------------


def test_every_backend_is_tried_and_those_of_a_cpu_are_exact(trials):
    assert [trial.backend for trial in trials.trials] == list(CHOICES[1:])
    verdicts = {trial.backend: trial.verdict for trial in trials.trials}
    assert {name for name, verdict in verdicts.items() if verdict == "exact"} == {
        "documents", "model", "mask", "padded", "equal_lengths"
    }  # fmt: skip
    assert verdicts["varlen"] == "refused"
    assert trials.chosen == "documents"


def test_a_backend_that_leaks_differs_and_is_not_chosen(monkeypatch):
    """The negative control: the native attention without boundaries sees other documents."""
    install = trl_packing.isolation.guard.install_attention

    def leaking(model, choice):
        if choice.backend != "documents":
            install(model, choice)  # "documents" is left as it came: one causal row
        else:
            forward = model.forward
            model.forward = lambda input_ids, **_: forward(input_ids, use_cache=False)

    monkeypatch.setattr(trl_packing.isolation.guard, "install_attention", leaking)
    trials = try_backends("cpu", torch.float32)
    assert trials["documents"].verdict == "differs"
    assert trials["documents"].difference > trials["documents"].leak / 10
    assert trials.chosen == "model"


def test_a_backend_that_raises_is_an_error_and_not_chosen(monkeypatch):
    install = trl_packing.isolation.guard.install_attention

    def failing(model, choice):
        if choice.backend == "documents":
            raise RuntimeError("CUDA error: no kernel image\nfurther lines")
        install(model, choice)

    monkeypatch.setattr(trl_packing.isolation.guard, "install_attention", failing)
    trials = try_backends("cpu", torch.float32)
    assert trials["documents"].reason == "RuntimeError: CUDA error: no kernel image"
    assert trials.chosen == "model"


def prefixes_of(trials: Trials) -> Finding:
    (finding,) = found(diagnose(["--use_cpu"], devices=[CPU], trials=trials), "shared prefixes")
    return finding


def test_shared_prefixes_are_tried_by_the_chosen_backend(trials):
    assert trials.prefixes.backend == trials.chosen
    assert trials.prefixes.difference < trials.prefixes.leak / 100
    finding = prefixes_of(trials)
    assert finding.status == "ok"
    assert finding.text.startswith("exact, by ")


def test_siblings_that_see_each_other_differ(trials, monkeypatch):
    """The negative control: the keys of a segment are all tokens before it."""
    make = tree_row.build_prefix_tree

    def leaking(ids, **options):
        tree = make(ids, **options)
        keys = [np.arange(end) for end in tree.cu_seqlens[1:]]
        ends = np.cumsum([0, *map(len, keys)]).astype(np.int32)
        return type(tree)(**{**vars(tree), "cu_seqlens_k": ends, "key_index": np.concatenate(keys)})

    monkeypatch.setattr(tree_row, "build_prefix_tree", leaking)
    tried = trial_of_prefixes(tiny_llama(), "documents", torch.float32)
    assert tried.verdict == "differs"
    assert tried.difference > tried.leak / 10
    finding = prefixes_of(replace(trials, prefixes=tried))
    assert finding.status == "note"
    assert "a run computes them in every document" in finding.text


def test_a_backend_that_cannot_share_prefixes_says_why(trials):
    tried = trial_of_prefixes(tiny_llama(), "padded", torch.float32)
    finding = prefixes_of(replace(trials, prefixes=tried))
    assert "has one set of boundaries" in finding.text


def test_no_exact_backend_fails(trials):
    broken = replace(trials, chosen=None)
    diagnosis = diagnose(["--use_cpu"], devices=[CPU], trials=broken)
    assert [f.name for f in diagnosis.failures] == ["attention"]


@pytest.mark.parametrize(
    ("capability", "chosen", "missing", "words"),
    [
        (None, "documents", "", "need an NVIDIA GPU"),
        ((7, 5), "documents", "", "from sm80"),
        ((8, 0), "varlen", "", "FlashAttention 2 from PyTorch itself"),
        ((9, 0), "varlen", "", "folder hopper"),
        ((10, 0), "varlen", "", "pip install flash-attn-4"),
        ((8, 0), "documents", "", "pip install flash-attn --no-build-isolation"),
        (
            (8, 0),
            "documents",
            "flash-attn has no sinks",
            "not possible (flash-attn has no sinks)",
        ),
        ((8, 0), "flash_attention_2", "", "nothing to install"),
        ((9, 0), "flash_attention_3", "", "nothing to install"),
    ],
)
def test_advice_on_flash_attn_fits_the_gpu(capability, chosen, missing, words):
    flash = [
        Trial(name, "exact" if name == chosen else "not installed", missing)
        for name in ("flash_attention_4", "flash_attention_3", "flash_attention_2")
    ]
    trials = Trials("cuda", "bfloat16", (*flash, Trial(chosen, "exact")), chosen)
    assert words in advice(trials, capability)


# --- precision ------------------------------------------------------------------------------------


def precision(device: Device, *words: str, trials: Trials) -> str:
    diagnosis = diagnose(words, devices=[device], trials=trials)
    return " ".join(f.text for f in found(diagnosis, "advice") + found(diagnosis, "settings"))


def test_precision_advice_fits_the_device(trials):
    assert "no bf16 before sm80: set --fp16 True" in precision(T4, trials=trials)
    assert precision(A100, trials=trials) == ""
    assert "does not overflow" in precision(A100, "--fp16", "True", trials=trials)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes bf16")
def test_the_precision_is_that_of_the_run_on_this_machine(trials, tmp_path):
    """sft_packed.py turns bf16 off here; what was asked for, or another script leaves on, stops."""
    assert precision(CPU, trials=trials) == ""
    refused = diagnose(["--bf16", "True", "--use_cpu", "False"], devices=[CPU], trials=trials)
    assert [f.name for f in refused.failures] == ["settings"]
    assert "set bf16 to false, or add use_cpu" in refused.failures[0].text
    script = tmp_path / "train.py"
    script.write_text(
        "from datasets import Dataset\n"
        "from trl_packing import PackedSFTConfig, PackedSFTTrainer\n"
        "rows = Dataset.from_list([{'text': 'So.'}])\n"
        "PackedSFTTrainer('m', PackedSFTConfig('out'), train_dataset=rows)\n"
    )
    stops = diagnose([str(script)], devices=[CPU], trials=trials)
    assert "bf16" in stops.failures[0].text
    script.write_text(script.read_text().replace("'out'", "'out', use_cpu=True, bf16=False"))
    fits = diagnose([str(script)], devices=[CPU], trials=trials)
    assert not [f for f in fits.failures if f.name == "settings"]


def test_a_script_that_would_stop_before_its_trainer_fails(trials, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('none.jsonl is missing')\n")
    diagnosis = diagnose([str(script)], devices=[CPU], trials=trials)
    assert [f.name for f in diagnosis.failures] == ["settings"]
    assert "none.jsonl is missing" in diagnosis.failures[0].text


def test_a_misspelled_option_and_a_wrong_value_are_named(trials):
    with pytest.raises(ValueError, match="--max_lenght"):
        diagnose(["--max_lenght", "3"], devices=[CPU], trials=trials)
    with pytest.raises(ValueError, match="max_length"):
        diagnose(["--max_length", "long"], devices=[CPU], trials=trials)


# --- model, versions ------------------------------------------------------------------------------


def test_a_model_that_is_not_here_is_told_without_asking_the_hub(trials, monkeypatch):
    words = ["--use_cpu", "--model", "nobody/nothing"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    diagnosis = diagnose(words, devices=[CPU], trials=trials)
    assert "is not in the cache" in diagnosis.failures[0].text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    diagnosis = diagnose(words, devices=[CPU], trials=trials)
    assert not diagnosis.failures
    assert "a run downloads it" in found(diagnosis, "model")[-1].text
    missing = diagnose(["--use_cpu", "--model", "./nothing"], devices=[CPU], trials=trials)
    assert "does not exist" in missing.failures[0].text


def test_a_folder_without_weights_fails(tmp_path, trials):
    tiny_config("llama").save_pretrained(tmp_path)
    diagnosis = diagnose(["--model", str(tmp_path), "--use_cpu"], devices=[CPU], trials=trials)
    assert "holds no weights" in diagnosis.failures[0].text


def test_versions_are_judged(monkeypatch, trials):
    real = doctor_module.installed_version
    other = {"trl": "99.0", "numpy": "1.0"}
    monkeypatch.setattr(
        doctor_module, "installed_version", lambda name: other.get(name) or real(name)
    )
    diagnosis = diagnose(["--use_cpu"], devices=[CPU], trials=trials)
    texts = [f"{f.status} {f.name} {f.text}" for f in diagnosis.sections[0].findings]
    assert any(re.match("note trl 99.0 is not among those tested", text) for text in texts)
    assert any(re.match("fail numpy 1.0: pip install 'numpy>=", text) for text in texts)
    assert set(versions.TESTED) <= set(diagnosis.facts["versions"])


# --- output ---------------------------------------------------------------------------------------


def test_the_text_fits_its_terminal_and_keeps_its_words(trials):
    diagnosis = diagnose(["--use_cpu"], devices=[CPU], trials=trials)
    for width in (60, 80, 100):
        assert max(map(len, diagnosis.text(width).splitlines())) <= width
    narrow, wide = (diagnosis.text(width).split() for width in (60, 100))
    assert narrow == wide


def test_control_characters_are_shown_and_not_sent_to_the_terminal():
    hostile = Section("Model", (Finding("fail", "model", "\x1b[2J\u202e is not there"),))
    text = Diagnosis((hostile,)).text()
    assert "\x1b" not in text
    assert "\\x1b[2J" in text


def test_the_json_holds_the_facts_and_the_reasons(trials):
    diagnosis = diagnose(["--use_cpu", "--model", "./nothing"], devices=[CPU], trials=trials)
    found = json.loads(json.dumps(diagnosis.as_json()))
    assert found["trains"] is False
    assert found["failures"][0].startswith("model: ")
    assert found["attention"]["chosen"] == "documents"
    assert found["machine"]["devices"][0]["name"] == "2 cores"


def test_the_command_prints_and_exits(tmp_path, capsys):
    assert main(["doctor", "--use_cpu"]) == 0
    printed = capsys.readouterr().out
    assert "shared prefixes" in printed
    assert "Nothing here would stop a training run." in printed
    assert main(["doctor", "--use_cpu", "--model", str(tmp_path / "nothing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["trains"] is False
