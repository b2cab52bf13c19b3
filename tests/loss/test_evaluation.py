"""`eval_loss` is one mean over the whole set, and `eval_loss_<source>` over a part of it.

The reference evaluates one document at a time, and only the documents of a source for its loss.
"""

import math

import pytest
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from helpers.by_hand import (
    LOSSES,
    TOLERANCE,
    by_hand,
    trainer_for,
    unweighted,
    weighted,
)
from helpers.combinations import combined
from helpers.distributed.train import Scenario, run_on_ranks, token_weights
from helpers.tiny import documents_of_lengths
from helpers.tiny import tiny_model as small_model

from trl_packing import PackedSFTConfig
from trl_packing.loss.sums import Sources

MODES = ("token", "document", "sqrt")
SOURCES = ["web", "code", "web", "books", "code", "web", "web", "code"]
DOCUMENT_WEIGHTS = [1.0, 0.5, 3.0, 0.25, 2.0, 0.0, 1.5, 1.0]
EVALUATIONS = {
    "packed": {},
    "two rows a batch": {"per_device_eval_batch_size": 2},
    "not packed": {"eval_packing": False, "per_device_eval_batch_size": 3},
    "padded": {"padded": True, "per_device_eval_batch_size": 3},
}


def with_sources(documents, weights=DOCUMENT_WEIGHTS):
    return [
        d | {"source": source, "loss_weight": weight}
        for d, source, weight in zip(documents, SOURCES, weights, strict=False)
    ]


def count_rows(prediction):
    return {"rows": len(prediction.label_ids)}


def evaluator(model, documents, folder, *, padded=False, train=None, **options):
    data = documents if not isinstance(documents, list) else Dataset.from_list(documents)
    return trainer_for(
        model,
        train or tiny_documents((5, 9)),
        folder,
        evaluated=data,
        arguments={"compute_metrics": count_rows} if padded else {},
        **{"per_device_eval_batch_size": 1, **options},
    )


def losses_by_hand(model, documents, loss="nll", mode="token"):
    """Return the metrics of `documents`, each source by its documents alone."""
    expected = {"eval_loss": by_hand(model, documents, loss, mode)[0]}
    for source in {d["source"] for d in documents}:
        own = [d for d in documents if d["source"] == source]
        expected[f"eval_loss_{source}"] = by_hand(model, own, loss, mode)[0]
        expected[f"eval_num_documents_{source}"] = len(own)
    return expected


def assert_reports(metrics, expected, tolerance=TOLERANCE):
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance), name


# --- one mean over the set, and over each source --------------------------------------------------


@pytest.mark.parametrize(
    ("evaluation", "loss", "mode"), combined(EVALUATIONS, ["nll", "dft", "smoothed"], MODES)
)
def test_losses_by_source_are_those_of_its_documents_alone(evaluation, loss, mode, tmp_path):
    model, documents = tiny_model("llama"), with_sources(weighted(tiny_documents()))
    options = {**EVALUATIONS[evaluation], **LOSSES[loss], "loss_weighting": mode}
    trainer = evaluator(model, documents, tmp_path, source_column="source", **options)
    metrics = trainer.evaluate()
    expected = losses_by_hand(model, documents, loss, mode)
    assert_reports(metrics, expected)
    assert metrics.get("eval_rows") == (8 if evaluation == "padded" else None)
    perplexity = {"eval_perplexity": math.exp(expected["eval_loss"])}
    assert ("eval_perplexity" in metrics) == (loss == "nll")
    assert_reports(metrics, perplexity if loss == "nll" else {}, 10 * TOLERANCE)
    # The control: the losses of sources differ, and weights are part of them.
    assert metrics["eval_loss_web"] != pytest.approx(metrics["eval_loss_books"], rel=1e-2)
    with pytest.raises(AssertionError):
        assert_reports(metrics, losses_by_hand(model, unweighted(documents), loss))


