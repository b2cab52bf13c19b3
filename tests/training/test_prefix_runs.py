"""Whole runs on rows with shared prefixes: two ranks are one, and a resumed run is uninterrupted.

The reference is the same run with prefix_sharing="off" on one rank. Tolerance, float32: as in
test_distributed, and the sums of a prefix are added in another order, a few roundings of 6e-8 more.
"""

from pathlib import Path

import pytest
from helpers.distributed.train import Scenario, assert_continues, assert_same_run, run, run_on_ranks

TOLERANCE = 2e-5
MANY = [3 + (i * 11) % 29 for i in range(41)]
SGD = {"optim": "sgd", "learning_rate": 0.05}
EVALUATED = {"eval_lengths": MANY[:9], "evaluates": "after"}

GROUPS = {"prefix_sharing": "group", "prefix_group_size": 4}
# Each as one rank with two accumulated micro-batches; two ranks accumulate none.
SAME_STEPS = {
    "packed, weighted": {
        "batch_size": 2,
        "weighted": True,
        "options": {"loss_weighting": "document"},
        **EVALUATED,
    },
    "documents_per_step": {"batch_size": 2, "options": {"documents_per_step": 12}},
    # Packed, each rank fills bins from its own documents, so two ranks have other steps than one.
    "a stream": {"stream": True, "batch_size": 6, "max_steps": 6, "packing": False},
    # One bin: rank 1 has no document, and no weights.
    "a rank with an empty micro-batch": {"lengths": [3, 5, 9], "prefixes": 1, "epochs": 3},
    # The only prefix is on one rank, so only its micro-batches have weights.
    "a rank without prefixes": {
        "lengths": [4, 3, 5, 3, 4],
        "prefixes": 2,
        "packing": False,
        "batch_size": 3,
        "options": {"train_sampling_strategy": "sequential"},
    },
    "groups": {"batch_size": 2, "options": GROUPS, **EVALUATED},
    "FSDP2": {"engine": "fsdp2", "batch_size": 2, **EVALUATED},  # the last one: it stays sharded
}


def scenario(folder: Path, name: str, accumulation: int, sharing: str) -> Scenario:
    arguments = {"lengths": MANY, "prefixes": 3} | SAME_STEPS[name]
    options = SGD | {"max_length": 128, "prefix_sharing": sharing} | arguments.pop("options", {})
    if accumulation > 1:  # one process
        arguments.pop("engine", None)
    folder = folder / f"{accumulation} {sharing} {name}".replace(" ", "-")
    return Scenario(str(folder), accumulation=accumulation, options=options, **arguments)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    base = tmp_path_factory.mktemp("ranks")
    made = {name: scenario(base, name, 1, "bin") for name in SAME_STEPS}
    return run_on_ranks(made, base / "results")


def assert_same(found: dict, expected: dict) -> None:
    assert_same_run(found, expected, TOLERANCE, "grad_norms")
    assert found["metrics"].keys() == expected["metrics"].keys()
    for name, value in expected["metrics"].items():
        if "loss" in name or "entropy" in name or "accuracy" in name:
            assert found["metrics"][name] == pytest.approx(value, abs=TOLERANCE), name


def computed(*ranks: dict) -> int:
    return sum(len(batch) for rank in ranks for batch in rank["batches"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_STEPS)
def test_two_ranks_that_share_train_as_one_that_does_not(name, two_ranks, tmp_path):
    # Groups change the steps, so one rank makes them, too.
    alone = run(scenario(tmp_path, name, 2, "group" if name == "groups" else "off"))
    for rank in two_ranks[name]:
        assert rank["shares"]
        assert_same(rank, alone)
    assert name == "groups" or computed(*two_ranks[name]) < 0.9 * computed(alone)
    if name == "packed, weighted":  # the control: other documents, without the weights
        with pytest.raises(AssertionError):
            assert_same(two_ranks["FSDP2"][0], alone)


# --- resuming -------------------------------------------------------------------------------------

# Arguments of the run, and of the one that goes on; a stream reads its position from a file.
RESUMED = {
    "packed": {"batch_size": 2, "accumulation": 2},
    "documents_per_step": {"batch_size": 2, "options": {"documents_per_step": 7}},
    "a stream": {"stream": True, "batch_size": 2, "max_steps": 12},
    "a stream of groups": {"stream": True, "batch_size": 2, "max_steps": 12, "options": GROUPS},
    "groups": {"batch_size": 2, "options": GROUPS},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_ends_with_the_same_bits(name, tmp_path):
    arguments = {"prefixes": 3, "epochs": 3, "save_steps": 5, "lengths": MANY} | RESUMED[name]
    # AdamW divides rounding errors by their own size.
    options = SGD | {"max_length": 128, "prefix_sharing": "bin"} | arguments.pop("options", {})
    whole = run(Scenario(str(tmp_path), options=options, **arguments))
    checkpoint = str(tmp_path / f"checkpoint-{whole['steps'] // 2 // 5 * 5}")
    resumed = run(Scenario(str(tmp_path), options=options, resume=checkpoint, **arguments))
    assert resumed["shares"]
    assert_continues(resumed, whole)
