"""The doctor: what it finds on this machine, and what it says of machines that are not here."""

import json
import re
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import browser

from trl_packing import versions
from trl_packing.attention.backends import CHOICES
from trl_packing.cli import main
from trl_packing.packing import tree_row
from trl_packing.tools.doctor import backends as doctor_backends
from trl_packing.tools.doctor import machine as doctor_machine
from trl_packing.tools.doctor import versions as doctor_versions
from trl_packing.tools.doctor.backends import Trial, Trials, advice, try_backends
from trl_packing.tools.doctor.doctor import diagnose
from trl_packing.tools.doctor.findings import Diagnosis, Finding, Section
from trl_packing.tools.doctor.machine import Device, Disk, Hub, Machine, read_disk, read_hub
from trl_packing.tools.doctor.memory import recomputed_share
from trl_packing.tools.doctor.page import doctor_page
from trl_packing.tools.doctor.step_memory import meta_model
from trl_packing.tools.exactness.tiny_models import tiny_config

GB = 10**9
CPU = Device("cpu", "2 cores", 16 * GB, 12 * GB, None, {"float32": 4.0, "bfloat16": 1.0})
H100 = Device("cuda", "NVIDIA H100 80GB HBM3", 80 * GB, 79 * GB, (9, 0))
A100 = Device("cuda", "NVIDIA A100-SXM4-80GB", 80 * GB, 79 * GB, (8, 0))
T4 = Device("cuda", "Tesla T4", 16 * GB, 15 * GB, (7, 5))
DISKS = (Disk("output_dir", "outputs", 50 * GB, True), Disk("cache", "~/.cache", 50 * GB, True))
MACHINE = Machine("3.12.1", "Linux", (CPU,), DISKS, Hub("https://hub.invalid", "offline", False))
ON_CPU = ("--use_cpu", "--max_length", "256", "--per_device_train_batch_size", "2")


def on(*devices: Device) -> Machine:
    return replace(MACHINE, devices=devices)


@pytest.fixture(scope="module")
def trials() -> Trials:
    return try_backends("cpu", torch.float32)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """Return a folder with a config and (the name of a file with) weights."""
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


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
    install = doctor_backends.install_attention

    def leaking(model, choice):
        if choice.backend != "documents":
            install(model, choice)  # "documents" is left as it came: one causal row
        else:
            forward = model.forward
            model.forward = lambda input_ids, **_: forward(input_ids, use_cache=False)

    monkeypatch.setattr(doctor_backends, "install_attention", leaking)
    trials = try_backends("cpu", torch.float32)
    assert trials["documents"].verdict == "differs"
    assert trials["documents"].difference == pytest.approx(trials["documents"].leak, rel=0.7)
    assert trials.chosen == "model"


def test_a_backend_that_raises_is_an_error_and_not_chosen(monkeypatch):
    install = doctor_backends.install_attention

    def failing(model, choice):
        if choice.backend == "documents":
            raise RuntimeError("CUDA error: no kernel image\nfurther lines")
        install(model, choice)

    monkeypatch.setattr(doctor_backends, "install_attention", failing)
    trials = try_backends("cpu", torch.float32)
    assert trials["documents"].reason == "RuntimeError: CUDA error: no kernel image"
    assert trials.chosen == "model"


def prefixes_of(trials: Trials) -> Finding:
    (finding,) = found(diagnose(["--use_cpu"], machine=MACHINE, trials=trials), "shared prefixes")
    return finding


def test_shared_prefixes_are_tried_by_the_chosen_backend(trials):
    assert trials.prefixes.backend == trials.chosen
    assert trials.prefixes.difference < trials.prefixes.tolerance < trials.prefixes.leak / 2
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
    tried = doctor_backends._trial_of_prefixes(
        doctor_backends.tiny_model("llama"), "documents", torch.float32
    )
    assert tried.verdict == "differs"
    assert tried.difference > tried.leak / 10
    finding = prefixes_of(replace(trials, prefixes=tried))
    assert finding.status == "note"
    assert "a run computes them in every document" in finding.text


