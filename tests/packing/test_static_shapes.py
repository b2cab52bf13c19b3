"""Every packed batch has one shape, which changes neither a loss nor a gradient, and one graph.

Tolerances, float32: a masked document at the end of the row moves no document, so kernels that go
by documents compute the same bits; those that go by rows (T×T masks, products of other widths) sum
in another order: a hundred roundings of 6e-8.
"""

import numpy as np
import pytest
import torch
from architectures import tiny_models as architectures
from datasets import Dataset
from harness import TWO_RUNS, make_trainer
from helpers.distributed.train import Scenario, assert_same_run, run_on_ranks
from helpers.drop_in import trained_losses
from helpers.tiny import documents_of_lengths, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from trl_packing import PackedCollator, other_rows
from trl_packing.attention.backends import resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.packing.collator import StaticShapes

TOLERANCE = 1e-5
SHAPES = StaticShapes(num_tokens=64, max_length=32, num_documents=8, longest_tail=32)


def collated(lengths, shapes=SHAPES, **options):
    return PackedCollator(pad_token_id=3, static_shapes=shapes, **options)(
        documents_of_lengths(lengths, prompt=1)
    )


# --- the batch ----------------------------------------------------------------------------------


rows_of_64 = st.lists(st.integers(1, 32), max_size=7).filter(lambda lengths: sum(lengths) <= 64)


@given(rows_of_64, st.sampled_from(["token", "document", "sqrt"]))
@settings(deadline=None)
def test_a_row_holds_its_documents_then_empty_ones_then_masked_ones(lengths, mode):
    shapes = StaticShapes(num_tokens=64, max_length=32, num_documents=16, longest_tail=20)
    batch = collated(lengths, shapes, loss_weighting=mode)
    assert batch["max_length_q"] == batch["max_length_k"] == 32
    found = batch["cu_seq_lens_q"].diff().tolist()
    tails = [n for n in found[len(lengths) :] if n]
    empty = 16 - len(lengths) - len(tails)
    assert empty >= 1, "the first one says where the padding begins"
    assert found == [*lengths, *[0] * empty, *tails]
    assert max(tails, default=0) <= 20
    row = collated(lengths, shapes, tensors_only=True).host
    assert row.lengths.tolist() == lengths, "without padding: what the trainer counts"
    assert row.boundaries.tolist() == batch["cu_seq_lens_q"].tolist()
    # All else is as if the masked documents were of the data set.
    masked = [{"input_ids": [3] * n, "labels": [-100] * n} for n in tails]
    plain = PackedCollator(loss_weighting=mode)(documents_of_lengths(lengths, prompt=1) + masked)
    assert plain.keys() == batch.keys()
    for name in plain.keys() & {"input_ids", "labels", "position_ids", "seq_idx", "loss_weights"}:
        torch.testing.assert_close(batch[name], plain[name], rtol=0, atol=0, msg=name)


def test_a_tail_beyond_the_rope_threshold_would_move_the_documents():
    """Longrope looks at the longest position of the row: 32 is where it changes."""
    model = architectures.tiny_model("phi3+longrope")
    install_attention(model, resolve_attention(model))
    short = [9, 20, 30]
    expected = logits_of(model, collated(short, None), sum(short))
    allowed = StaticShapes.for_model(model, 128, longest=64)
    beyond = StaticShapes(128, 64, 8, longest_tail=64)
    held, moved = (
        logits_of(model, collated(short, shapes), sum(short)) for shapes in (allowed, beyond)
    )
    torch.testing.assert_close(held, expected, rtol=0, atol=TOLERANCE)
    assert allowed.longest_tail == 32
    assert (moved - expected).abs().max() > 1e-2


LENGTHS = [9, 1, 20, 13]


def logits_of(model, batch, num_tokens):
    batch = {name: value for name, value in batch.items() if name != "labels"}
    batch["input_ids"] = batch["input_ids"] % model.config.vocab_size
    return model(**batch).logits[:, :num_tokens]


# --- a run --------------------------------------------------------------------------------------

MANY = [3 + (i * 11) % 29 for i in range(41)]
ON_TWO_RANKS = {
    "two ranks": {},
    "two ranks, one idle": {"lengths": [32, 32, 32]},
    "two ranks, a stream": {"stream": True, "max_steps": 6},
    # Evaluated first, which once left every rank to train by itself, compiled (transformers 5.23).
    "two ranks, compiled": {},
}
COMPILES = {"torch_compile": True, "torch_compile_backend": "aot_eager"}


