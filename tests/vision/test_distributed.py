"""Two ranks train documents with images as one rank with twice the accumulation does.

No rank has an image in the first step, and only rank 1 has one in the second.
"""

import importlib.util
from dataclasses import asdict

import pytest
import torch
from helpers.distributed.images import ImageRun, run, run_on_two_ranks

ACCUMULATED = {"gradient_accumulation_steps": 3}
# DeepSpeed decays weights whose gradients are zeros, on any number of ranks.
NO_DECAY = {"weight_decay": 0.0}
WEIGHTED = {
    "weights": [0.0, 2.0, 0.5, 1.0] * 3,
    "options": {
        "packing": True,
        "documents_per_step": 4,
        "loss_weighting": "document",
        "train_sampling_strategy": "random",
    },
}
LORA = {"r": 2, "target_modules": ["q_proj", "qkv", "proj"]}

RUNS = {
    "DDP": {},
    "DDP, tiles": {"family": "llava_next"},
    "DDP, all parameters used": {"options": {"ddp_find_unused_parameters": False}},
    "DDP, accumulated": {"options": ACCUMULATED, "rows": 24},
    "DDP, three documents at once": {"options": {"per_device_train_batch_size": 3}, "rows": 24},
    "DDP, weighted documents": WEIGHTED,
    "FSDP2": {"engine": "fsdp2", "scores": True},
    "FSDP2, features in several layers": {"engine": "fsdp2", "family": "qwen3_vl"},
    "FSDP2, tiles": {"engine": "fsdp2", "family": "llava_next"},
    "FSDP2, a mask": {"engine": "fsdp2", "family": "gemma3"},
    "FSDP2, accumulated": {"engine": "fsdp2", "options": ACCUMULATED, "rows": 24},
    "FSDP2, weighted documents": WEIGHTED | {"engine": "fsdp2"},
    "FSDP2, checkpointing": {"engine": "fsdp2", "options": {"gradient_checkpointing": True}},
    "FSDP2, LoRA": {"engine": "fsdp2", "lora": LORA},
    "ZeRO-3": {"engine": "zero3", "options": NO_DECAY},
    "ZeRO-3, padded evaluation": {"engine": "zero3", "options": NO_DECAY, "scores": True},
    "ZeRO-3, tiles": {"engine": "zero3", "family": "llava_next", "options": NO_DECAY},
    "ZeRO-2": {"engine": "zero2", "options": NO_DECAY},
}
SAVED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "max_steps": 4}
RESUMED = {"DDP": {}, "FSDP2": {"engine": "fsdp2"}}


def image_run(folder, name, arguments, ranks) -> ImageRun:
    made = ImageRun(str(folder / name.replace(" ", "-")), **arguments)
    accumulation = made.options.get("gradient_accumulation_steps", 1) * 2 // ranks
    made.options = made.options | {"gradient_accumulation_steps": accumulation}
    return made


def has_engine(name: str) -> bool:
    return "ZeRO" not in name or importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    runs = {n: image_run(folder, n, a, 2) for n, a in RUNS.items() if has_engine(n)}
    for name, arguments in RESUMED.items():
        whole = image_run(folder, f"{name}, whole", arguments | {"options": SAVED}, 2)
        rest = ImageRun(**asdict(whole))
        rest.output_dir = f"{whole.output_dir} rest"
        rest.resume = f"{whole.output_dir}/checkpoint-2"
        runs |= {f"{name}, whole": whole, f"{name}, rest": rest}
    return run_on_two_ranks(runs, folder / "results")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Runs of one rank, by name."""
    known: dict[str, dict] = {}

    def of(name: str) -> dict:
        alone = {key: value for key, value in RUNS[name].items() if key != "engine"}
        key = repr(alone)
        if key not in known:
            known[key] = run(image_run(tmp_path_factory.mktemp("alone"), name, alone, 1))
        return known[key]

    return of


def assert_same(found: dict, expected: dict) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for key in ("eval_loss", "eval_rows", "eval_correct"):
        assert found["metrics"].get(key) == pytest.approx(expected["metrics"].get(key), rel=1e-5)
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one(name, two_ranks, one_rank):
    if not has_engine(name):
        pytest.skip("deepspeed is not installed: `make .venv/.all`")
    for rank in two_ranks[name]:
        assert rank["is_sharded"]
        assert_same(rank, one_rank(name))


@pytest.mark.slow
def test_three_micro_batches_train_as_one(two_ranks, one_rank):
    assert_same(two_ranks["DDP, accumulated"][0], one_rank("DDP, three documents at once"))


@pytest.mark.slow
def test_runs_with_other_documents_fail_the_same_comparison(two_ranks, one_rank):
    with pytest.raises(AssertionError):
        assert_same(two_ranks["DDP, accumulated"][0], one_rank("DDP"))


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_in_the_same_weights_on_two_ranks(name, two_ranks):
    pairs = zip(two_ranks[f"{name}, whole"], two_ranks[f"{name}, rest"], strict=True)
    for whole, rest in pairs:
        for parameter, value in whole["parameters"].items():
            assert torch.equal(rest["parameters"][parameter], value), parameter
