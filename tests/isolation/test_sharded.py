"""The isolation check on wrapped models, two gloo ranks: DDP, and FSDP2's sharded parameters."""

import time

import pytest
from helpers.distributed.isolation import CASES, WRAPPERS, all_found, one_raises
from helpers.distributed.ranks import on_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The finding of each rank, by wrapper, model and backend."""
    return on_ranks(all_found, {"": None}, tmp_path_factory.mktemp("isolation"))[""]


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_passes_isolated_documents_and_sees_a_leak(wrapper, case, found):
    for rank in found:
        verdict = rank[f"{wrapper} {case}"]
        assert verdict["verdict"] == ("leaks" if case == "rwkv model" else "isolated")
        assert verdict["buffers_kept"]


@pytest.mark.slow
def test_states_in_one_row_gather_weights_once(found):
    for rank in found:
        collectives = {case: rank[f"FSDP2 {case}"]["collectives"] for case in CASES}
        # As many layers as a Llama, and the same groups of weights.
        assert 0 < collectives["mamba documents"] == collectives["llama documents"]
        assert collectives["mamba padded"] > 2 * collectives["mamba documents"]


@pytest.mark.slow
def test_a_rank_that_raises_in_the_check_is_heard_by_the_others(tmp_path):
    """No rank waits in a forward of its own: all of them take the next backend."""
    found = on_ranks(one_raises, {"": ("DDP", str(tmp_path))}, tmp_path)
    assert found[""] == ["model", "model"]


@pytest.mark.slow
def test_a_rank_that_raises_in_the_check_of_a_sharded_model_ends_the_run(tmp_path):
    """The others hang in a forward that gathers weights, until the timeout of their group."""
    start = time.monotonic()
    with pytest.raises(AssertionError):
        on_ranks(one_raises, {"": ("FSDP2", str(tmp_path))}, tmp_path)
    assert time.monotonic() - start < 120
    said = (tmp_path / "FSDP21").read_text()
    assert "a mistake of one rank" in said
    assert "the others do not answer" in said
