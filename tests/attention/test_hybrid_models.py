"""Models that carry a state along the row: in one row, each document computes what it does alone.

Without the packages of kernels, their functions run by document; kernels that take boundaries get
them (`helpers/kernel_doubles.py`); modules that mix documents in other ways run by document.
"""

import copy
import importlib
import inspect
import operator
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_models import DOCUMENT_IDS, tiny_model
from harness import alone, assert_exact
from helpers import kernel_doubles
from peft import LoraConfig, get_peft_model
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trl_packing import PackedCollator, enable_packing
from trl_packing.attention import recurrent

# A chunk of a scan has 64 tokens.
LENGTHS = (9, 1, 2, 65, 20, 64, 20)
FEW = (7, 1, 3, 12)
# Where all tokens of the row pass: what a model has beside its recurrent layers.
FUNCTIONS = dict.fromkeys(("lfm2", "bamba"), "feed_forward")
FUNCTIONS |= dict.fromkeys(("qwen3_5_text", "kimi_linear"), "mlp")
FUNCTIONS |= dict.fromkeys(("nemotron_h", "mamba"), "in_proj")
MODULES = {"rwkv": "ln2", "minimax": "mlp"}


def documents_of(lengths):
    draw = torch.Generator().manual_seed(sum(lengths))
    ids = [torch.randint(DOCUMENT_IDS[0], DOCUMENT_IDS[-1], (n,), generator=draw) for n in lengths]
    return [{"input_ids": x.tolist(), "labels": x.tolist()} for x in ids]


@cache
def expected_of(name, lengths=LENGTHS):
    return alone(tiny_model(name), documents_of(lengths))


def enabled(model, lengths=LENGTHS, **options):
    """Return a copy of `model` in training that runs packed rows, and its backend."""
    model = copy.deepcopy(model).train()
    documents = [torch.tensor(d["input_ids"]).numpy() for d in documents_of(lengths)]
    return model, enable_packing(model, documents, **options).backend


def row_of(lengths, num_empty=0):
    batch = PackedCollator()(documents_of(lengths))
    batch.pop("target_counts", None)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = torch.cat([batch[name], batch[name][-1:].expand(num_empty)])
    return batch


def step(model, batch):
    """Return the loss of a row and its gradients."""
    labels = batch["labels"]
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits
    loss = F.cross_entropy(logits[0, :-1], labels[0, 1:])
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {n.replace("_checkpoint_wrapped_module.", ""): x for n, x in found.items()}


def modeling_of(name):
    return importlib.import_module(type(tiny_model(name)).__module__)


@pytest.mark.parametrize("name", [*FUNCTIONS, *MODULES])
def test_documents_in_one_row_compute_what_they_do_alone(name):
    model, backend = enabled(tiny_model(name))
    assert backend == ("documents" if name in FUNCTIONS else "by_document")
    calls = []
    seen = set()
    model.base_model.register_forward_hook(lambda *_: calls.append(1))
    whole = [m for n, m in model.named_modules() if n.endswith((FUNCTIONS | MODULES)[name])]
    assert whole
    for module in whole:
        module.register_forward_pre_hook(lambda _, args: seen.add(tuple(args[0].shape[:2])))
    assert_exact(step(model, row_of(LENGTHS)), expected_of(name))
    assert len(calls) == 1, "one forward of the backbone"
    assert seen == {(1, sum(LENGTHS))}, "without padding"


# One document, equal lengths; as many tokens as a convolution is wide, as channels, states, heads.
ROWS = [(3,), (1, 2), (2, 2), (1, 1, 1), (5, 3), (4, 4, 8), (20, 12), (60, 4), (60, 68), (64,)]
ROWS += [(65, 64, 1), (100, 92), (144,), (44, 100), (128, 64)]


KINDS = [("lfm2", True), ("bamba", False), ("bamba", True), ("mamba", False), ("rwkv", False)]


@pytest.mark.parametrize(("name", "training"), KINDS)
def test_rows_of_all_kinds(name, training):
    model, _ = enabled(tiny_model(name), FEW)
    model.train(training)
    plain = tiny_model(name).train(training)
    for number, lengths in enumerate(ROWS):
        batch = row_of(lengths, num_empty=number % 3)
        parts = batch["input_ids"].split(lengths, 1)
        with torch.no_grad():
            alone = [plain(input_ids=ids, use_cache=False).logits for ids in parts]
            found = model(**batch).logits
        apart = float((found - torch.cat(alone, 1)).abs().max())
        assert apart < 1e-4, lengths


