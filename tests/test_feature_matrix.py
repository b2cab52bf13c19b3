"""docs/feature-matrix.md says what the code does: each refusal is raised, the rest trains."""

import re
import warnings
from itertools import combinations

import pytest
from helpers.feature_matrix import (
    BY_NAME,
    FEATURES,
    PAGE,
    Feature,
    Outcome,
    are_alternatives,
    marks_on,
    outcome,
    page,
    refusals_on,
)

TEXT = PAGE.read_text(encoding="utf-8")
MARKS, REFUSALS = marks_on(TEXT), refusals_on(TEXT)
PAIRS = [(a.name, b.name) for a, b in combinations(FEATURES, 2)]


def of(pair: tuple[str, str], *, trains: bool) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each feature is tested without them elsewhere
        return outcome(*(BY_NAME[name] for name in pair), trains=trains)


def facts_of(sentence: str) -> set[str]:
    """Return what a refusal says: names in code, those of settings with values, and the way out."""
    named = re.findall(r"\w+=[^\s;,]+|\b[a-z]+(?:_[a-z]+)+\b(?!=)|\bcollator\b", sentence)
    return {*named, *re.findall(r"; (\w+) ", sentence)}


def test_the_page_is_what_the_helper_writes():
    outcomes = {pair: Outcome(MARKS[pair], REFUSALS.get(pair, "")) for pair in PAIRS}
    assert page(outcomes) == TEXT


def test_every_pair_has_a_mark_and_every_refusal_its_sentence():
    assert set(MARKS) == set(PAIRS)
    assert set(MARKS.values()) <= set("✓AT✗–")
    assert set(REFUSALS) == {pair for pair, mark in MARKS.items() if mark == "✗"}
    assert len(REFUSALS) >= 5, "the page knows no refusals"
    assert all(map(facts_of, REFUSALS.values()))
    for (a, b), mark in MARKS.items():
        assert (mark == "–") == are_alternatives(BY_NAME[a], BY_NAME[b])


@pytest.mark.parametrize("pair", REFUSALS, ids=" + ".join)
def test_a_refused_pair_is_refused_before_training_and_says_why(pair):
    found = of(pair, trains=False)
    assert (found.mark, facts_of(found.sentence)) == ("✗", facts_of(REFUSALS[pair]))


def test_a_refusal_of_another_setting_value_or_way_out_says_something_else():
    """The control; other words around them say the same."""
    said = "curriculum='length' and prefix_sharing='group' exclude each other; leave one out"
    assert facts_of(said) == {"curriculum='length'", "prefix_sharing='group'", "leave"}
    assert facts_of(said.replace("exclude each other", "do not go together")) == facts_of(said)
    for old, new in (("curriculum", "mixture"), ("'group'", "'bin'"), ("leave", "drop")):
        assert facts_of(said.replace(old, new)) != facts_of(said)


@pytest.mark.slow
@pytest.mark.parametrize("first", FEATURES, ids=lambda feature: feature.name)
def test_the_other_pairs_train(first: Feature):
    pairs = [pair for pair, mark in MARKS.items() if pair[0] == first.name and mark in "✓AT"]
    assert {pair: of(pair, trains=True).mark for pair in pairs} == {p: MARKS[p] for p in pairs}
