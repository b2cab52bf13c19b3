"""Rows divided over gloo ranks train what one process trains, on rows that are whole.

Tolerance, float32: losses of around 6 differ by 2e-7 of their value, parameters by 1.2e-7, after
22 steps of SGD. The faults of `helpers.distributed.divided` move either by more than 1e-3.
"""

import importlib.util
from typing import Any

import pytest
import torch
from accelerate import ParallelismConfig
from datasets import Dataset
from harness import make_trainer
from helpers.distributed.divided import (
    FAULTS,
    needs_of_step,
    run_divided_on_ranks,
    words_of_refusals,
)
from helpers.distributed.ranks import on_ranks
from helpers.distributed.train import Scenario, run
from helpers.tiny import documents_of_lengths

from trl_packing import PackedCollator

SGD = {"optim": "sgd", "learning_rate": 0.05, "isolation_check": "error"}
# Documents of one token, and rows of 32, 31 and fewer tokens.
LENGTHS = [1 + (i * 11) % 32 for i in range(41)]
EVALUATED = {"eval_lengths": [5, 9, 30, 22], "evaluates": "after"}
METRICS = {"entropy", "mean_token_accuracy", "num_tokens", "aux_loss", "documents_per_step"}
METRICS |= {"loss_a", "num_tokens_b", "num_trained_tokens_a", "num_input_tokens_seen"}
METRICS |= {"eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_correct", "eval_rows"}
THREE_HEADS = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 1}
BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.1}

MODELS = ("llama", "qwen3", "gemma2", "gemma3_text", "gpt_oss", "deepseek_v3", "gpt2")
FLASH = "flash_attention_2"
SAME: dict[str, dict[str, Any]] = {name: {"model": name, **EVALUATED} for name in MODELS}
SAME |= {
    "the balance of experts": {"model": "qwen3_moe", "config": BALANCE},
    "LoRA": {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
    "no checkpoints": {"options": {"gradient_checkpointing": False}},
    "reentrant checkpoints": {
        "options": {"gradient_checkpointing_kwargs": {"use_reentrant": True}}
    },
    "two bins, accumulated": {
        "batch_size": 2,
        "accumulation": 2,
        "epochs": 2,
        "options": {"include_num_input_tokens_seen": "non_padding"},
    },
    "sources": {"sets": {"a": 20, "b": 21}},
    "unpacked": {"packing": False, "saves": True, **EVALUATED},
    "documents_per_step": {"options": {"documents_per_step": 5}},
    "a stream": {"stream": True, "max_steps": 6, **EVALUATED},
    "documents weighted": {"weighted": True, "options": {"loss_weighting": "document"}},
    "dft": {"options": {"loss_type": "dft"}},
    "smoothed": {"options": {"label_smoothing_factor": 0.1}},
    "static shapes": {"options": {"static_shapes": True}},
    # The first 2 tokens of a document are not trained: a rank without a target.
    "short rows": {"lengths": [3, 2, 4, 1, 3], "packing": False},
    "rows packed before": {"packed_before": True, "lengths": [9, 13, 1, 20, 5, 11, 16, 16, 3, 4]},
    "a padded evaluation": {"counts_correct": True, **EVALUATED},
    FLASH: {"model": "mistral", "config": {"attn_implementation": "flash_attention_2"}},
}


def scenario(folder: Any, name: str, arguments: dict[str, Any], **others: Any) -> Scenario:
    options = SGD | arguments.get("options", {})
    made = {"lengths": LENGTHS, **arguments, **others, "options": options}
    return Scenario(str(folder / name.replace(" ", "-")), **made)


# DDP keeps its buckets: those that it makes after the first step would begin anew in a resumed run.
ADAMW = {"optim": "adamw_torch", "learning_rate": 0.01, "ddp_find_unused_parameters": True}
SAVED: dict[str, Any] = {"save_steps": 4, "options": ADAMW}
# Two groups of two ranks; each as one rank that accumulates two micro-batches.
GROUPS: dict[str, dict[str, Any]] = {
    "groups": EVALUATED,
    "groups, the last idle": {"lengths": [32] * 3, "model": "qwen3_moe", "config": BALANCE},
    "groups, a stream": {"stream": True, "max_steps": 4, "packing": False},
    "groups, fsdp2": {"engine": "fsdp2", "saves": True, **EVALUATED},
    "groups, zero3": {"engine": "zero3", **EVALUATED},
}
FOUR: dict[str, dict[str, Any]] = {"two key heads": {"model": "gpt_oss"}}  # of four ranks
FOUR["one key head"] = {"model": "qwen3", "config": {"num_key_value_heads": 1}}
LEAK = {"leaks_on_rank": "1", "options": {"isolation_check": "error"}}
# What each refuses, in words of the message.
REFUSED = {
    "a leak on one rank": (LEAK, "LEAK"),
    "recurrent": ({"model": "lfm2"}, "recurrent layers"),
    "three heads": ({"config": THREE_HEADS}, "3 attention heads"),
    "no kernel": ({"model": "gpt2_dropout"}, "needs attention over boundaries alone"),
    "a loss of the user": ({"own_loss": True}, "sequence_parallel_size=1"),
}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sequence_parallel_size": 0}, "sequence_parallel_size=0 must be at least 1"),
        ({}, "start a multiple of 2"),
        ({"parallelism_config": ParallelismConfig(sp_size=4)}, "accelerate's sp_size=4 differ"),
        ({"prefix_sharing": "bin"}, "prefix_sharing='bin' exclude each other"),
        ({"attention": "mask"}, "attention='mask' exclude each other"),
        ({"torch_compile": True}, "torch_compile=True exclude each other"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 exclude each other"),
    ],
)
def test_settings_beside_which_rows_cannot_be_divided_are_refused(settings, words, tmp_path):
    rows = documents_of_lengths([5, 6])
    with pytest.raises(ValueError, match=words):
        make_trainer(tmp_path, rows, **{"sequence_parallel_size": 2, **settings})