@pytest.mark.parametrize(("name", "channels"), [("lfm2", 64), ("mamba", 128)])
def test_a_first_row_as_long_as_its_channels_is_refused(name, channels, monkeypatch):
    """The row (channels, channels) does not show which are the tokens; another row does."""
    model, _ = enabled(tiny_model(name), isolation_check="off")
    for function in vars(modeling_of(name)).values():
        if hasattr(function, "recurrent"):
            monkeypatch.setattr(function.recurrent, "_dims", {})
    lengths = (channels - 10, 10)
    with pytest.raises(NotImplementedError, match=r"which dimension of \(1, \d+, \d+\) .* Set att"):
        model(**row_of(lengths))
    with torch.no_grad():
        model(**row_of((channels, 9)))  # the output alone is as long as its channels
    assert_exact(step(model, row_of(lengths)), expected_of(name, lengths))


def test_a_row_of_inference_can_be_trained_later():
    model, _ = enabled(tiny_model("lfm2"), FEW)
    with torch.inference_mode():
        model(**row_of(FEW))
    assert_exact(step(model, row_of(FEW)), expected_of("lfm2", FEW))


# --- kernels --------------------------------------------------------------------------------------

INSTALLED = {
    "lfm2": ["causal_conv1d_fn"],
    "qwen3_5_text": ["causal_conv1d_fn", "chunk_gated_delta_rule"],
    "kimi_linear": ["causal_conv1d_fn", "chunk_kda"],
    "bamba": ["causal_conv1d_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"],
}
# The convolution in PyTorch runs by document beside the kernel of another package.
PARTLY = ("qwen3_5_text", ["chunk_gated_delta_rule"])


@pytest.mark.parametrize(("name", "kernels"), [*INSTALLED.items(), PARTLY])
def test_kernels_get_the_boundaries(name, kernels, monkeypatch):
    expected = expected_of(name)  # by the functions of transformers
    calls = kernel_doubles.install(monkeypatch, modeling_of(name), *kernels)
    model, backend = enabled(tiny_model(name))
    assert backend == "documents"
    for training in (False, True):
        model.train(training)
        for told in calls.values():
            told.clear()
        found = step(model, row_of(LENGTHS))
        fused = "mamba_split_conv1d_scan_combined"
        for kernel, told in calls.items():
            is_used = fused not in calls or (kernel == fused) == training
            assert told[-1:] == [list(LENGTHS)] * is_used, kernel
        assert_exact(found, expected)
        model.zero_grad()


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_kernels_that_ignore_boundaries_are_found(name, monkeypatch):
    expected = expected_of(name, FEW)
    options = {"ignores_boundaries": True}
    kernel_doubles.install(monkeypatch, modeling_of(name), *INSTALLED[name], **options)
    model, backend = enabled(tiny_model(name), FEW)
    assert backend in ("by_document", "padded")
    assert_exact(step(model, row_of(FEW)), expected)
    model, _ = enabled(tiny_model(name), FEW, attention="documents", isolation_check="off")
    with pytest.raises(AssertionError):
        assert_exact(step(model, row_of(FEW)), expected)


def test_a_kernel_without_boundaries_runs_by_document(monkeypatch):
    expected = expected_of("mamba")
    kernels = "causal_conv1d_fn", "selective_scan_fn"
    calls = kernel_doubles.install(monkeypatch, modeling_of("mamba"), *kernels)
    model, backend = enabled(tiny_model("mamba"))
    assert backend == "documents"
    assert_exact(step(model, row_of(LENGTHS)), expected)
    assert set(map(str, calls["selective_scan_fn"])) == {"None"}
    assert calls["causal_conv1d_fn"][-1] == list(LENGTHS), "which mamba itself does not pass on"


@pytest.mark.parametrize("ignores", [False, True])
def test_fla_has_the_convolution_where_causal_conv1d_is_not_installed(ignores, monkeypatch):
    """fla 0.6.0 takes ``(1, T, channels)``, and returns a state too."""
    native = inspect.unwrap(modeling_of("lfm2").causal_conv1d_fn)
    calls = []

    def causal_conv1d(x, weight=None, bias=None, activation=None, cu_seqlens=None, **others):
        assert torch.equal(others.pop("cu_seqlens_cpu"), cu_seqlens)
        assert not others
        assert x.shape[2] == len(weight)
        calls.append(x.shape)
        lengths = [x.shape[1]] if ignores else cu_seqlens.diff().tolist()
        parts = [native(part.mT, weight, bias, activation).mT for part in x.split(lengths, 1)]
        return torch.cat(parts, 1), None

    monkeypatch.setattr(recurrent, "is_cpu", lambda tensor: False)
    monkeypatch.setattr(recurrent, "_convolution_of_fla", lambda: causal_conv1d)
    model, backend = enabled(tiny_model("lfm2"))
    assert calls
    assert (backend == "documents") != ignores
    assert_exact(step(model, row_of(LENGTHS)), expected_of("lfm2"))