@pytest.mark.parametrize(("mode", "padded"), combined(MODES, [True, False]))
def test_a_stream_is_evaluated_as_configured(mode, padded, tmp_path):
    model, documents = tiny_model("llama"), with_sources(weighted(tiny_documents()))
    stream = Dataset.from_list(documents).to_iterable_dataset()
    metrics = evaluator(model, stream, tmp_path, padded=padded, loss_weighting=mode).evaluate()
    expected = by_hand(model, documents, "nll", mode)[0]
    assert metrics["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)


def test_experts_leave_the_loss_of_evaluation_alone(tmp_path):
    """Their balance depends on what shares a batch: it is logged apart."""
    model, documents = tiny_model("mixtral"), tiny_documents()
    options = {"router_aux_loss_coef": 0.5, "max_steps": 1}
    found = []
    for evaluation in ("packed", "not packed"):
        trainer = evaluator(model, documents, tmp_path, **options, **EVALUATIONS[evaluation])
        found.append(trainer.evaluate()["eval_loss"])
        assert trainer.state.log_history[-1]["eval_aux_loss"] > 0
        assert trainer.router_aux_loss_coef == 0.5
    assert found == pytest.approx([by_hand(model, documents)[0]] * 2, rel=TOLERANCE)


# --- sets, raw, prepared and packed ---------------------------------------------------------------


def rows_of(documents):
    """Return two packed rows of four documents each."""
    return [
        {key: [x for d in part for x in d[key]] for key in ("input_ids", "labels")}
        | {"seq_lengths": [len(d["input_ids"]) for d in part]}
        for part in (documents[:4], documents[4:])
    ]


@pytest.mark.parametrize(
    ("packing", "padded", "mode"), combined([True, False], [True, False], ["token", "document"])
)
def test_raw_prepared_and_packed_sets_are_never_packed_twice(packing, padded, mode, tmp_path):
    model, documents = tiny_model("llama"), tiny_documents((20, 5, 11, 38, 12, 33, 3, 29))
    options = {"padded": padded, "packing": packing, "loss_weighting": mode}
    trainer = evaluator(model, documents, tmp_path, **options)
    packed = Dataset.from_list(rows_of(documents))
    raw = Dataset.from_list(documents)
    expected = by_hand(model, documents, "nll", mode)[0]
    for _ in range(2):
        for data in (None, raw, trainer.eval_dataset, packed):
            metrics = trainer.evaluate(data)
            assert metrics["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
            assert metrics.get("eval_rows") == (8 if padded else None)
    assert len(trainer.eval_dataset) == 8
    assert len(packed) == 2


@pytest.mark.parametrize("mode", ["token", "document"])
def test_a_dictionary_of_sets_is_exact_for_each(mode, tmp_path):
    model, documents = tiny_model("llama"), with_sources(tiny_documents())
    parts = {"one": documents[:3], "two": documents[3:]}
    sets = {name: Dataset.from_list(part) for name, part in parts.items()}
    options = {"source_column": "source", "loss_weighting": mode}
    trainer = evaluator(model, sets, tmp_path, **options)
    metrics = trainer.evaluate()
    for name, part in parts.items():
        expected = losses_by_hand(model, part, "nll", mode)
        expected = {k.replace("eval_", f"eval_{name}_"): v for k, v in expected.items()}
        assert_reports(metrics, expected)
    assert "eval_one_num_documents_books" not in metrics
    assert trainer.evaluate("two")["eval_loss_books"] == metrics["eval_two_loss_books"]


# --- two ranks ------------------------------------------------------------------------------------

LENGTHS = [9, 30, 5, 17, 23, 3, 28]  # seven documents do not divide
RANKS = {
    "packed": {},
    "not packed": {"options": {"eval_packing": False}, "batch_size": 2},
    "document": {"options": {"loss_weighting": "document"}},
    "sqrt, not packed": {"options": {"loss_weighting": "sqrt", "eval_packing": False}},
    "padded": {"counts_correct": True, "batch_size": 2},
    "document, padded": {
        "options": {"loss_weighting": "document"},
        "counts_correct": True,
        "batch_size": 3,
    },
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    scenarios = {
        name: Scenario(
            str(base / name),
            **arguments | {"options": {"source_column": "source", **arguments.get("options", {})}},
            lengths=[32, 20],
            max_steps=1,
            weighted=True,
            eval_lengths=LENGTHS,
            sources=SOURCES,
            document_weights=DOCUMENT_WEIGHTS,
        )
        for name, arguments in RANKS.items()
    }
    return run_on_ranks(scenarios, base / "results")


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_evaluate_every_document_once(name, two_ranks):
    rows = documents_of_lengths(LENGTHS, prompt=2, seed=1)
    documents = with_sources([d | {"loss_weights": token_weights(d["input_ids"])} for d in rows])
    mode = RANKS[name].get("options", {}).get("loss_weighting", "token")
    expected = losses_by_hand(small_model("llama"), documents, "nll", mode)
    for rank in two_ranks[name]:
        assert_reports(rank["metrics"], expected)
        if RANKS[name].get("counts_correct"):
            assert rank["metrics"]["eval_rows"] == len(LENGTHS)
            in_order = [max(d["labels"]) for d in documents]
            assert rank["largest_targets"] == in_order
    if mode != "token":
        plain = losses_by_hand(small_model("llama"), documents)
        with pytest.raises(AssertionError):
            assert_reports(two_ranks[name][0]["metrics"], plain)


# --- the sources of a set -------------------------------------------------------------------------


def test_sources_are_named_in_order_and_only_those_that_are_left():
    dataset = Dataset.from_list([{"source": s} for s in ("web", "code", "books", "web")])
    sources = Sources.of(dataset, "source")
    assert sources.names == ("books", "code", "web")
    assert sources.ids.tolist() == [2, 1, 0, 2]
    assert sources.num_documents.tolist() == [1, 1, 2]
    chosen = Sources.of(dataset.select([3, 1]), "source")
    assert (chosen.names, chosen.ids.tolist()) == (("code", "web"), [1, 0])


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([{"origin": "web"}], "has no such column: it has .*'origin'.*leave source_column out"),
        ([{"source": 0.5}], "holds double, but sources are texts or whole numbers"),
        ([{"source": [1]}], "holds list.*, but sources are texts"),
        ([{"source": "web"}, {"source": None}], r"row 1 of an evaluation set has no 'source'"),
        ([{"source": i} for i in range(1001)], "1,001 different values"),
    ],
    ids=["missing", "floats", "lists", "null", "ids"],
)
def test_columns_that_name_no_sources_are_refused(rows, problem):
    with pytest.raises(ValueError, match=problem):
        Sources.of(Dataset.from_list(rows), "source")


def test_a_missing_source_column_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="source_column='origin', but an evaluation set has no"):
        evaluator(tiny_model("llama"), tiny_documents(), tmp_path, source_column="origin")


def test_the_sources_of_a_stream_are_refused(tmp_path):
    stream = Dataset.from_list(with_sources(tiny_documents())).to_iterable_dataset()
    with pytest.raises(ValueError, match="a stream tells them only by being read; load"):
        evaluator(tiny_model("llama"), stream, tmp_path, source_column="source")


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval_loss", False),
        ("eval_loss_gsm8k", False),
        ("loss_gsm8k", False),
        ("eval_perplexity", False),
        ("eval_short_loss_gsm8k", False),
        ("eval_accuracy", True),
        ("eval_lossless", True),
    ],
)
def test_the_best_model_has_the_smallest_loss_of_a_source_and_perplexity(tmp_path, metric, greater):
    options = {"use_cpu": True, "bf16": False, "metric_for_best_model": metric}
    assert PackedSFTConfig(str(tmp_path), **options).greater_is_better is greater
    told = PackedSFTConfig(str(tmp_path), greater_is_better=not greater, **options)
    assert told.greater_is_better is not greater
