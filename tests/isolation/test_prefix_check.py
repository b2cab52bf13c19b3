"""The check of shared prefixes finds a fault at either end of a long branch, and in gradients."""

import numpy as np
import pytest
from helpers.packed_models import install
from helpers.shared_prefixes import spoil_trees
from helpers.tiny import tiny_model

from trl_packing import PackedCollator
from trl_packing.attention import document_sdpa as tiles
from trl_packing.isolation.check import check_prefixes

DOCUMENT = np.random.default_rng(0).integers(6, 300, 400)


def check(name="mistral", document=DOCUMENT, **options):
    """Check a model with a window of 8 tokens in two layers: 14 tokens behind the fork see it."""
    model = install(tiny_model(name), "documents")
    return check_prefixes(model, [document], collator=PackedCollator(), training=True, **options)


def spoil_positions(monkeypatch, first: int, last: int) -> None:
    """Count positions wrongly in tokens ``[first, last)`` of the long branches only."""

    def change(tree):
        positions = tree.position_ids.copy()
        behind = positions - len(DOCUMENT) // 2
        if len(positions) > len(DOCUMENT):
            positions[(behind >= first) & (behind < last)] += 5
        return {"position_ids": positions}

    spoil_trees(monkeypatch, change)


@pytest.mark.parametrize("name", ["mistral", "llama"])
def test_a_model_that_shares_passes_with_its_gradients(name):
    report = check(name, gradients=True)
    assert report, report
    assert report.gradient_difference < 1e-5
    assert report.attention


def test_rows_of_the_check_fit_into_learned_positions():
    assert check("gpt2", np.resize(DOCUMENT, 512))


@pytest.mark.parametrize(("first", "last"), [(2, 6), (190, 200)])
def test_a_fault_at_either_end_of_a_long_branch_is_found(first, last, monkeypatch):
    spoil_positions(monkeypatch, first, last)
    report = check()
    assert report.verdict == "leaks"
    assert report.probe == "documents that share 200 tokens"


def test_a_fault_in_the_backward_alone_is_found_in_the_gradients(monkeypatch):
    """The control: the outputs are right, and so is the verdict on them."""
    backward = tiles.backward_tile

    def halved(*args):
        tile = args[6]
        return tuple(x / 2 if tile.merges else x for x in backward(*args))

    monkeypatch.setattr(tiles, "backward_tile", halved)
    report = check("llama", gradients=True)
    assert report
    assert report.gradient_difference > 1e-3