def test_functions_that_the_package_kernels_made_modules_run_by_document(monkeypatch):
    def as_module(func):
        class Func(torch.nn.Module):
            def forward(self, *args, **kwargs):
                return func(*args, **kwargs)

        return Func()

    expected = expected_of("mamba", FEW)
    modeling = modeling_of("mamba")
    for name, function in kernel_doubles.functions(modeling).items():
        monkeypatch.setattr(modeling, name, as_module(function))
    model, backend = enabled(tiny_model("mamba"), FEW)
    assert backend == "documents"
    assert_exact(step(model, row_of(FEW)), expected)


# --- checkpoints of activations -------------------------------------------------------------------


def checkpointed(model, kind):
    if kind == "wrapper":
        layers = model.base_model.layers
        for i, layer in enumerate(layers):
            layers[i] = checkpoint_wrapper(layer)
    else:
        model.gradient_checkpointing_enable({"use_reentrant": kind == "reentrant"})
    return model


CHECKPOINTED = [
    *[(name, kind) for name in ("lfm2", "mamba") for kind in ("wrapper", "reentrant", "not")],
    ("rwkv", "reentrant"),
]


@pytest.mark.parametrize(("name", "kind"), CHECKPOINTED)
def test_layers_that_are_recomputed_are_packed_again(name, kind, monkeypatch):
    model = checkpointed(enabled(tiny_model(name), FEW)[0], kind)
    assert_exact(step(model, row_of(FEW)), expected_of(name, FEW))
    model.zero_grad()
    # A layer that runs again outside of the packed call is refused, and would leak.
    monkeypatch.setattr("trl_packing.attention.recurrent.run_again_inside", lambda: operator.call)
    with pytest.raises(RuntimeError, match="a checkpoint that is not the model's"):
        step(model, row_of(FEW))
    model.zero_grad()
    for module in ("calls", "recurrent"):
        patched = f"trl_packing.attention.{module}.refuse_recomputation"
        monkeypatch.setattr(patched, lambda given: None)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert_exact(step(model, row_of(FEW)), expected_of(name, FEW))


# --- models as they are used ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lfm2", "rwkv"])
def test_adapters_on_recurrent_layers_are_exact(name):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(tiny_model(name), config)
    expected = alone(model, documents_of(FEW))
    packed, backend = enabled(model, FEW)
    assert backend == ("by_document" if name in MODULES else "documents")
    assert_exact(step(packed, row_of(FEW)), expected)


@pytest.mark.parametrize("name", ["lfm2", "mamba", "rwkv"])
def test_ordinary_calls_and_copies_compute_what_they_did(name):
    plain = tiny_model(name).eval()
    model, _ = enabled(plain, FEW)
    model.eval()
    ids = torch.arange(3, 39).view(3, 12)
    kept = copy.deepcopy(model)
    with torch.no_grad():
        row = row_of(FEW)
        assert torch.equal(kept(**row).logits, model(**row).logits)
        del model
        for one in (kept, kept.bfloat16()):
            plain = plain.to(one.dtype)
            found = one(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            assert torch.equal(found, plain(input_ids=ids).logits)
            options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
            assert torch.equal(one.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("name", ["lfm2", "mamba", "rwkv"])
def test_bfloat16_is_as_exact_as_documents_alone(name):
    exact, plain = tiny_model(name), tiny_model(name).bfloat16()
    model, backend = enabled(plain, FEW)
    assert backend != "padded"
    row = row_of(FEW)
    with torch.no_grad():
        parts = row["input_ids"].split(FEW, 1)
        wide, alone = (
            torch.cat([one(input_ids=ids, use_cache=False).logits for ids in parts], 1).float()
            for one in (exact, plain)
        )
        apart = (model(**row).logits - wide).norm()
    assert apart <= 2 * (alone - wide).norm()


@pytest.mark.slow
def test_a_compiled_model_breaks_its_graph_and_is_exact():
    model, _ = enabled(tiny_model("lfm2"), FEW)
    model.compile(backend="aot_eager")
    for lengths in (FEW, (9, 9), LENGTHS):
        model.zero_grad()
        assert_exact(step(model, row_of(lengths)), expected_of("lfm2", lengths))
