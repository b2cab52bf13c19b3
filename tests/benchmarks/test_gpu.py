"""`benchmarks/gpu.py` runs in small on a CPU, and finds kernels and models that are wrong."""

import gc
import importlib
import weakref
from pathlib import Path

import pytest
import torch
from helpers import flash_attn_double, varlen_double
from transformers import AttentionInterface, masking_utils


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu")


@pytest.mark.slow
def test_a_dry_run_passes_and_frees_its_models(gpu, capsys, monkeypatch):
    models = gpu.gpu_models
    make = models.model_of
    made = []

    def make_model(*arguments):
        gc.collect()
        alive.append(sum(model() is not None for model in made))
        model = make(*arguments)
        made.append(weakref.ref(model))
        return model

    alive: list[int] = []
    monkeypatch.setattr(models, "model_of", make_model)
    assert gpu.main(["--dry-run"]) == 0
    assert len(alive) == 4 + 1 + len(models.RUNS) - 2  # without flash-attn and the compiled one
    assert alive == [0] * len(alive)
    printed = capsys.readouterr().out
    assert all(f"## {part} (" in printed for part in gpu.PARTS)
    assert "| LoRA: TRL, packed, FA2 by PyTorch | 8 layers of 8B |" in printed
    assert "all parts passed" in printed


# --- models of a GPU's size -----------------------------------------------------------------------

# Layers, heads, heads of keys, width of a head, windows, and millions of weights.
WINDOWS = [512, None] * 2
SIZES = {
    "llama": (4, 16, 4, 64, [None] * 4, 101),
    "gemma3": (4, 16, 4, 64, WINDOWS, 68),
    "gpt-oss": (2, 16, 4, 64, WINDOWS[:2], 121),
    "Qwen3-0.6B": (28, 16, 8, 128, [None] * 28, 596),
    "8 layers of 8B": (8, 32, 8, 128, [None] * 8, 2796),
}


@pytest.fixture
def full_size(gpu):
    return gpu.Machine("meta", {}, False, torch.bfloat16, ("varlen",))


def test_every_model_has_its_sizes_on_a_gpu(gpu, full_size):
    assert set(gpu.gpu_models.SHAPES) == set(SIZES)
    for name, sizes in SIZES.items():
        model = gpu.gpu_models.model_of(full_size, name)
        config = model.config
        layers = [layer.self_attn for layer in model.model.layers]
        windows = [getattr(layer, "sliding_window", None) for layer in layers]
        heads = (config.num_attention_heads, config.num_key_value_heads, layers[-1].head_dim)
        weights = round(sum(weight.numel() for weight in model.parameters()) / 1e6)
        assert (len(layers), *heads, windows, weights) == sizes, name


def test_fa2_by_pytorch_reads_no_value(gpu, full_size, monkeypatch):
    """The real operator checks the arguments of TRL's packed rows, with windows and without."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # unknown on meta
    # It waits once a forward, as it does for TRL.
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    windows = []
    forward = torch.ops.aten._flash_attention_forward

    def recorded(*args, **kwargs):
        windows.append((args[8], kwargs["window_size_left"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", recorded)
    model = gpu.gpu_models.model_of(full_size, "gemma3").bfloat16()
    model.set_attn_implementation(gpu.gpu_models.FA2_BY_PYTORCH)
    inputs, _ = gpu.gpu_models.packed_row([[7] * 900, [8] * 20])[0]
    row = {k: v.to("meta") if torch.is_tensor(v) else v for k, v in inputs.items()}
    model(**row).logits.sum().backward()
    assert windows == [(False, 511), (True, -1)] * 2


@pytest.mark.parametrize(("found", "says"), [([4], "sm90"), ([], "sm75")])
def test_a_machine_has_what_resolve_attention_chooses(found, says, gpu, monkeypatch):
    capability = (int(says[2]), int(says[3]))
    installed = [f"flash_attention_{version}" for version in found]
    flash_attn_double.pretend_cuda(monkeypatch, installed, capability)
    monkeypatch.setattr(torch.cuda, "set_device", lambda number: None)
    monkeypatch.setattr(gpu.flash_attn, "gather_prefix_keys", lambda name: None)
    machine = gpu.Machine.found(dry_run=False)
    if says == "sm75":
        assert (machine.half, machine.backends) == (torch.float16, ("documents",))
        assert list(machine.kernels) == ["documents"]
    else:
        assert (machine.half, machine.backends) == (torch.bfloat16, (*installed, "varlen"))
        assert list(machine.kernels) == ["varlen", "documents", *installed]


# --- kernels --------------------------------------------------------------------------------------


def use_kernels(gpu, monkeypatch, **kernels):
    monkeypatch.setattr(gpu.Machine, "found", lambda dry_run: gpu.Machine("cpu", kernels, True))


def test_varlen_takes_the_same_rows(gpu, capsys, monkeypatch):
    """A double of PyTorch's kernel reads what it is handed."""
    calls = varlen_double.install(monkeypatch)
    use_kernels(gpu, monkeypatch, varlen=gpu.varlen.varlen_attention)
    assert gpu.main(["--dry-run", "--parts", "kernels", "blocks", "rows", "prefixes"]) == 0
    assert "| varlen | prefixes | 8 |" in capsys.readouterr().out
    assert len(calls) > 32


