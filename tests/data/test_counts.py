"""The report says in words to read what preparation keeps and loses."""

import pytest

from trl_packing.data.counts import PreparationCounts, Stage, TokenCounts

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


def test_the_counts_in_words_add_up_the_losses_of_their_stages():
    words = " ".join(str(CUT).split())
    for said in (
        "30 documents longer than max_length=1024: cut at the end; lost 38,000 tokens, 20,000",
        "lost in all: 40,000 tokens, 20,000 trained, 30 stop tokens",
        "warning: 5.0% of the trained tokens are lost and 2.5% of the documents lost a stop token;",
        CUT.notes[0],
    ):
        assert said in words


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
