"""The training log has loss, documents and tokens of each source, as they are alone.

The reference computes the loss of the documents of a source, one at a time. The learning rate is 0,
so all steps of an interval have the parameters of the reference.
"""

import itertools

import pytest
import torch
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import run as run_once
from helpers.by_hand import LOSSES, TOLERANCE, by_hand, trainer_for, weighted
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.shared_prefixes import build_model, forked_documents, one_shared_step
from helpers.tiny import documents_of_lengths
from helpers.tiny import tiny_model as small_model

SOURCES = ["web", "code", "web", "books", "code", "web", "web", "code"]
WEIGHTS = [1.0, 0.5, 3.0, 0.25, 2.0, 0.0, 1.5, 1.0]


def with_sources(documents, sources=SOURCES):
    return [d | {"source": sources[i % len(sources)]} for i, d in enumerate(documents)]


def num_trained(document):
    return sum(label != -100 for label in document["labels"][1:])


def by_source(model, documents, loss="nll", weighting="token"):
    """Return the metrics of each source, from its documents alone."""
    expected = {}
    for source in {d["source"] for d in documents}:
        own = [d for d in documents if d["source"] == source]
        expected |= {
            f"loss_{source}": by_hand(model, own, loss, weighting)[0],
            f"num_documents_{source}": len(own),
            f"num_tokens_{source}": sum(len(d["input_ids"]) for d in own),
            f"num_trained_tokens_{source}": sum(map(num_trained, own)),
        }
    return expected


def assert_reports(logs, expected, tolerance=TOLERANCE):
    for name, value in expected.items():
        assert logs[name] == pytest.approx(value, rel=tolerance), name


