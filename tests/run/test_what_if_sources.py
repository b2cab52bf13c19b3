"""A run on several data sets is shown as it is trained: rows, documents, sources, steps."""

import json

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.prepared import call_for
from helpers.runs import (
    PackedEpoch,
    documents_by_trl,
    plan_page,
    plan_run,
    preview_epoch,
    preview_rows,
    run_of_call,
)
from helpers.tiny import documents_of_lengths, tiny_dataset, tiny_tokenizer

FORMS = ("language_modeling", "prompt_completion", "conversational_prompt_completion")
MIXTURE = {"prompt_completion": {"epochs": 2.5}, "language_modeling": {"weight": 1}}


def run_of(sets, **more):
    return run_of_call(call_for(sets, tokenizer=tiny_tokenizer(chat=True), **more))


def forms() -> dict[str, Dataset]:
    return {name: tiny_dataset(name, 12) for name in FORMS}


def test_the_report_is_that_of_the_trainer(tmp_path):
    shown = preview_epoch(run_of(forms(), mixture=MIXTURE))
    options = {"max_length": 64, "mixture": MIXTURE, "tokenizer": tiny_tokenizer(chat=True)}
    trainer = make_trainer(tmp_path, forms(), **options)
    trained = json.loads(trainer.packing_report.to_json())
    found = json.loads(shown.to_json())
    for name in ("documents", "tokens", "trained_tokens", "bins", "sources", "steps_per_epoch"):
        assert found[name] == trained[name]
    assert [source["drawn"] for source in found["sources"]] == [12, 12, 30]


def test_rows_are_numbered_through_and_shown_as_of_their_source():
    run = run_of(forms())
    shown = [row.tokens[0]["labels"] for row in preview_rows(run, [5, 12 + 5, 24 + 5])]
    for labels, (name, rows) in zip(shown, forms().items(), strict=True):
        (alone,) = preview_rows(run_of(rows), [5])
        assert list(labels) == list(alone.tokens[0]["labels"]), name
    with pytest.raises(ValueError, match="row 36 is not among the 36 rows"):
        list(preview_rows(run, [36]))


def test_the_rows_of_an_epoch_come_from_their_data_sets():
    epoch = PackedEpoch.of(run_of(forms()))
    assert sorted(epoch.traced.rows) == list(range(36))
    with pytest.raises(ValueError, match="that an epoch packs once"):
        PackedEpoch.of(run_of(forms(), mixture=MIXTURE))
    with pytest.raises(ValueError, match="compare data sets one by one"):
        documents_by_trl(run_of(forms()))


def test_the_page_shows_what_an_epoch_draws_of_each_source():
    rows = documents_of_lengths([5 + i % 11 for i in range(300)])
    sets = {"large": Dataset.from_list(rows[:250]), "small": Dataset.from_list(rows[250:])}
    options = {"mixture": {"small": {"epochs": 2.5}}, "documents_per_step": 15}
    plan = plan_run(run_of(sets, **options))
    page = plan_page(plan)
    for text in ("<h2>Sources", "large", "small", "2.5×", "375", "documents of 300 drawn"):
        assert text in page


def test_streams_are_shown_by_their_first_rows():
    streams = {name: rows.to_iterable_dataset() for name, rows in forms().items()}
    weights = {name: {"weight": 1} for name in FORMS}
    run = run_of(streams, mixture=weights, max_steps=1)
    assert run.is_stream
    assert run.num_rows == 36
    assert preview_epoch(run).documents == 36
