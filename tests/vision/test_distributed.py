"""Two ranks train documents with images as one rank with twice the accumulation does.

No rank has an image in the first step, and only rank 1 has one in the second.
"""

import importlib.util
from dataclasses import asdict

import pytest
import torch
from helpers.distributed.images import ImageRun, run, run_on_two_ranks

ACCUMULATED = {"options": {"gradient_accumulation_steps": 3}, "rows": 24}
# DeepSpeed decays weights whose gradients are zeros, on any number of ranks.
NO_DECAY = {"weight_decay": 0.0}
CHECKED = {"isolation_check": "error"}
RANDOM = {"packing": True, "train_sampling_strategy": "random"}
WEIGHTED = {
    "weights": [0.0, 2.0, 0.5, 1.0] * 3,
    "options": RANDOM | {"documents_per_step": 4, "loss_weighting": "document"},
}
# Epochs with a remainder: each draws other documents.
MIXTURE = {"pictures": {"epochs": 1.5}, "texts": {"epochs": 0.5}}
MIXED = {"texts": 9, "options": RANDOM | {"mixture": MIXTURE, "max_length": 200, "max_steps": 4}}
LORA = {"r": 2, "target_modules": ["q_proj", "qkv", "proj"]}
RUNS: dict[str, dict[str, dict]] = {
    "DDP": {
        "plain": {"options": CHECKED},
        "all parameters used": {"options": {"ddp_find_unused_parameters": False}},
        "accumulated": ACCUMULATED,
        "weighted documents": WEIGHTED,
        "several data sets": MIXED,
    },
    "fsdp2": {
        "checked": {"options": CHECKED},
        "tiles": {"family": "llava_next"},
        "a mask": {"family": "gemma3", "options": CHECKED},
        "accumulated": ACCUMULATED,
        "weighted documents": WEIGHTED,
        "several data sets": MIXED,
        "checkpointing": {"options": {"gradient_checkpointing": True}},
        "LoRA": {"lora": LORA},
    },
    "zero2": {"plain": {"options": NO_DECAY}},
    "zero3": {"checked": {"options": NO_DECAY | CHECKED}},
}
SAVED = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch", "max_steps": 4}
RESUMED = ("DDP", "fsdp2")
CASES = [(engine, name) for engine, runs in RUNS.items() for name in runs]


def image_run(folder, name, arguments, ranks, engine=None) -> ImageRun:
    made = ImageRun(str(folder / name.replace(" ", "-")), engine=engine, **arguments)
    accumulation = made.options.get("gradient_accumulation_steps", 1) * 2 // ranks
    made.options = made.options | {"gradient_accumulation_steps": accumulation}
    return made


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Runs of two ranks, by engine and name; each engine needs processes of its own."""
    known: dict[str, dict] = {}

    def of(kind: str) -> dict[str, list[dict]]:
        if kind.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed: `make .venv/.all`")
        if kind not in known:
            folder = tmp_path_factory.mktemp(kind)
            engine = None if kind == "DDP" else kind
            runs = {n: image_run(folder, n, a, 2, engine) for n, a in RUNS[kind].items()}
            if kind in RESUMED:
                whole = image_run(folder, "whole", {"options": SAVED}, 2, engine)
                rest = ImageRun(**asdict(whole))
                rest.output_dir = f"{whole.output_dir} rest"
                rest.resume = f"{whole.output_dir}/checkpoint-2"
                runs |= {"whole": whole, "rest": rest}
            if kind == "fsdp2":
                runs["leak"] = ImageRun(str(folder / "leak"), engine=kind, leaks=True)
                runs["leak"].options = CHECKED
            known[kind] = run_on_two_ranks(runs, folder / "results")
        return known[kind]

    return of


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Runs of one rank, by their arguments; all engines are compared with them."""
    known: dict[str, dict] = {}

    def of(arguments: dict) -> dict:
        key = repr(arguments)
        if key not in known:
            known[key] = run(image_run(tmp_path_factory.mktemp("alone"), "run", arguments, 1))
        return known[key]

    return of


def assert_same(found: dict, expected: dict) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["metrics"].keys() == expected["metrics"].keys()
    loss = expected["metrics"]["eval_loss"]
    assert found["metrics"]["eval_loss"] == pytest.approx(loss, rel=1e-5)
    for name, parameter in expected["parameters"].items():
        torch.testing.assert_close(found["parameters"][name], parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), CASES)
def test_two_ranks_train_as_one(engine, name, two_ranks, one_rank):
    for rank in two_ranks(engine)[name]:
        assert rank["is_sharded"]
        assert_same(rank, one_rank(RUNS[engine][name]))


@pytest.mark.slow
def test_three_micro_batches_train_as_one_and_other_documents_do_not(two_ranks, one_rank):
    at_once = {"options": {"per_device_train_batch_size": 3}, "rows": 24}
    accumulated, _ = two_ranks("DDP")["accumulated"]
    assert_same(accumulated, one_rank(at_once))
    with pytest.raises(AssertionError):
        assert_same(accumulated, one_rank({}))


@pytest.mark.slow
def test_a_sharded_run_that_leaks_is_refused_with_the_way_out(two_ranks):
    for rank in two_ranks("fsdp2")["leak"]:
        assert "LEAK" in rank["error"]
        assert "SFTTrainer trains rows with images padded" in rank["error"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", RESUMED)
def test_a_resumed_run_ends_in_the_same_weights_on_two_ranks(engine, two_ranks):
    pairs = zip(two_ranks(engine)["whole"], two_ranks(engine)["rest"], strict=True)
    for whole, rest in pairs:
        for name, value in whole["parameters"].items():
            assert torch.equal(rest["parameters"][name], value), name
