"""The doctor: what it finds on this machine, and what it says of machines that are not here."""

import json
import re

import pytest
import torch
from helpers.command import says
from helpers.shared_prefixes import siblings_see_each_other, spoil_trees

from trl_packing.attention.backends import CHOICES
from trl_packing.isolation import guard
from trl_packing.tools import doctor
from trl_packing.tools.doctor import PREFIXES, Device, Trial, advice, diagnose, try_backends

CPU = Device("cpu", "2 threads")
T4 = Device("cuda", "Tesla T4", (7, 5))


@pytest.fixture(scope="module")
def trials():
    return try_backends("cpu", torch.float32)


def found(trials, name, device=CPU):
    """Return the findings with this name, each as its status and text."""
    sections = diagnose([device], trials).sections
    return [f"{f.status} {f.text}" for each in sections.values() for f in each if f.name == name]


def test_every_backend_is_tried_and_those_of_a_cpu_are_exact(trials):
    assert list(trials) == [*CHOICES[1:], PREFIXES]
    exact = [name for name, trial in trials.items() if trial.verdict in ("chosen", "exact")]
    rows = ["documents", "model", "mask", "by_document", "padded", "equal_lengths"]
    assert exact == [*rows, PREFIXES]
    assert trials["varlen"].verdict == "refused"
    assert trials["documents"].verdict == "chosen"
    assert found(trials, PREFIXES)[0].startswith("ok exact: by ")


def test_a_backend_that_leaks_differs_and_is_not_chosen(monkeypatch):
    """The negative control: the native attention without boundaries sees other documents."""
    install = guard.install_attention

    def leaking(model, choice):
        if choice.backend == "model":
            raise RuntimeError("CUDA error: no kernel image\nfurther lines")
        if choice.backend != "documents":
            install(model, choice)  # "documents" is left as it came: one causal row
        else:
            forward = model.forward
            model.forward = lambda input_ids, **_: forward(input_ids, use_cache=False)

    monkeypatch.setattr(guard, "install_attention", leaking)
    trials = try_backends("cpu", torch.float32)
    assert trials["documents"].verdict == "differs"
    assert trials["model"].text == "RuntimeError: CUDA error: no kernel image"
    assert trials["mask"].verdict == "chosen"


def test_siblings_that_see_each_other_differ(monkeypatch):
    """The negative control: the keys of a segment are all tokens before it."""
    spoil_trees(monkeypatch, siblings_see_each_other)
    tried = try_backends("cpu", torch.float32)
    assert tried[PREFIXES].verdict == "differs"
    (text,) = found(tried, PREFIXES)
    assert text.startswith("note differs: by ")


def test_kernels_of_recurrent_layers_are_named_by_family(trials):
    (text,) = found(trials, "recurrent layers")
    assert text == "- by document, in one row; their kernels need an NVIDIA GPU"
    (text,) = found(trials, "recurrent layers", Device("cuda", "a GPU", (9, 0)))
    assert "Qwen3.5, Kimi Linear, LFM2: by document; pip install flash-linear-attention. " in text
    assert text.endswith("pip install mamba-ssm")


ADVICE = [
    (None, "documents", "", "need an NVIDIA GPU from sm80"),
    ((8, 0), "varlen", "", "varlen is the fastest"),
    ((9, 0), "varlen", "", "folder hopper"),
    ((8, 0), "documents", "no sinks", "not possible (no sinks)"),
]


@pytest.mark.parametrize(("capability", "chosen", "missing", "words"), ADVICE)
def test_advice_on_flash_attn_fits_the_gpu(capability, chosen, missing, words):
    flash = ("flash_attention_4", "flash_attention_3", "flash_attention_2")
    trials = {name: Trial("not installed", missing) for name in flash}
    assert words in advice(trials | {chosen: Trial("chosen")}, capability)


def test_the_command_prints_text_that_fits_and_json(capsys, monkeypatch, trials):
    assert "set --fp16 True" in found(trials, "bf16", device=T4)[0]
    odd = {"documents": Trial("refused", "no kernel"), "model": Trial("error", "\x1b[2J " * 40)}
    text = diagnose([CPU], odd).text(60)
    assert max(map(len, text.splitlines())) <= 60
    assert "error: \\x1b[2J" in text
    assert "Training would fail" in text
    monkeypatch.setattr(doctor, "try_backends", lambda *_: trials)
    shown = json.loads(says(capsys, "doctor", "--json"))
    assert (shown["trains"], shown["attention"]["chosen"]) == (True, "documents")
    assert re.fullmatch(r"\d+ threads?, .*", shown["machine"]["devices"][0])
