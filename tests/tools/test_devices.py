"""`trl-packing plan --gpus M`: estimates are what real models, kernels and exchanges need."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.saved import kept_by_autograd
from helpers.tiny import save_tiny_model, tiny_model
from torch.utils.flop_counter import FlopCounterMode

from trl_packing import PackedCollator, PackedSFTConfig
from trl_packing.attention import sequence_parallel
from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.cli.program import main
from trl_packing.tools import devices
from trl_packing.training.chunks import Chunks

LAYERS = 6
SIZES = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "head_dim": 16}
LENGTHS = (200, 40, 272)


def needs(model, *lengths, ranks=1, chunk=0, recomputes=False):
    """Return what a model needs, and a device of two for documents without a trained token."""
    call = SimpleNamespace(model=model, peft_config=None, quantization_config=None)
    args = PackedSFTConfig("unused", max_length=512, gradient_checkpointing=recomputes)
    images = SimpleNamespace(packs=False)
    facts = devices.model_of(SimpleNamespace(call=call, args=args, options=args, images=images))
    machine = devices.Machine(2, 80, 400, 200, 25)
    return facts, devices.on_device(facts, np.array(lengths), 0, machine, ranks, chunk)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_activations_are_those_that_autograd_keeps_of_a_packed_row(name):
    model = tiny_model(name, tie_word_embeddings=name == "qwen3", **SIZES).bfloat16().train()
    found, without = needs(model, *LENGTHS)
    again = needs(model, *LENGTHS, recomputes=True)[1]["activations"]
    assert found.parameters == found.trained == sum(w.numel() for w in model.parameters())
    row = dict(PackedCollator()([{"input_ids": [5] * n, "labels": [5] * n} for n in LENGTHS]))
    del row["labels"]
    install_attention(model, resolve_attention(model, "documents"))
    hooks, taken = kept_by_autograd(model)
    with hooks:
        model.base_model(**row)
        whole = taken()
        model.gradient_checkpointing_enable()
        model.base_model(**row)
    assert without["activations"] * 1e9 == pytest.approx(whole, rel=0.01)
    # One layer at a time runs again.
    assert again * 1e9 == pytest.approx(taken() + whole / LAYERS, rel=0.05)
    assert again < 0.4 * without["activations"]


def test_chunks_keep_what_autograd_keeps_and_compute_as_often():
    model = tiny_model("llama", **SIZES).bfloat16().train()
    install_attention(model, resolve_attention(model, "documents"))
    hooks, taken = kept_by_autograd(model)
    measured = []

    def backward(loss):
        measured.append(taken())
        loss.backward()

    def loss_of(chunk):
        del chunk["labels"]
        return model.base_model(**chunk).last_hidden_state.sum()

    ids = torch.full((1, 512), 5)
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(512)[None]}
    with hooks, FlopCounterMode(display=False) as counter:
        Chunks(model, 64, loss_of, backward, nullcontext).train(row, 512)
    found, way = needs(model, 512, chunk=64)
    queries, keys, *_ = found.layers[0]
    elsewhere = 4 * keys * 32 * 512 * LAYERS  # gradients in float32, in no graph
    assert way["activations"] * 1e9 == pytest.approx(measured[0] + elsewhere, rel=0.1)
    attended = 4.375 * 2 * queries * 32 * LAYERS * 512 * 513 / 2
    assert way["operations"] == pytest.approx(counter.get_total_flops() + attended, rel=0.01)


def test_operations_are_those_of_a_model_without_the_unseen_half_of_attention():
    model = tiny_model("qwen3", attn_implementation="eager", **SIZES).train()
    with FlopCounterMode(display=False) as counter:
        hidden = model.base_model(input_ids=torch.full((1, 256), 5)).last_hidden_state
        forward = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
        hidden.sum().backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    # A kernel has 5 products in the backward, where the forward has 2.
    operations = needs(model, 256)[1]["operations"]
    assert operations == pytest.approx(products + 3.5 * forward / 2, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_traffic_is_what_ranks_exchange_around_attention(ranks, monkeypatch):
    sent = []

    def exchange(received, parts, group):
        sent.append(parts.nbytes * (ranks - 1) // ranks)  # its own part stays
        received.copy_(parts)

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(sequence_parallel, "group_of_row", lambda size: None)
    found, way = needs(tiny_model("llama", **SIZES), 512, ranks=ranks, recomputes=True)
    queries, keys, *_ = found.layers[0]
    shape = 512 // ranks, 16
    row = [torch.ones(1, n, *shape, dtype=torch.bfloat16) for n in (queries, keys, keys)]
    attend = sequence_parallel.exchanging(lambda _, q, k, v: (q.transpose(1, 2), None))
    monkeypatch.setattr(sequence_parallel, "num_shares", lambda *_: ranks)
    attend(None, *row)
    assert way["traffic_of_token"] == sum(sent) / (512 // ranks)
    assert way["traffic"] * 1e9 == 3 * LAYERS * sum(sent)  # forward, again, backward


@pytest.fixture
def words(tmp_path):
    (tmp_path / "rows.jsonl").write_text((json.dumps({"input_ids": [5] * 60}) + "\n") * 32)
    words = ["--data", str(tmp_path / "rows.jsonl"), "--max_length", "64", "--model"]
    return [*words, save_tiny_model(tmp_path, "llama")]


def test_the_command_prints_lines_that_fit_and_json(words, capsys, monkeypatch):
    def says(*more):
        assert main(["plan", *words, *more]) == 0
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "80")
    words += ["--use_peft", "true", "--lora_target_modules", "all-linear"]
    text = says("--gpus", "8", "--sp", "2")
    assert max(map(len, text.splitlines())) <= 80
    for part in ("no GPU was used", "4 groups of 2 ranks", "parallel_size=4", "(--memory)"):
        assert part in text
    found = json.loads(says("--gpus", "8", "--sequence_parallel_size", "2", "--json"))
    estimate = found["estimate"]
    assert [found["ranks"], *(way["ranks"] for way in estimate["ways"])] == [4, 1, 1, 2, 4]
    assert estimate | {"tokens": 480, "longest": 60, "shards": 8, "ranks": 2} == estimate
    assert 0 < estimate["trained"] < estimate["parameters"] / 2
    assert "nothing fits" in says("--gpus", "8", "--memory", "1e-6")
    own = json.loads(says("--gpus", "1", "--max_tokens_in_memory", "16", "--json"))["estimate"]
    assert (own["ranks"], own["shards"], own["setting"]) == (1, 1, "max_tokens_in_memory=16")


REFUSED = [
    ("--gpus 6 --ranks 3", "argument --ranks: not allowed with argument --gpus"),
    ("--gpus 6 --sp 4", "--gpus 6 counts all processes: give a multiple of sequence_parallel"),
    ("--gpus 0", "must be finite numbers above 0, not Machine(devices=0,"),
    ("--gpus 2 --speed nan 1 1", "--gpus, --memory and --speed must be finite numbers above 0"),
    ("--gpus 8 --sp 8", "does not divide the 4 attention heads of LlamaForCausalLM"),
    ("--gpus 2 --optim adafactor", "optim=adafactor cannot be estimated"),
    ("--gpus 2 --prefix_sharing bin", "prefix_sharing=bin cannot be estimated"),
    ("--gpus 2 --max_lenght 5", "--max_lenght is unknown; did you mean --max_length?"),
    ("--gpus 2 --model qwen3_moe", "a mixture of experts"),
    ("--gpus 2 --model lfm2", "recurrent layers"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_a_refusal_is_one_sentence(options, sentence, words, capsys, tmp_path):
    *_, name = added = options.split()
    if "--model" in added:
        words[-1] = added[-1] = save_tiny_model(tmp_path, name)
    assert main(["plan", *words, *added]) == 2
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]
    assert (said.out, last.startswith("trl-packing: "), sentence in last) == ("", True, True)
