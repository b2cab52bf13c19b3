"""The training log has loss, documents and tokens of each source, as they are alone.

The reference computes the loss of the documents of a source, one at a time. The learning rate is 0,
so all steps of an interval have the parameters of the reference.
"""

import itertools

import pytest
from datasets import Dataset
from harness import alone, run
from helpers.by_hand import (
    DOCUMENT_WEIGHTS,
    LOSSES,
    OF_SOURCES,
    SOURCES,
    assert_reports,
    weighted,
)
from helpers.shared_prefixes import forked_documents, one_shared_step
from helpers.tiny import tiny_model


def with_sources(documents, sources=SOURCES):
    return [d | {"source": sources[i % len(sources)]} for i, d in enumerate(documents)]


DOCUMENTS = with_sources(OF_SOURCES)


def by_source(documents, loss="nll", weighting="token", model=None):
    """Return the metrics of each source, from its documents alone."""
    expected = {}
    model = model or tiny_model("llama")
    for source in {d["source"] for d in documents}:
        own = [d for d in documents if d["source"] == source]
        labels = [label for d in own for label in d["labels"][1:]]
        expected |= {
            f"loss_{source}": alone(model, own, loss, weighting)[0],
            f"num_tokens_{source}": sum(len(d["input_ids"]) for d in own),
            f"num_trained_tokens_{source}": sum(label != -100 for label in labels),
        }
    return expected


def history(folder, documents, **options):
    return run(tiny_model("llama"), documents, folder, **options).trainer.state.log_history


RUNS = {
    "accumulated": ("nll", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    "padding-free, dft": ("dft", {"packing": False, "gradient_accumulation_steps": 2}),
    "weights, smoothed": ("smoothed", {"loss_weighting": "document"}),
    "padded rows": ("nll", {"attention": "padded"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_reports_each_source_as_it_is_alone(name, tmp_path):
    documents = DOCUMENTS
    (loss, settings) = RUNS[name]
    weighting = settings.get("loss_weighting", "token")
    if weighting == "document":
        pairs = zip(weighted(documents), DOCUMENT_WEIGHTS, strict=True)
        documents = [d | {"loss_weight": w} for d, w in pairs]
    logs, *_, totals = history(
        tmp_path, documents, source_column="source", **settings, **LOSSES[loss]
    )
    expected = by_source(documents, loss, weighting)
    assert_reports(logs, expected)
    assert_reports(totals, {f"train_{name}": value for name, value in expected.items()})
    # The control: sources differ, and one document of another source is noticed.
    moved = [documents[0] | {"source": "code"}, *documents[1:]]
    with pytest.raises(AssertionError):
        assert_reports(logs, by_source(moved, loss, weighting))


def test_an_interval_is_a_mean_over_all_its_tokens(tmp_path):
    options = {"per_device_train_batch_size": 2, "packing": False, "source_column": "source"}
    options |= {"max_steps": 4, "logging_steps": 4, "eval_strategy": "steps", "eval_steps": 1}
    found = history(tmp_path, DOCUMENTS, evaluated=Dataset.from_list(DOCUMENTS[:3]), **options)
    (logs,) = (entry for entry in found if "num_tokens_web" in entry)
    assert_reports(logs, by_source(DOCUMENTS))


@pytest.mark.parametrize("weighting", ["token", "document"])
def test_sources_share_the_positions_of_their_prefixes(weighting, tmp_path):
    model = tiny_model("qwen3")
    documents = with_sources(forked_documents(weighted=weighting == "document"), "abc")
    options = {"prefix_sharing": "bin", "loss_weighting": weighting, "source_column": "source"}
    step = one_shared_step(model, documents, tmp_path, **options)
    assert step.computed < 0.8 * step.tokens
    assert_reports(step.logs, by_source(documents, weighting=weighting, model=model))
    # Siblings of one prefix are of several sources, and train its positions.
    off = one_shared_step(model, documents, tmp_path, **options | {"source_column": None})
    assert (off.loss, off.computed) == (step.loss, step.computed)


UNKNOWN_SOURCES = [
    ([0.5] * 8, "in the training set it holds double"),
    (["web"] * 7 + [None], "row 7 of the training set has none"),
]


@pytest.mark.parametrize(("column", "said"), UNKNOWN_SOURCES)
def test_sources_that_cannot_be_told_apart_are_refused(column, said, tmp_path):
    rows = Dataset.from_list(DOCUMENTS).remove_columns("source").add_column("source", column)
    with pytest.raises(ValueError, match=said):
        history(tmp_path, rows, source_column="source")


def test_streams_of_a_dictionary_are_sources(tmp_path):
    documents = with_sources(DOCUMENTS, "ab")
    parts = {name: [d for d in documents if d["source"] == name] for name in "ab"}
    streams = {n: Dataset.from_list(part).to_iterable_dataset() for n, part in parts.items()}
    options = {"mixture": {name: {"weight": 1} for name in "ab"}, "packing": False}
    trainer = run(
        tiny_model("llama"), streams, tmp_path, per_device_train_batch_size=4, **options
    ).trainer
    drawn = itertools.islice(trainer.train_dataset, 4)
    ids_of_b = [d["input_ids"] for d in parts["b"]]
    drawn = [d | {"source": "ab"[d["input_ids"] in ids_of_b]} for d in drawn]
    assert_reports(trainer.state.log_history[0], by_source(drawn))