@pytest.mark.parametrize("given", [{"parallelism_config": ParallelismConfig(sp_size=2)}, {}])
def test_sp_size_of_accelerate_divides_packed_rows_alone(given, tmp_path, monkeypatch):
    if not given:  # `accelerate launch` passes it
        monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")
    rows = documents_of_lengths([5, 6])
    with pytest.raises(ValueError, match=r"sequence_parallel_size=2 .*start a multiple of 2"):
        make_trainer(tmp_path, rows, **given)
    with pytest.raises(ValueError, match=r"ParallelismConfig is|torch\.distributed"):  # TRL's path
        make_trainer(tmp_path, rows, packing=False, **given)


def test_trl_path_and_losses_of_the_user_are_refused(tmp_path):
    rows = Dataset.from_list(documents_of_lengths([5, 6])).with_transform(dict)
    with pytest.raises(ValueError, match="sequence_parallel_size=2 does nothing on TRL's path"):
        make_trainer(tmp_path, rows, sequence_parallel_size=2)
    given = {"compute_loss_func": lambda outputs, labels, num_items_in_batch: 0}
    with pytest.raises(ValueError, match="sequence_parallel_size=2 and compute_loss_func"):
        make_trainer(tmp_path, documents_of_lengths([5]), arguments=given, sequence_parallel_size=2)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_shares_of_a_row_are_its_tokens_and_targets(size):
    documents = documents_of_lengths([1, 7, 2, 5], prompt=1)
    whole = PackedCollator(pad_to_multiple_of=size)(documents)
    shares = [
        PackedCollator(pad_to_multiple_of=size, share=(rank, size))(documents)
        for rank in range(size)
    ]
    for name in ("input_ids", "position_ids", "seq_idx"):
        assert torch.equal(torch.cat([share[name] for share in shares], 1), whole[name])
    targets = torch.cat([share["labels"][:, 1:] for share in shares], 1)
    assert torch.equal(targets[:, :-1], whole["labels"][:, 1:])
    assert sum(int((share["labels"] != -100).sum()) for share in shares) == 11
    with pytest.raises(ValueError, match=f"set pad_to_multiple_of={size}"):
        PackedCollator(share=(0, size))([*documents, *documents_of_lengths([size + 1 - 15 % size])])
    for share in shares:
        assert torch.equal(share["cu_seq_lens_q"], whole["cu_seq_lens_q"])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    base = tmp_path_factory.mktemp("divided")
    cases = {name: (scenario(base, name, case), 2, None) for name, case in SAME.items()}
    options = {"options": {"parallelism_config": ParallelismConfig(sp_size=2)}}
    cases["sp_size"] = (scenario(base, "sp_size", options), 1, None)
    for fault in FAULTS:
        cases[fault] = (scenario(base, fault, {"options": {"isolation_check": "off"}}), 2, fault)
    for name, (case, _) in REFUSED.items():
        cases[name] = (scenario(base, name, case), 2, None)
    return run_divided_on_ranks(cases, base / "results")


def assert_same_training(rank: dict, alone: dict) -> None:
    """The same losses, norms of gradients, parameters, counts and evaluation."""
    # Sums over tokens, and over ranks, are added in another order.
    bounds = {"losses": (1e-6, 0), "grad_norms": (2e-6, 0), "parameters": (0, 1e-6)}
    for name, (rtol, atol) in bounds.items():
        torch.testing.assert_close(rank[name], alone[name], rtol=rtol, atol=atol)
    for entry, expected in zip(rank["history"], alone["history"], strict=True):
        for name in expected.keys() & METRICS:
            assert entry[name] == pytest.approx(expected[name], rel=1e-5), name
    for name in ("train_tokens", "train_documents", "train_trained_tokens"):
        assert rank["totals"][name] == alone["totals"][name]


