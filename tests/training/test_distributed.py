"""Two ranks train what one rank with twice the accumulation trains: gloo processes, for real.

Tolerance, float32: the two differ in the order of a sum over two micro-batches and in gloo's
all-reduce, a few roundings of 6e-8 a step; ten steps of SGD stay far below 1e-5.
"""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from helpers.distributed.train import Scenario, assert_same_run, run, run_on_ranks
from helpers.tiny import documents_of_lengths, tiny_model

TOLERANCE = 1e-5
SGD = {"optim": "sgd", "learning_rate": 0.05}
LENGTHS = [3 + (i * 7) % 29 for i in range(23)]
MANY = [3 + (i * 11) % 29 for i in range(41)]

UNPACKED = {"packing": False, "max_steps": 8, "stream": True}
# Each as one rank with two accumulated micro-batches; two ranks accumulate none.
SAME_STEPS = {
    "packed": {"lengths": MANY, "epochs": 2},
    "packed, two bins a micro-batch": {"lengths": MANY, "batch_size": 2, "epochs": 2},
    "unpacked": {"lengths": LENGTHS, "packing": False},
    # Three bins of one document: rank 1 has none in the second step.
    "a rank with an empty micro-batch": {"lengths": [32, 32, 32], "epochs": 3},
    # Ranks of one and of three parts, with one more of a masked token.
    "divided": {
        "lengths": [30, 30, 30, *[3] * 9, 20, 20],
        "packing": False,
        "batch_size": 3,
        "options": SGD | {"max_tokens_per_micro_batch": 32},
    },
    # 30, 1, 29 and 2 trained tokens.
    "unequal trained tokens": {"lengths": [32, 3, 31, 4], "packing": False},
    # Packed, each rank fills bins from its own documents, so two ranks have other steps than one.
    "stream": UNPACKED | {"lengths": MANY},
    # Two steps an epoch; without an empty micro-batch one rank would carry a gradient over.
    "the end of a stream": UNPACKED | {"lengths": [32, 32, 32], "max_steps": 4},
    "a recurrent model": {
        "lengths": MANY,
        "model": "falcon_mamba",
        "options": SGD | {"isolation_check": "error"},
    },
    # transformers 5.23 marks the model as prepared, and accelerate 1.15 then leaves DDP out.
    "evaluated before training": {"lengths": MANY, "eval_lengths": MANY[:3]},
}
EVALUATIONS = {
    "fewer documents than ranks": {"eval_lengths": [9]},
    "stream": {"stream": True, "max_steps": 1},
    "stream, by rank": {"stream": True, "max_steps": 1, "shards": 2},
}
# Each rank reads two of four shards; the documents of rank 1 fill a quarter of the bins.
UNEVEN = [*[31] * 8, *[7] * 8] * 2
SHARDED = {"lengths": UNEVEN, "stream": True, "shards": 4, "max_steps": 20}
SHARDED |= {"options": SGD | {"max_grad_norm": 0.0}}
BY_RANK = {
    "packed": SHARDED,
    "two bins a micro-batch, accumulated": SHARDED | {"batch_size": 2, "accumulation": 2},
    "unpacked": SHARDED | {"packing": False, "lengths": UNEVEN[:27]},  # 14 and 13 documents
}