RUNS = {
    "accumulated": ("nll", {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    "padding-free, dft": ("dft", {"packing": False, "gradient_accumulation_steps": 2}),
    "document weights": ("nll", {"loss_weighting": "document"}),
    "weights, smoothed": ("smoothed", {"loss_weighting": "document"}),
    "static shapes, dft": ("dft", {"static_shapes": True}),
    "padded rows, smoothed": ("smoothed", {"attention": "padded"}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_reports_each_source_as_it_is_alone(name, tmp_path):
    model, documents = tiny_model("llama"), with_sources(tiny_documents())
    loss, settings = RUNS[name]
    weighting = settings.get("loss_weighting", "token")
    if weighting == "document":
        pairs = zip(weighted(documents), WEIGHTS, strict=True)
        documents = [d | {"loss_weight": w} for d, w in pairs]
    options = {"source_column": "source", **settings, **LOSSES[loss]}
    trainer = trainer_for(model, documents, tmp_path, **options)
    trainer.train()
    logs, totals = trainer.state.log_history[0], trainer.state.log_history[-1]
    expected = by_source(model, documents, loss, weighting)
    assert_reports(logs, expected)
    assert_reports(totals, {f"train_{name}": value for name, value in expected.items()})
    # The control: sources differ, and one document of another source is noticed.
    moved = [documents[0] | {"source": "code"}, *documents[1:]]
    with pytest.raises(AssertionError):
        assert_reports(logs, by_source(model, moved, loss, weighting))


def test_an_interval_is_a_mean_over_all_its_tokens(tmp_path):
    model, documents = tiny_model("llama"), with_sources(tiny_documents())
    trainer = trainer_for(
        model,
        documents,
        tmp_path,
        source_column="source",
        per_device_train_batch_size=2,
        packing=False,
        max_steps=4,
        logging_steps=4,
        eval_strategy="steps",
        eval_steps=1,
        evaluated=Dataset.from_list(documents[:3]),
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "num_tokens_web" in entry]
    assert len(logs) == 1
    assert_reports(logs[0], by_source(model, documents))


def test_losses_and_gradients_keep_every_bit(tmp_path):
    model, documents = tiny_model("llama"), with_sources(tiny_documents())
    apart = run_once(model, documents, tmp_path, source_column="source", max_length=80)
    plain = run_once(model, documents, tmp_path, max_length=80)
    assert apart[0] == plain[0]
    assert all(torch.equal(gradient, plain[1][name]) for name, gradient in apart[1].items())


@pytest.mark.parametrize("mode", ["bin", pytest.param("group", marks=pytest.mark.slow)])
@pytest.mark.parametrize("weighting", ["token", "document"])
def test_sources_share_the_positions_of_their_prefixes(mode, weighting, tmp_path):
    model = build_model("qwen3")
    documents = with_sources(forked_documents(weighted=weighting == "document"), "abc")
    options = {"prefix_sharing": mode, "loss_weighting": weighting, "source_column": "source"}
    step = one_shared_step(model, documents, tmp_path, **options)
    assert step.computed < 0.8 * step.tokens
    assert_reports(step.logs, by_source(model, documents, weighting=weighting))
    # Siblings of one prefix are of several sources, and train its positions.
    off = one_shared_step(model, documents, tmp_path, **options | {"source_column": None})
    assert (off.loss, off.computed) == (step.loss, step.computed)


def test_rows_that_are_packed_have_the_source_of_all_their_documents(tmp_path):
    model, documents = tiny_model("llama"), tiny_documents((20, 5, 11, 38, 12, 33, 3, 29))
    rows = [
        {key: [x for d in part for x in d[key]] for key in ("input_ids", "labels")}
        | {"seq_lengths": [len(d["input_ids"]) for d in part], "source": source}
        for part, source in ((documents[:4], "a"), (documents[4:], "b"))
    ]
    trainer = trainer_for(model, rows, tmp_path, source_column="source")
    trainer.train()
    expected = by_source(model, with_sources(documents, "aaaabbbb"))
    assert_reports(trainer.state.log_history[0], expected)


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ([0.5] * 8, "holds double"),
        (["web"] * 7 + [None], "row 7 of the training set has no 'source'"),
    ],
    ids=["floats", "null"],
)
def test_a_column_that_names_no_sources_is_warned_of(column, problem, tmp_path, caplog):
    rows = Dataset.from_list(tiny_documents()).add_column("source", column)
    trainer_for(tiny_model("llama"), rows, tmp_path, source_column="source").train()
    assert "the training log has no losses by source: " in caplog.text
    assert problem in caplog.text


# --- two ranks ------------------------------------------------------------------------------------

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
RANKS = {
    "accumulated": {"accumulation": 2},
    "document": {"packing": False, "batch_size": 2, "options": {"loss_weighting": "document"}},
}


def scenario(folder, **arguments):
    options = {"source_column": "source", "learning_rate": 0.0, **arguments.pop("options", {})}
    return Scenario(
        str(folder),
        LENGTHS,
        options=options,
        trained_sources=[SOURCES[i % 8] for i in range(len(LENGTHS))],
        **arguments,
    )


@pytest.mark.slow
def test_two_ranks_report_the_sources_of_both(tmp_path):
    scenarios = {name: scenario(tmp_path / name, **dict(made)) for name, made in RANKS.items()}
    for name, found in run_on_ranks(scenarios, tmp_path / "results").items():
        documents = with_sources(documents_of_lengths(LENGTHS, prompt=2, seed=0))
        weighting = RANKS[name].get("options", {}).get("loss_weighting", "token")
        expected = by_source(small_model("llama"), documents, weighting=weighting)
        assert_reports(found[0]["totals"], {f"train_{n}": v for n, v in expected.items()})
        steps = [entry for entry in found[0]["history"] if "step" in entry and "loss" in entry]
        for count in ("num_documents_web", "num_tokens_code", "num_trained_tokens_books"):
            assert sum(entry.get(count, 0) for entry in steps) == expected[count]


def test_a_resumed_run_goes_on_with_the_log_of_its_sources(tmp_path):
    arguments = {"epochs": 2, "save_steps": 2, "options": {"learning_rate": 0.02}}
    whole = run(scenario(tmp_path, **arguments))
    checkpoint = str(tmp_path / "checkpoint-2")
    resumed = run(scenario(tmp_path, resume=checkpoint, **arguments))

    def by_step(result):
        names = ("loss_web", "num_tokens_code", "num_documents_books")
        return {
            entry["step"]: {name: entry.get(name) for name in names}
            for entry in result["history"]
            if "num_tokens_web" in entry and entry["step"] > 2
        }

    assert by_step(whole) == by_step(resumed)
    assert len(by_step(whole)) > 2


# --- streams --------------------------------------------------------------------------------------


def stream_of(documents, shards=1):
    return Dataset.from_list(documents).to_iterable_dataset(shards)


def test_streams_of_a_dictionary_are_sources(tmp_path):
    model, documents = tiny_model("llama"), with_sources(tiny_documents(), "ab")
    parts = {name: [d for d in documents if d["source"] == name] for name in "ab"}
    trainer = trainer_for(
        model,
        {name: stream_of(part) for name, part in parts.items()},
        tmp_path,
        mixture={"a": {"weight": 1}, "b": {"weight": 1}},
        packing=False,
        per_device_train_batch_size=4,
    )
    drawn = list(itertools.islice(trainer.train_dataset, 4))
    trainer.train()
    drawn = [
        d | {"source": "ab"[d["input_ids"] in [b["input_ids"] for b in parts["b"]]]} for d in drawn
    ]
    assert_reports(trainer.state.log_history[0], by_source(model, drawn))


def test_the_sources_of_a_single_stream_are_not_told_apart_and_that_is_said(tmp_path, caplog):
    documents = with_sources(tiny_documents())
    trainer = trainer_for(
        tiny_model("llama"), stream_of(documents), tmp_path, source_column="source"
    )
    with caplog.at_level("WARNING"):
        trainer.train()
    assert "pass train_dataset as a dictionary of streams" in caplog.text
    assert not [name for name in trainer.state.log_history[0] if name.startswith("num_documents_")]
