"""The report says in numbers, and in words to read, what a run keeps, loses and is made of."""

import json
from dataclasses import asdict

import pytest

from trl_packing.data.counts import PreparationCounts, Stage, TokenCounts
from trl_packing.isolation.check import IsolationReport
from trl_packing.isolation.guard import Checked
from trl_packing.run.report import PackingReport

CUT = PreparationCounts(
    before=TokenCounts(1_200, 600_000, 400_000, 1_200),
    after=TokenCounts(1_150, 560_000, 380_000, 1_170),
    stages=(
        Stage(
            30,
            "longer than max_length=1024: cut at the end",
            TokenCounts(0, 38_000, 20_000, 30),
            lost_eos=30,
        ),
        Stage(50, "without a trained token: dropped", TokenCounts(50, 2_000)),
    ),
    notes=("3 of 1,150 documents (0.3%) end in no stop token",),
)
EVIDENCE = IsolationReport(
    "isolated", 0.0, 6.8e-4, 20.3, "short documents", "LlamaForCausalLM", "documents", "training"
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
    padded_documents_per_step=32,
    given_in_steps={"max_steps": 9},
    loss="mean over the trained tokens of a step, each with weight 1",
    room=4096,
    checked=Checked("isolated", "", EVIDENCE),
)


def test_the_report_in_words_and_as_json():
    words = " ".join(str(REPORT).split())
    for said in (
        "documents 1,150 · 560,000 tokens · 380,000 trained (68%)",
        "packed into 548 bins of 1,024 tokens · 99.79% filled",
        "an epoch 18 optimizer steps · 138 micro-batches · up to 4,096 tokens a micro-batch",
        "a step 63.9 documents · 21,111 trained tokens · 2 ranks × 4 accumulated × 4 bins",
        "if padded 36 steps an epoch, 32 documents each (documents_per_step=32 keeps that)",
        "max_steps=9 is 0.5 epochs here, 0.25 if padded",
        "checked isolated: differs by 0, rounding allows 3e-3, a leak would be 20",
        "30 documents longer than max_length=1024: cut at the end; lost 38,000 tokens, 20,000",
        "lost in all: 40,000 tokens, 20,000 trained, 30 stop tokens",
        "warning: 5.0% of the trained tokens are lost and 2.5% of the documents lost a stop token;",
        CUT.notes[0],
    ):
        assert said in words
    read = json.loads(REPORT.to_json())
    assert read.pop("utilization") == pytest.approx(0.99795, abs=1e-5)
    assert read == json.loads(json.dumps(asdict(REPORT)))
    assert PreparationCounts.from_json(read["preparation"]) == CUT


@pytest.mark.parametrize(("lost", "warns"), [(10, False), (11, True)])
@pytest.mark.parametrize("kind", ["trained tokens are lost", "documents lost a stop token"])
def test_the_warning_begins_above_one_percent(lost, warns, kind):
    tokens = 1_000 if "tokens are" in kind else 90_000
    before = TokenCounts(1_000, tokens, tokens, 1_000)
    lost_eos = lost * ("stop" in kind)
    cut = Stage(lost, "cut", TokenCounts(0, lost, lost, lost), lost_eos)
    counts = PreparationCounts(before, before - cut.lost, (cut,))
    sentence = f"warning: 1.1% of the {kind}; raise max_length"
    assert (sentence in str(counts)) == warns == ("warning" in str(counts))
