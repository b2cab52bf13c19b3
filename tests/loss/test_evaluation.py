"""`eval_loss` is one mean over the whole set, and `eval_loss_<source>` over a part of it.

The reference evaluates one document at a time, and only the documents of a source for its loss.
"""

import math

import pytest
from datasets import Dataset
from harness import alone, make_trainer
from helpers.by_hand import (
    DOCUMENT_WEIGHTS,
    LOSSES,
    SOURCES,
    TOLERANCE,
    assert_reports,
    unweighted,
    weighted,
)
from helpers.by_hand import OF_SOURCES as DOCUMENTS
from helpers.combinations import combined
from helpers.distributed.train import Scenario, run_on_ranks, token_weights
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing import PackedSFTConfig

MODES = ("token", "document", "sqrt")
EVALUATIONS = {
    "two rows a batch": {"per_device_eval_batch_size": 2},
    "not packed": {"eval_packing": False, "per_device_eval_batch_size": 3},
    "padded": {"padded": True, "per_device_eval_batch_size": 3},
}


def with_sources(documents):
    return [
        d | {"source": source, "loss_weight": weight}
        for d, source, weight in zip(documents, SOURCES, DOCUMENT_WEIGHTS, strict=False)
    ]


def evaluator(documents, folder, *, model="llama", padded=False, train=DOCUMENTS[:2], **options):
    def count_rows(prediction):
        return {"rows": len(prediction.label_ids)}

    data = Dataset.from_list(documents) if isinstance(documents, list) else documents
    counted = {"compute_metrics": count_rows} if padded else {}
    settings = {"max_length": 80, "per_device_eval_batch_size": 1} | options
    return make_trainer(folder, train, model, evaluated=data, arguments=counted, **settings)


def losses_by_hand(documents, loss="nll", mode="token", prefix="eval_"):
    """Return the metrics of `documents`, each source by its documents alone."""
    model = tiny_model("llama")
    expected = {f"{prefix}loss": alone(model, documents, loss, mode)[0]}
    for source in {d["source"] for d in documents}:
        own = [d for d in documents if d["source"] == source]
        expected[f"{prefix}loss_{source}"] = alone(model, own, loss, mode)[0]
        expected[f"{prefix}num_documents_{source}"] = len(own)
    return expected


# --- one mean over the set, and over each source --------------------------------------------------


BY_SOURCE = combined(EVALUATIONS, ["nll", "dft", "smoothed"], MODES)


@pytest.mark.parametrize(("evaluation", "loss", "mode"), BY_SOURCE)
def test_losses_by_source_are_those_of_its_documents_alone(evaluation, loss, mode, tmp_path):
    documents = with_sources(weighted(DOCUMENTS))
    options = {**EVALUATIONS[evaluation], **LOSSES[loss], "loss_weighting": mode}
    metrics = evaluator(documents, tmp_path, source_column="source", **options).evaluate()
    expected = losses_by_hand(documents, loss, mode)
    assert_reports(metrics, expected)
    assert metrics.get("eval_rows") == (8 if evaluation == "padded" else None)
    perplexity = {"eval_perplexity": math.exp(expected["eval_loss"])}
    assert ("eval_perplexity" in metrics) == (loss == "nll")
    assert_reports(metrics, perplexity if loss == "nll" else {}, 10 * TOLERANCE)
    # The control: the losses of sources differ, and weights are part of them.
    assert metrics["eval_loss_web"] != pytest.approx(metrics["eval_loss_books"], rel=1e-2)
    with pytest.raises(AssertionError):
        assert_reports(metrics, losses_by_hand(unweighted(documents), loss))