@pytest.mark.parametrize("fault", ["", "doubles values", "forgets sinks", "raises"])
def test_an_installed_flash_attn_is_called_by_transformers(fault, gpu, capsys, monkeypatch):
    name = "flash_attention_4"
    functions = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)
    flash_attn_double.install(monkeypatch, 4, fault)
    use_kernels(gpu, monkeypatch, **{name: gpu.by_transformers(name)})
    failed = gpu.main(["--dry-run", "--parts", "kernels"])
    printed = capsys.readouterr().out
    says = f"**failed**: AssertionError: {name}, documents"
    if fault == "raises":
        says += ": no case ran: AssertionError: Unsupported compute capability"
    assert failed == bool(fault)
    assert (says if fault else f"| {name} | prefixes | 8 |") in printed


@pytest.mark.parametrize("fault", ["boundaries", "gradient"])
def test_a_wrong_kernel_fails(fault, gpu, capsys, monkeypatch):
    right = gpu.document_sdpa.document_attention

    def wrong(query, key, value, cu_seqlens, options, longest, keys=None):
        if fault == "boundaries" and keys is None:
            cu_seqlens = cu_seqlens[[0, -1]]
        output = right(query, key, value, cu_seqlens, options, longest, keys)
        return output + 1e-3 * (value.mean() - value.mean().detach()) * (fault == "gradient")

    monkeypatch.setattr(gpu.document_sdpa, "document_attention", wrong)
    assert gpu.main(["--dry-run", "--parts", "kernels", "rows"]) == 1
    printed = capsys.readouterr().out
    assert "**failed**: AssertionError: documents, " in printed
    assert "failed: kernels" in printed
    assert "## rows (" in printed, "the other parts run all the same"


# --- models ---------------------------------------------------------------------------------------

WRONG = {
    "packed_row": "llama: log-probabilities differ by",
    "leaking_row": "llama: this check finds no leak; log-probabilities would differ by",
    "gradients": "llama: gradients differ by",
    "backends": "llama: runs by document-wise SDPA (cpu, float32), and not by varlen",
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_run_that_is_not_documents_alone_fails(fault, gpu, capsys, monkeypatch):
    models = gpu.gpu_models
    packed = models.packed_row

    def leaks(documents):
        whole, _ = packed([[token for ids in documents for token in ids]])[0]
        return [(whole, models.predicting_positions(documents))]

    def keep_twice(last, args, state, control, model=None, **kwargs):
        last.gradients = 2 * models.gradients_of(model)

    if fault == "packed_row":
        monkeypatch.setattr(models, "packed_row", leaks)
    elif fault == "leaking_row":
        monkeypatch.setattr(models, "leaking_row", packed)
    elif fault == "gradients":
        monkeypatch.setattr(models.LastGradients, "on_pre_optimizer_step", keep_twice)
    else:
        machine = gpu.Machine.found(dry_run=True)._replace(backends=("varlen",))
        monkeypatch.setattr(gpu.Machine, "found", lambda dry_run: machine)
    assert gpu.main(["--dry-run", "--parts", "models"]) == 1
    assert f"AssertionError: {WRONG[fault]}" in capsys.readouterr().out


def test_a_baseline_that_leaks_is_not_timed(gpu, capsys, monkeypatch):
    models = gpu.gpu_models
    right = models.document_attention

    def leaks(query, key, value, cu_seqlens, options, longest):
        return right(query, key, value, cu_seqlens[[0, -1]], options, len(query))

    monkeypatch.setattr(models, "document_attention", leaks)
    assert gpu.main(["--dry-run", "--parts", "steps"]) == 1
    assert "FA2 by PyTorch: log-probabilities differ by" in capsys.readouterr().out