@pytest.mark.parametrize("failure", ["refused", "error"])
def test_a_model_that_cannot_share_prefixes_is_told_why(failure, trials, monkeypatch):
    model = doctor_backends.tiny_model("llama")
    if failure == "error":
        monkeypatch.setattr(doctor_backends, "_packed", lambda *_: torch.tensor([1]) @ "no")
    backend = "padded" if failure == "refused" else "documents"
    tried = doctor_backends._trial_of_prefixes(model, backend, torch.float32)
    assert (tried.verdict, tried.difference) == (failure, None)
    finding = prefixes_of(replace(trials, prefixes=tried))
    assert finding.status == {"refused": "-", "error": "note"}[failure]
    reason = {"refused": "has one set of boundaries", "error": "TypeError"}[failure]
    assert reason in finding.text


def test_no_exact_backend_fails(trials):
    broken = replace(trials, chosen=None)
    diagnosis = diagnose(["--use_cpu"], machine=MACHINE, trials=broken)
    assert [f.name for f in diagnosis.failures] == ["attention"]


def test_half_precision_is_judged_by_its_own_rounding():
    comparison = doctor_backends._Comparison(
        doctor_backends.tiny_model("llama"), doctor_backends.tiny_documents()
    )
    float32, leak = comparison.limits(torch.float32)
    bfloat16, _ = comparison.limits(torch.bfloat16)
    assert float32 < 1e-3 < bfloat16 < leak / 2


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
    trials = Trials("llama", "cuda", "bfloat16", (*flash, Trial(chosen, "exact")), chosen)
    assert words in advice(trials, capability)


# --- precision ------------------------------------------------------------------------------------


def precision(device: Device, *words: str, trials: Trials) -> str:
    diagnosis = diagnose(words, machine=on(device), trials=trials)
    return " ".join(f.text for f in found(diagnosis, "advice") + found(diagnosis, "settings"))


def test_precision_advice_fits_the_device(trials):
    assert "no bf16 before sm80: set --fp16 True" in precision(T4, trials=trials)
    assert precision(A100, trials=trials) == ""
    assert "does not overflow" in precision(A100, "--fp16", "True", trials=trials)
    assert "bf16 are 4.0× as fast" in precision(CPU, "--use_cpu", "--bf16", "False", trials=trials)
    slow = replace(CPU, milliseconds={"float32": 1.0, "bfloat16": 3.0})
    assert "float32 are 3.0× as fast" in precision(slow, "--use_cpu", trials=trials)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes bf16")
def test_a_precision_that_the_machine_refuses_fails_only_if_it_was_asked_for(trials):
    assert "add --use_cpu True" in precision(CPU, trials=trials)
    refused = diagnose(["--bf16", "True"], machine=MACHINE, trials=trials)
    assert [f.name for f in refused.failures] == ["settings"]
    assert "set --bf16 False" in refused.failures[0].text


def test_a_misspelled_option_and_a_wrong_value_are_named(trials):
    with pytest.raises(ValueError, match="--max_lenght"):
        diagnose(["--max_lenght", "3"], machine=MACHINE, trials=trials)
    with pytest.raises(ValueError, match="max_length"):
        diagnose(["--max_length", "long"], machine=MACHINE, trials=trials)


# --- memory ---------------------------------------------------------------------------------------