def alone(tmp_path: Any, name: str, arguments: dict[str, Any], **others: Any) -> dict:
    torch.manual_seed(0)
    return run(scenario(tmp_path, name, arguments, **others))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SAME, "sp_size"])
def test_two_ranks_that_divide_rows_train_as_one(name, two_ranks, tmp_path):
    case = SAME.get(name, {}) | ({"config": {}} if name == FLASH else {})
    expected = alone(tmp_path, name, case)
    ranks = two_ranks[name]
    for rank in ranks:
        assert_same_training(rank, expected)
        assert rank["attention"] == (FLASH if name == FLASH else "documents")
    for whole, *parts in zip(expected["inputs"], *(rank["inputs"] for rank in ranks), strict=True):
        row = torch.cat([part["input_ids"] for part in parts], 1)
        assert torch.equal(row[:, : whole["input_ids"].shape[1]], whole["input_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_that_is_divided_wrongly_fails_the_same_comparison(fault, two_ranks, tmp_path):
    expected = alone(tmp_path, "llama", {})
    with pytest.raises(AssertionError):
        assert_same_training(two_ranks[fault][0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_all_ranks_refuse_what_cannot_be_divided(name, two_ranks):
    for rank in two_ranks[name]:
        assert REFUSED[name][1] in rank["error"]


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    base = tmp_path_factory.mktemp("groups")
    cases = {name: (scenario(base, name, case), 4, None) for name, case in FOUR.items()}
    whole = scenario(base, "whole", SAVED)
    checkpoint = f"{whole.output_dir}/checkpoint-4"
    resumed = scenario(base, "resumed", SAVED, resume=checkpoint)
    cases |= {"whole": (whole, 2, None), "resumed": (resumed, 2, None)}
    # Engines come last: accelerate keeps them in the environment of the process.
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    for name, case in GROUPS.items():
        if has_deepspeed or case.get("engine") != "zero3":
            cases[name] = (scenario(base, name, case), 2, None)
    results = run_divided_on_ranks(cases, base / "results", ranks=4)
    # The same steps, of one rank that accumulates two micro-batches.
    goes_on = scenario(base, "alone", SAVED, resume=checkpoint, accumulation=2)
    return results | {"goes on alone": [run(goes_on)]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GROUPS, *FOUR])
def test_groups_train_as_one_rank_with_their_number_accumulated(name, four_ranks, tmp_path):
    if name not in four_ranks:
        pytest.skip("deepspeed is not installed: `make .venv/.all`")
    case = FOUR.get(name) or GROUPS[name] | {"accumulation": 2}
    expected = alone(tmp_path, name, case | {"engine": None})
    for rank in four_ranks[name]:
        assert rank["is_sharded"]
        assert_same_training(rank, expected)


@pytest.mark.slow
def test_a_checkpoint_of_groups_goes_on_in_groups_and_on_one_rank(four_ranks):
    """To the last bit; on one rank to rounding, since gloo sums four in another order."""
    (alone,) = four_ranks["goes on alone"]
    for whole, resumed in zip(four_ranks["whole"], four_ranks["resumed"], strict=True):
        assert len(resumed["batches"]) == 7
        assert resumed["batches"] == whole["batches"][-7:]
        for found, atol in ((resumed, 0), (alone, 1e-5)):
            torch.testing.assert_close(found["parameters"], whole["parameters"], rtol=0, atol=atol)


@pytest.mark.slow
def test_each_of_two_ranks_saves_half_of_a_row_and_exchanges_heads_alone(tmp_path):
    whole, nothing = needs_of_step((str(tmp_path / "whole"), 1))
    assert not nothing
    cases = {"half": (str(tmp_path / "half"), 2)}
    found = on_ranks(needs_of_step, cases, tmp_path / "results")["half"]
    heads, key_heads, dim, layers = 4, 2, 8, 2
    # Queries, keys, values and outputs of 1,024 tokens in float32, and their gradients.
    tokens = 1024 * dim * 4
    expected = sorted([heads * tokens, key_heads * tokens] * 4 * layers)
    for half, exchanges in found:
        assert 0.45 * whole < half < 0.6 * whole
        assert sorted(sent for _, sent in exchanges if sent) == expected
        # DDP sums the gradients of a step, and sends buffers.
        others = {name for name, sent in exchanges if not sent}
        assert others == {"c10d.allreduce_.default", "c10d.broadcast_.default"}


@pytest.mark.slow
def test_classes_of_a_user_that_cannot_take_divided_rows_are_refused(tmp_path):
    found = on_ranks(words_of_refusals, {"words": str(tmp_path)}, tmp_path / "results")["words"]
    expected = ["start a multiple of 3", "Collator changes them", "virtual tokens"]
    expected += ["draws documents", "gives ranks"]
    # An error of one rank ends all of them.
    for rank, last in zip(found, ("timed out", "a mistake of one rank"), strict=True):
        for words, part in zip(rank, [*expected, last], strict=True):
            assert part in words