@pytest.mark.slow
def test_two_ranks_with_static_shapes_end_where_they_end_without(tmp_path):
    made = {}
    plain = {"optim": "sgd", "learning_rate": 0.05}
    for name, arguments in ON_TWO_RANKS.items():
        held = plain | {"static_shapes": True} | (COMPILES if "compiled" in name else {})
        for kind, options in (("plain", plain), ("held", held)):
            run = {"lengths": MANY, "eval_lengths": MANY[:7], "options": options, **arguments}
            made[name, kind] = Scenario(str(tmp_path / name / kind), **run)
    results = run_on_ranks({" ".join(key): run for key, run in made.items()}, tmp_path / "results")
    for name in ON_TWO_RANKS:
        ranks = results[f"{name} held"]
        assert len({inputs["input_ids"].shape for rank in ranks for inputs in rank["inputs"]}) == 1
        for held, plain in zip(ranks, results[f"{name} plain"], strict=True):
            assert plain["steps"] == held["steps"] > 1
            assert_same_run(held, plain, TOLERANCE, "grad_norms")
            losses = [result["metrics"]["eval_loss"] for result in (plain, held)]
            assert losses[0] == pytest.approx(losses[1], rel=TWO_RUNS)


def trainer_for(folder, model="llama", lengths=MANY, **options):
    arguments = {"max_length": 32, "per_device_train_batch_size": 1, "static_shapes": True}
    arguments |= {"learning_rate": 1e-3, "logging_steps": 1, "gradient_checkpointing": False}
    data = Dataset.from_list(documents_of_lengths(MANY[:9], seed=1))
    rows = documents_of_lengths(lengths)
    return make_trainer(folder, rows, model, evaluated=data, **arguments | options)


def test_kernels_launch_blocks_for_the_longest_document_and_not_for_the_capacity(tmp_path):
    """FlashAttention-2 launches max_length / 128 blocks for each document, with tokens or not."""
    lengths = np.random.default_rng(0).integers(20, 120, 400).tolist()
    for batch in trainer_for(tmp_path, max_length=4096, lengths=lengths).get_train_dataloader():
        found = batch["cu_seq_lens_q"].diff()
        assert found.max() <= batch.host.max_length == max(lengths), "longer is not computed"
        launched = len(found)
        used = int((found > 0).sum())  # of one block each
        assert launched <= 4 * used
        assert launched * 4096 // 128 > 10 * used, "the control: with the capacity, most idle"


# --- torch.compile ------------------------------------------------------------------------------

# Documents of 5 to 60 tokens in bins of 128; 50 steps are 50 micro-batches of different documents.
COMPILED = {
    "lengths": np.random.default_rng(0).integers(5, 60, 260).tolist(),
    "max_length": 128,
    "max_steps": 50,
}
# Ours, and meant: the loss head scores the trained positions, whose number is another every batch.
MEANT_BREAK = "function _score at"


@pytest.fixture
def dynamo():
    """Return graphs compiled (forward graphs that reached the backend) and reasons for breaks."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda: (counters["stats"]["unique_graphs"], list(counters["graph_break"]))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.slow
def test_fifty_batches_share_one_graph_and_compute_the_same(tmp_path, dynamo):
    losses = trained_losses(
        trainer_for(tmp_path, gradient_checkpointing=True, **COMPILED, **COMPILES)
    )
    num_graphs, breaks = dynamo()
    assert num_graphs == 1
    assert len(breaks) == 1
    assert MEANT_BREAK in breaks[0]
    assert len(losses) == 50
    assert losses == pytest.approx(trained_losses(trainer_for(tmp_path, **COMPILED)), abs=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_model_has_one_graph_without_a_break(name, dynamo):
    model = tiny_model(name)
    rng = np.random.default_rng(1)
    shapes = StaticShapes(128, 128, 16, 128)
    install_attention(model, resolve_attention(model))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for number in range(50):
        lengths = rng.multinomial(128, rng.dirichlet([1] * rng.integers(2, 9)))
        rows = documents_of_lengths(lengths[lengths > 0][:-1], seed=number)
        batch = PackedCollator(static_shapes=shapes)(rows)
        del batch["labels"]
        with torch.no_grad():
            found, expected = compiled(**batch).logits, model(**batch).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert dynamo()[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_graph_of_packed_calls_serves_no_other(name, dynamo):
    """The shape of a packed row, without a mask: only boundaries tell the two apart."""
    model = tiny_model(name).eval()
    install_attention(model, resolve_attention(model))
    compiled = torch.compile(model, backend="eager")
    packed = collated(LENGTHS)
    del packed["labels"]
    row = {"input_ids": packed["input_ids"], "use_cache": False}
    left_padded = row | {"attention_mask": torch.tensor([[0] * 9 + [1] * 55])}
    calls = [packed, row, packed, left_padded, packed]
    with torch.no_grad(), other_rows():  # else the row's tokens are known, and kept apart
        expected = [model(**call).logits for call in calls]
        for call, logits in zip(calls, expected, strict=True):
            got = compiled(**call).logits[:, 9:]
            torch.testing.assert_close(got, logits[:, 9:], rtol=0, atol=TOLERANCE)
        assert (expected[0] - expected[1]).abs().max() > 0.1, "documents that see each other"