def test_gradient_checkpointing_is_advised_by_the_memory_of_the_device(model_folder, trials):
    roomy = diagnose(["--model", str(model_folder), *ON_CPU], machine=MACHINE, trials=trials)
    (text,) = [f.text for f in found(roomy, "advice") if "checkpointing" in f.text]
    assert "is not needed" in text
    assert "25% of a step's operations" in text
    memory = roomy.facts["memory"]
    between = (memory["without"]["peak"] + memory["with_checkpointing"]["peak"]) // 2
    tight = on(replace(CPU, free_bytes=between))
    needed = diagnose(["--model", str(model_folder), *ON_CPU], machine=tight, trials=trials)
    assert "gradient checkpointing is needed" in found(needed, "fits")[0].text
    words = [*ON_CPU, "--gradient_checkpointing", "False"]
    off = diagnose(["--model", str(model_folder), *words], machine=tight, trials=trials)
    assert "set --gradient_checkpointing True" in off.failures[0].text
    small = on(replace(CPU, free_bytes=memory["with_checkpointing"]["peak"] // 2))
    failed = diagnose(["--model", str(model_folder), *ON_CPU], machine=small, trials=trials)
    assert "even with gradient checkpointing" in failed.failures[0].text
    assert "--use_peft" in failed.failures[0].text


@pytest.mark.slow
def test_several_devices_are_advised_to_share_the_model(model_folder, trials):
    one = diagnose(["--model", str(model_folder), *ON_CPU], machine=on(H100), trials=trials)
    memory = one.facts["memory"]
    states = sum(memory["states"][k] for k in ("parameters", "gradients", "optimizer"))
    room = memory["with_checkpointing"]["peak"] - states // 4
    device = replace(H100, total_bytes=int(room / 0.92))
    assert diagnose(
        ["--model", str(model_folder), *ON_CPU], machine=on(device), trials=trials
    ).failures
    shared = diagnose(
        ["--model", str(model_folder), *ON_CPU], machine=on(device, device), trials=trials
    )
    assert not shared.failures
    assert "shard the model over all 2" in found(shared, "advice")[0].text


@pytest.mark.slow
def test_the_tokens_that_fit_do_fit(model_folder, trials):
    diagnosis = diagnose(["--model", str(model_folder), *ON_CPU], machine=MACHINE, trials=trials)
    tokens = diagnosis.facts["memory"]["fitting_tokens"]
    for share, fits in ((0.9, True), (1.1, False)):
        words = ["--use_cpu", "--max_length", str(int(tokens * share))]
        words += ["--per_device_train_batch_size", "1"]
        again = diagnose(["--model", str(model_folder), *words], machine=MACHINE, trials=trials)
        assert (again.facts["memory"]["without"]["peak"] <= CPU.free_bytes) == fits


def test_an_adapter_recomputes_a_third_of_a_step():
    from peft import LoraConfig

    config = tiny_config("llama")
    assert recomputed_share(meta_model(config)) == pytest.approx(1 / 4)
    adapter = meta_model(config, lora=LoraConfig(r=1, target_modules="all-linear"))
    assert recomputed_share(adapter) == pytest.approx(1 / 3, abs=0.02)


def test_an_adapter_is_counted(model_folder, trials):
    words = [*ON_CPU, "--use_peft", "--lora_r", "4"]
    states = diagnose(["--model", str(model_folder), *words], machine=MACHINE, trials=trials).facts[
        "memory"
    ]["states"]
    assert 0 < states["num_trained"] < states["num_parameters"] / 4


def test_the_dtype_of_the_weights_is_that_of_the_run(model_folder, trials, tmp_path):
    def parameters(*words: str) -> int:
        words = ("--model", str(model_folder), *ON_CPU, *words)
        memory = diagnose(words, machine=MACHINE, trials=trials).facts["memory"]
        return memory["states"]["parameters"]

    run = tmp_path / "run.yaml"
    run.write_text("model_init_kwargs:\n  dtype: bfloat16\n")
    whole = parameters()
    assert parameters("--config", str(run)) == parameters("--dtype", "bfloat16") == whole // 2


def test_weights_in_4_bits_are_not_counted_as_if_they_were_whole(model_folder, trials):
    words = ["--model", str(model_folder), *ON_CPU, "--load_in_4bit"]
    diagnosis = diagnose(words, machine=MACHINE, trials=trials)
    assert diagnosis.facts["memory"] is None
    assert "4 or 8 bits" in found(diagnosis, "memory")[0].text


@pytest.mark.parametrize("recipe", ["recipes/lora.py", "recipes/qlora.py"])
def test_a_recipe_of_an_adapter_is_known_by_its_name(model_folder, trials, recipe):
    words = [recipe, "--model", str(model_folder), *ON_CPU]
    memory = diagnose(words, machine=MACHINE, trials=trials).facts["memory"]
    if recipe == "recipes/qlora.py":
        assert memory is None
    else:
        assert memory["states"]["num_trained"] < memory["states"]["num_parameters"] / 2


# --- model, disk, hub, versions -------------------------------------------------------------------


def test_a_model_that_is_not_there_fails_without_waiting(trials):
    start = time.monotonic()
    diagnosis = diagnose(["--use_cpu", "--model", "nobody/nothing"], machine=MACHINE, trials=trials)
    assert time.monotonic() - start < 30
    assert "is not in the cache" in diagnosis.failures[0].text
    missing = diagnose(["--use_cpu", "--model", "./nothing"], machine=MACHINE, trials=trials)
    assert "does not exist" in missing.failures[0].text


def test_a_folder_without_weights_fails(tmp_path, trials):
    tiny_config("llama").save_pretrained(tmp_path)
    diagnosis = diagnose(["--model", str(tmp_path), *ON_CPU], machine=MACHINE, trials=trials)
    assert "holds no weights" in diagnosis.failures[0].text


def test_a_disk_without_room_for_a_checkpoint_fails(model_folder, trials):
    full = replace(MACHINE, disks=(replace(DISKS[0], free_bytes=10), DISKS[1]))
    diagnosis = diagnose(["--model", str(model_folder), *ON_CPU], machine=full, trials=trials)
    assert "--output_dir" in diagnosis.failures[0].text
    locked = replace(MACHINE, disks=(replace(DISKS[0], writable=False), DISKS[1]))
    assert diagnose(["--use_cpu"], machine=locked, trials=trials).failures


def test_the_space_of_a_folder_that_does_not_exist_is_that_of_its_parent(tmp_path):
    disk = read_disk("output_dir", str(tmp_path / "a" / "b"))
    assert disk.writable
    assert disk.free_bytes > 0


def test_a_hub_that_accepts_and_never_answers_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor_machine.constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(doctor_machine.constants, "ENDPOINT", address)
        start = time.monotonic()
        assert read_hub(0.5).state == "not reachable"
        assert time.monotonic() - start < 30


def test_an_offline_hub_is_not_asked(monkeypatch):
    monkeypatch.setattr(doctor_machine.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(doctor_machine.urllib.request, "urlopen", None)  # a call would raise
    assert read_hub(1).state == "offline"


def test_versions_are_judged(monkeypatch, trials):
    real = doctor_versions.installed_version
    other = {"trl": "99.0", "numpy": "1.0"}
    monkeypatch.setattr(
        doctor_versions, "installed_version", lambda name: other.get(name) or real(name)
    )
    diagnosis = diagnose(["--use_cpu"], machine=MACHINE, trials=trials)
    texts = [f"{f.status} {f.name} {f.text}" for f in diagnosis.sections[0].findings]
    assert any(re.match("note trl 99.0 is not among those tested", text) for text in texts)
    assert any(re.match("fail numpy 1.0: pip install 'numpy>=", text) for text in texts)
    assert set(versions.TESTED) <= set(diagnosis.facts["versions"])


# --- output ---------------------------------------------------------------------------------------


def test_the_text_fits_its_terminal_and_keeps_its_words(trials):
    diagnosis = diagnose(["--use_cpu"], machine=MACHINE, trials=trials)
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
    failing = replace(MACHINE, disks=(replace(DISKS[0], writable=False),))
    found = json.loads(
        json.dumps(diagnose(["--use_cpu"], machine=failing, trials=trials).as_json())
    )
    assert found["trains"] is False
    assert found["failures"][0].startswith("output_dir: ")
    assert found["attention"]["chosen"] == "documents"
    assert found["machine"]["devices"][0]["name"] == "2 cores"


def test_the_page_shows_hostile_text_and_runs_none(tmp_path, model_folder, trials):
    hostile = Section("<b>", tuple(Finding("fail", text, text) for text in browser.HOSTILE))
    diagnosis = diagnose(["--model", str(model_folder), *ON_CPU], machine=MACHINE, trials=trials)
    diagnosis = replace(diagnosis, sections=(*diagnosis.sections, hostile))
    path = tmp_path / "doctor.html"
    path.write_text(doctor_page(diagnosis), encoding="utf-8")
    for width in (390, 1280):
        with browser.open_page(path, width=width, dark=width == 390) as page:
            assert page.problems() == []
            assert page.evaluate("window.hostile") is None
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert "onerror" in page.evaluate("document.body.innerText")


def test_the_command_prints_and_exits(tmp_path, capsys):
    page = tmp_path / "doctor.html"
    assert main(["doctor", "--use_cpu", "--html", str(page), "--output_dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "shared prefixes" in printed
    assert "Nothing here would stop a training run." in printed
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["doctor", "--use_cpu", "--model", str(tmp_path / "nothing"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["trains"] is False
