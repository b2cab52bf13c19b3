"""The report says in numbers, and in words to read, what a run keeps, loses and is made of."""

import json

import pytest

from trl_packing.report import PackingReport, PreparationCounts

KEPT_ALL = PreparationCounts(documents_in=3, documents_out=3, tokens_in=9, tokens_out=9)
CUT = PreparationCounts(
    documents_in=1_200,
    documents_out=1_150,
    tokens_in=600_000,
    tokens_out=560_000,
    trained_in=400_000,
    trained_out=380_000,
    overlong=30,
    empty=2,
    untrained=50,
    policy="truncate",
    capacity=1024,
)
REPORT = PackingReport(
    documents=1_150,
    tokens=560_000,
    trained_tokens=380_000,
    capacity=1024,
    bins=548,
    micro_batches_per_epoch=138,
    steps_per_epoch=18,
    documents_per_step=1_150 / 18,
    ranks=2,
    accumulation=4,
    micro_batch="4 bins",
    attention="documents: torch SDPA, a call for each document (no CUDA device)",
    preparation=CUT,
)


def test_the_report_in_words():
    lines = str(REPORT).splitlines()
    width = max(map(len, lines))
    assert lines[0] == f"{' trl_packing ':─^{width}}"
    assert lines[-1] == "─" * width
    assert lines[1:-1] == [
        "documents    1,150 · 560,000 tokens · 380,000 trained (68%)",
        "packed into  548 bins of 1,024 tokens · 99.79% filled",
        "an epoch     138 micro-batches · 18 optimizer steps · 63.9 documents a step"
        " (2 ranks × 4 accumulated × 4 bins)",
        "attention    documents: torch SDPA, a call for each document (no CUDA device)",
        "             30 documents longer than max_length=1024: cut at the end",
        "             50 documents without a trained token: dropped (2 of them empty)",
        "             tokens lost: 40,000; trained tokens lost: 20,000",
        "             warning: 5.0% of the trained tokens are lost; raise max_length or set "
        "overflow='split'",
    ]


def test_the_report_as_json_holds_every_number():
    read = json.loads(REPORT.to_json())
    assert "\n" not in REPORT.to_json()
    assert read["bins"] == 548
    assert read.pop("utilization") == pytest.approx(0.99795, abs=1e-5)
    assert read["preparation"]["untrained"] == 50
    assert PreparationCounts(**read.pop("preparation")) == CUT
    assert PackingReport(**read, preparation=CUT) == REPORT


def test_nothing_is_said_where_nothing_was_lost():
    assert str(KEPT_ALL) == ""
    assert str(PreparationCounts()) == ""


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("truncate", "cut at the end"),
        ("truncate_start", "cut at the start"),
        ("truncate_prompt", "prompt cut at the start"),
        ("drop", "dropped"),
        ("split", "split into pieces"),
        ("wrapped", "cut where rows end"),
    ],
)
def test_every_policy_has_its_words(policy, words):
    counts = PreparationCounts(overlong=1, policy=policy, capacity=8)
    assert str(counts) == f"1 document longer than max_length=8: {words}"


def test_tokens_lost_are_named_where_no_document_was_too_long():
    """Wrapping cuts short documents too, and the first token of a piece is not trained."""
    counts = PreparationCounts(
        tokens_in=1_000,
        tokens_out=999,
        trained_in=900,
        trained_out=895,
        policy="wrapped",
        capacity=99,
    )
    assert str(counts) == "tokens lost: 1; trained tokens lost: 5"


def test_the_warning_begins_above_one_percent():
    one_percent = PreparationCounts(trained_in=1_000, trained_out=990)
    more = PreparationCounts(trained_in=1_000, trained_out=989)
    assert "warning" not in str(one_percent)
    assert "warning: 1.1% of the trained tokens are lost" in str(more)


def test_a_stream_is_reported_without_numbers():
    report = PackingReport(
        capacity=64, ranks=1, accumulation=1, micro_batch="2 bins", attention="model"
    )
    assert str(report).splitlines()[1:-1] == [
        "documents    a stream: counted as it is read",
        "micro-batch  2 bins",
        "attention    model",
    ]