def scenarios(base, accumulation: int) -> dict[str, Scenario]:
    """All scenarios of this file, so that two processes start only once."""
    options = {"options": SGD, "accumulation": accumulation}
    made = {f"same steps: {name}": options | arguments for name, arguments in SAME_STEPS.items()}
    for name, arguments in EVALUATIONS.items():
        made[f"evaluation: {name}"] = {"lengths": LENGTHS, "eval_lengths": MANY[:7], **arguments}
    made |= {f"by rank: {name}": arguments for name, arguments in BY_RANK.items()}
    return {
        name: Scenario(str(base / f"{accumulation} {number}"), **arguments)
        for number, (name, arguments) in enumerate(made.items())
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    base = tmp_path_factory.mktemp("ranks")
    return run_on_ranks(scenarios(base, 1), base / "results")


@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_STEPS)
def test_two_ranks_train_as_one_with_twice_the_accumulation(name, two_ranks, tmp_path):
    ranks = two_ranks[f"same steps: {name}"]
    one_rank = run(scenarios(tmp_path, 2)[f"same steps: {name}"])
    assert len(ranks[0]["batches"]) == len(ranks[1]["batches"])
    for rank in ranks:
        assert_same_run(rank, one_rank, TOLERANCE)
    if name == "packed":  # the control: other documents
        others = two_ranks[f"same steps: {name}, two bins a micro-batch"]
        with pytest.raises(AssertionError):
            assert_same_run(others[0], one_rank, TOLERANCE)
    if "stream" in name:
        assert {rank["documents_read"] for rank in ranks} == {one_rank["documents_read"]}
        assert one_rank["documents_read"] >= len(SAME_STEPS[name]["lengths"])


def documents_of(inputs: dict) -> list[tuple[int, ...]]:
    """Return the documents of a micro-batch that train anything."""
    starts = [*(inputs["position_ids"][0] == 0).nonzero().flatten().tolist(), None]
    found = []
    for start, stop in pairwise(starts):
        if (inputs["labels"][0, start:stop] != -100).any():
            found.append(tuple(inputs["input_ids"][0, start:stop].tolist()))
    return found


def trained_by_hand(ranks: list[dict], accumulation: int, rate: float) -> dict:
    """Return the parameters after SGD on the mean over all trained tokens of each step."""
    model = tiny_model("llama")
    num_batches = len(ranks[0]["inputs"])
    for first in range(0, num_batches, accumulation):
        step = [b for rank in ranks for b in rank["inputs"][first : first + accumulation]]
        trained = sum(int((batch["labels"] != -100).sum()) for batch in step)
        for batch in step:
            # No mask and no cache: llama keeps documents apart by their positions.
            logits = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
            loss = torch.nn.functional.cross_entropy(
                logits.logits[0, :-1], batch["labels"][0, 1:], reduction="sum"
            )
            (loss / trained).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= rate * parameter.grad
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_RANK)
def test_ranks_that_read_their_own_shards_train_every_document_once_an_epoch(name, two_ranks):
    """Rank 1 ends early and goes on with masked micro-batches; the weights are those by hand."""
    ranks = two_ranks[f"by rank: {name}"]
    made = documents_of_lengths(BY_RANK[name]["lengths"], prompt=2, seed=0)
    expected = Counter(tuple(row["input_ids"]) for row in made)
    seen: Counter = Counter()
    for batches in zip(*(rank["inputs"] for rank in ranks), strict=True):
        seen.update(document for batch in batches for document in documents_of(batch))
        if seen == expected:
            break
    assert seen == expected, "the first epoch"
    assert documents_of(batches[1]) == []
    accumulation = BY_RANK[name].get("accumulation", 1)
    weights = trained_by_hand(ranks, accumulation, SGD["learning_rate"])
    for rank in ranks:
        torch.testing.assert_close(rank["parameters"], weights, rtol=0, atol=TOLERANCE)
    without_last = [rank | {"inputs": rank["inputs"][:-accumulation]} for rank in ranks]
    weights = trained_by_hand(without_last, accumulation, SGD["learning_rate"])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ranks[0]["parameters"], weights, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATIONS)
def test_two_ranks_evaluate_to_the_loss_of_one(name, two_ranks, tmp_path):
    expected = run(scenarios(tmp_path, 2)[f"evaluation: {name}"])["metrics"]
    for rank in two_ranks[f"evaluation: {name}"]:
        assert rank["metrics"]["eval_loss"] == pytest.approx(expected["eval_loss"], abs=TOLERANCE)