@pytest.mark.parametrize("padded", [True, False])
def test_a_stream_is_evaluated_as_configured(padded, tmp_path):
    documents = with_sources(weighted(DOCUMENTS))
    stream = Dataset.from_list(documents).to_iterable_dataset()
    metrics = evaluator(stream, tmp_path, padded=padded, loss_weighting="document").evaluate()
    expected = alone(tiny_model("llama"), documents, "nll", "document")[0]
    assert metrics["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)


def test_experts_leave_the_loss_of_evaluation_alone(tmp_path):
    """Their balance depends on what shares a batch: it is logged apart."""
    expected = alone(tiny_model("qwen3_moe"), DOCUMENTS)[0]
    trainer = evaluator(DOCUMENTS, tmp_path, model="qwen3_moe", router_aux_loss_coef=0.5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
    assert trainer.state.log_history[-1]["eval_aux_loss"] > 0


# --- sets, raw, prepared and packed ---------------------------------------------------------------


@pytest.mark.parametrize(("packing", "padded"), combined([True, False], [True, False]))
def test_raw_prepared_and_packed_sets_are_never_packed_twice(packing, padded, tmp_path):
    options = {"padded": padded, "packing": packing, "loss_weighting": "document"}
    trainer = evaluator(DOCUMENTS, tmp_path, **options)
    packed = Dataset.from_list(
        [
            {key: [x for d in part for x in d[key]] for key in ("input_ids", "labels")}
            | {"seq_lengths": [len(d["input_ids"]) for d in part]}
            for part in (DOCUMENTS[:4], DOCUMENTS[4:])
        ]
    )
    expected = alone(tiny_model("llama"), DOCUMENTS, "nll", "document")[0]
    for _ in range(2):
        for data in (None, Dataset.from_list(DOCUMENTS), trainer.eval_dataset, packed):
            if padded and data is packed:
                with pytest.raises(ValueError, match=r"were packed .* pass the documents"):
                    trainer.evaluate(data)
                continue
            metrics = trainer.evaluate(data)
            assert metrics["eval_loss"] == pytest.approx(expected, rel=TOLERANCE)
            assert metrics.get("eval_rows") == (8 if padded else None)


def test_a_dictionary_of_sets_is_exact_for_each(tmp_path):
    documents = with_sources(DOCUMENTS)
    parts = {"one": documents[:3], "two": documents[3:]}
    sets = {name: Dataset.from_list(part) for name, part in parts.items()}
    trainer = evaluator(sets, tmp_path, source_column="source", loss_weighting="document")
    metrics = trainer.evaluate()
    for name, part in parts.items():
        assert_reports(metrics, losses_by_hand(part, "nll", "document", prefix=f"eval_{name}_"))
    assert "eval_one_num_documents_books" not in metrics
    assert trainer.evaluate("two")["eval_loss_books"] == metrics["eval_two_loss_books"]


# --- two ranks ------------------------------------------------------------------------------------

LENGTHS = [9, 30, 5, 17, 23, 3, 28]  # seven documents do not divide
RANKS = {
    "packed": ({}, {}),
    "not packed": ({"loss_weighting": "sqrt", "eval_packing": False}, {"batch_size": 2}),
    "padded": ({"loss_weighting": "document"}, {"counts_correct": True, "batch_size": 3}),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    base = tmp_path_factory.mktemp("ranks")
    scenarios = {}
    columns = {"loss_weight": DOCUMENT_WEIGHTS, "source": SOURCES}
    rows = {"eval_lengths": LENGTHS, "columns": columns}
    rows |= {"lengths": [32, 20], "max_steps": 1, "weighted": True}
    for name, (options, others) in RANKS.items():
        given = {"options": options | {"source_column": "source"}, **rows, **others}
        scenarios[name] = Scenario(str(base / name), **given)
    return run_on_ranks(scenarios, base / "results")


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_evaluate_every_document_once(name, two_ranks):
    rows = documents_of_lengths(LENGTHS, prompt=2, seed=1)
    documents = with_sources([d | {"loss_weights": token_weights(d["input_ids"])} for d in rows])
    mode = RANKS[name][0].get("loss_weighting", "token")
    for rank in two_ranks[name]:
        assert_reports(rank["metrics"], losses_by_hand(documents, "nll", mode))
        if "padded" in name:
            assert rank["metrics"]["eval_rows"] == len(LENGTHS)
            assert rank["largest_targets"] == [max(d["labels"]) for d in documents]  # in order
    if mode != "token":
        with pytest.raises(AssertionError):
            assert_reports(two_ranks[name][0]["metrics"], losses_by_hand(documents))


# --- the sources of a set -------------------------------------------------------------------------


NO_SOURCES = [
    (None, "source_column='source'.*no such column: it has .*leave source_column out"),
    ([[1]] * 8, "holds list.*, not texts"),
    (["web", *[None] * 7], r"row 1 of an evaluation set .*null"),
    (range(1001), "1,001 different values"),
    ("stream", "a stream tells them only by being read"),
]


@pytest.mark.parametrize(("sources", "problem"), NO_SOURCES)
def test_columns_that_name_no_sources_are_refused(sources, problem, tmp_path):
    if sources in (None, "stream"):
        data = Dataset.from_list(DOCUMENTS)
        data = data.to_iterable_dataset() if sources else data
    else:
        data = Dataset.from_list([DOCUMENTS[0] | {"source": source} for source in sources])
    with pytest.raises(ValueError, match=problem):
        evaluator(data, tmp_path, source_column="source")


GREATER = [("eval_loss_gsm8k", False), ("eval_perplexity", False), ("eval_lossless", True)]


@pytest.mark.parametrize(("metric", "greater"), GREATER)
def test_the_best_model_has_the_smallest_loss_of_a_source_and_perplexity(tmp_path, metric, greater):
    options = {"use_cpu": True, "bf16": False, "metric_for_best_model": metric}
    assert PackedSFTConfig(str(tmp_path), **options).greater_is_better is greater
    told = PackedSFTConfig(str(tmp_path), greater_is_better=not greater, **options)
    assert told.greater_is_better is not greater
