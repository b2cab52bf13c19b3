"""FSDP2, ZeRO-2, ZeRO-3 on two gloo ranks train what one rank with twice the accumulation trains.

Tolerance, float32: as in test_distributed. Losses of around 6 were at most 9.5e-7 apart.
"""

import importlib.util
from functools import cache

import pytest
import torch
from helpers.distributed.engines import ENGINES
from helpers.distributed.train import Scenario, assert_continues, assert_same_run, run, run_on_ranks

TOLERANCE = 1e-5
SGD = {"optim": "sgd", "learning_rate": 0.05}
MANY = [3 + (i * 11) % 29 for i in range(41)]
WEIGHTED = {"weighted": True, "options": {"loss_weighting": "document"}}
ADAMW = {"save_steps": 4, "options": {"optim": "adamw_torch", "learning_rate": 0.01}}
EVALUATED = {"eval_lengths": [5, 9, 30, 22], "evaluates": "after"}
BF16 = {"options": {"bf16": True}, **EVALUATED}
BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}

# Each as one rank with twice the accumulation. The gate is on where it says so, the head's is on.
SAME = {
    "packed, evaluated, saved": {"saves": True, **EVALUATED},
    "accumulated": {"accumulation": 2, "options": {"gradient_checkpointing": False}},
    "documents weighted": WEIGHTED | EVALUATED,
    "documents weighted, none on a rank": {"lengths": [32, 32, 32], **WEIGHTED},
    "tied embeddings": {"config": {"tie_word_embeddings": True}, "saves": True},
    "balance of experts": {"model": "qwen3_moe", "config": BALANCE},
    "the gate, states": {"model": "falcon_mamba", "options": {"isolation_check": "error"}},
    "the gate, padded rows": {"options": {"isolation_check": "error", "attention": "padded"}},
    "divided": {
        "packing": False,
        "batch_size": 3,
        "accumulation": 2,
        "options": {"max_tokens_per_micro_batch": 40},
    },
    "LoRA": {"lora": LORA},
    "LoRA and a trained head": {"lora": LORA | {"modules_to_save": ["lm_head"]}},
    "a stream": {"stream": True, "max_steps": 4, "packing": False},
    "a model by its name": {"by_name": True},
}


# The graphs of the ranks differ by the leak: recomputing one would gather in another order.
LEAK = {"isolation_check": "error", "gradient_checkpointing": False}
OTHERS = {"leak": {"leaks_on_rank": "1", "options": LEAK}, "bf16": BF16, "whole": ADAMW}


def scenario(folder, engine, name, arguments, accumulation) -> Scenario:
    arguments = {"lengths": MANY, **arguments}
    arguments["accumulation"] = accumulation * arguments.get("accumulation", 1)
    arguments["options"] = SGD | arguments.get("options", {})
    return Scenario(str(folder / name.replace(" ", "-")), engine=engine, **arguments)


@pytest.fixture(scope="module", params=ENGINES)
def engine(request) -> str:
    if request.param != "fsdp2" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed: `make .venv/.all`")
    return request.param


@pytest.fixture(scope="module")
def two_ranks(engine, tmp_path_factory) -> dict[str, list[dict]]:
    base = tmp_path_factory.mktemp(engine)
    runs = (SAME | OTHERS).items()
    made = {name: scenario(base, engine, name, arguments, 1) for name, arguments in runs}
    checkpoint = f"{made['whole'].output_dir}/checkpoint-4"
    made["resumed"] = scenario(base, engine, "resumed", ADAMW | {"resume": checkpoint}, 1)
    return run_on_ranks(made, base / "results")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """Runs of one rank, by name; all engines are compared with them."""

    @cache
    def of(name: str) -> dict:
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp("alone")
        return run(scenario(folder, None, name, (SAME | OTHERS)[name], 2))

    return of


def assert_same(ranks: list[dict], alone: dict) -> None:
    """The same losses, norms of gradients and parameters, on a model that is sharded."""
    for rank in ranks:
        assert rank["is_sharded"]
        for same in ("attention", "scores_native_logits"):
            assert rank[same] == alone[same]
        assert_same_run(rank, alone, TOLERANCE, "grad_norms")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME)
def test_an_engine_trains_as_one_rank_with_twice_the_accumulation(name, two_ranks, one_rank):
    alone = one_rank(name)
    assert_same(two_ranks[name], alone)
    for rank in two_ranks[name]:
        expected = alone["metrics"].get("eval_loss", 0.0)
        assert rank["metrics"].get("eval_loss", 0.0) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.slow
def test_a_step_with_other_documents_fails_the_same_comparison(engine, two_ranks, one_rank):
    alone = one_rank("packed, evaluated, saved")
    for other in ("accumulated", "documents weighted"):
        with pytest.raises(AssertionError):
            assert_same(two_ranks[other], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed, evaluated, saved", "tied embeddings"])
def test_the_whole_model_is_saved(name, two_ranks):
    """Tied weights are in the file once, under either name."""
    for rank in two_ranks[name]:
        saved = rank["saved"]
        assert len(rank["parameters"].keys() - saved.keys()) <= 0 + ("tied" in name)
        for parameter in saved.keys() & rank["parameters"].keys():
            torch.testing.assert_close(saved[parameter], rank["parameters"][parameter])


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(two_ranks):
    for whole, resumed in zip(two_ranks["whole"], two_ranks["resumed"], strict=True):
        assert (len(whole["batches"]), len(resumed["batches"])) == (11, 7)
        assert_continues(resumed, whole)


@pytest.mark.slow
def test_a_leak_on_one_rank_sends_both_the_slower_way(two_ranks):
    ranks = two_ranks["leak"]
    assert [rank["attention"] for rank in ranks] == ["padded", "padded"]
    assert ranks[0]["losses"] == ranks[1]["losses"]


@pytest.mark.slow
def test_bf16_keeps_the_loss_in_float32(two_ranks, one_rank):
    """Rounding in the model moves losses of 6 by up to 6e-3; outputs in bf16, by 1.8e-2."""
    alone = one_rank("bf16")
    for rank in two_ranks["bf16"]:
        torch.testing.assert_close(rank["losses"], alone["losses"], rtol=0, atol=1e-2)
        loss = rank["metrics"]["eval_loss"]
        assert loss == pytest.approx(alone["metrics"]["eval_loss"], abs=1e-2)
