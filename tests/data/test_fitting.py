"""Documents that are too long follow the overflow policy, and whatever is lost is counted."""

from dataclasses import replace
from itertools import islice

import pyarrow as pa
import pytest
from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets
from helpers.streams import stream_of
from helpers.tiny import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data.counts import PreparationCounts, Stage, TokenCounts
from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.stop_tokens import EosRule
from trl_packing.data.stream import fit_stream, take_counts

POLICIES = ["truncate", "truncate_start", "truncate_prompt", "drop", "split", "overlap", "wrapped"]


def document(first: int, length: int, prompt: int = 0) -> dict:
    """Tokens first, first + 1, …; the first `prompt` of them are not trained."""
    ids = list(range(first, first + length))
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


# Documents 10…, 20…, 30… of 3, 6 and 4 tokens; the second one has a prompt of 4.
THREE = [document(10, 3), document(20, 6, prompt=4), document(30, 4)]


def fit(rows, policy: str, capacity: int | None = 4, stop_ids=()):
    """Return the documents that come out as (ids, labels with . for untrained), and the counts."""
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    fitted, counts = fit_and_count(dataset, Overflow(policy, capacity), stop_ids=stop_ids)
    return words(fitted.with_format(None)), counts


def words(rows) -> list[tuple[str, str]]:
    return [
        (
            " ".join(map(str, row["input_ids"])),
            " ".join("." if label == -100 else str(label) for label in row["labels"]),
        )
        for row in rows
    ]


@st.composite
def data_sets(draw):
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=12))
    rows = [document(100 * i, n, draw(st.integers(0, n))) for i, n in enumerate(lengths, start=1)]
    return [document(0, 3), *rows]  # always something to train


# --- policies, by hand ----------------------------------------------------------------------------

# Trained tokens are 2 + 2 + 3 before: the first token of a document never is one. 12 and 25 are
# stop tokens, and 20 would be one if it were trained. Amounts: documents, tokens, trained, stops.
STOPS = {12, 25, 20}
BEFORE = TokenCounts(3, 13, 7, 2)
FIRST, LAST = ("10 11 12", "10 11 12"), ("30 31 32 33", "30 31 32 33")
LEFT = "with no trained token left: dropped"


def cut(how: str, *lost: int, lost_eos: int = 0, **more) -> Stage:
    why = f"longer than max_length=4: {how}"
    return Stage(1, why, TokenCounts(*lost), lost_eos, **more)


# Documents, what is left, and the stages.
BY_HAND = {
    # The second document keeps its prompt only, so it goes.
    "truncate": (
        [FIRST, LAST],
        TokenCounts(2, 7, 5, 1),
        cut("cut at the end", 0, 2, 2, 1, lost_eos=1),
        Stage(1, LEFT, TokenCounts(1, 4, 0, 0), is_untrained=True),
    ),
    "truncate_start": (
        [FIRST, ("22 23 24 25", ". . 24 25"), LAST],
        TokenCounts(3, 11, 7, 2),
        cut("cut at the start", 0, 2),
    ),
    "truncate_prompt": (
        [FIRST, ("22 23 24 25", ". . 24 25"), LAST],
        TokenCounts(3, 11, 7, 2),
        cut("prompt cut at the start", 0, 2),
    ),
    "drop": ([FIRST, LAST], TokenCounts(2, 7, 5, 1), cut("dropped", 1, 6, 2, 1, lost_eos=1)),
    # 20 21 22 23 | 24 25: the first piece has nothing to train; 24 begins a piece: no target.
    "split": (
        [FIRST, ("24 25", "24 25"), LAST],
        TokenCounts(3, 9, 6, 2),
        cut("split into pieces", -1, 0, 1),
        Stage(1, LEFT, TokenCounts(1, 4), is_untrained=True),
    ),
    # 20 21 22 23 | 23 24 25: the token before 24 is context, so 24 stays a target.
    "overlap": (
        [FIRST, ("23 24 25", ". 24 25"), LAST],
        TokenCounts(3, 10, 7, 2),
        cut("split into pieces that overlap", -1, -1, repeated=1),
        Stage(1, LEFT, TokenCounts(1, 4), is_untrained=True),
    ),
    # 10 11 12 20 | 21 22 23 24 | 25 30 31 32 | 33: 20, 25 and 33 stand alone in their pieces.
    "wrapped": (
        [FIRST, ("21 22 23 24", ". . . 24"), ("30 31 32", "30 31 32")],
        TokenCounts(3, 10, 5, 1),
        Stage(2, "cut where rows of max_length=4 end", TokenCounts(-3, 0, 2, 1), 1),
        Stage(3, LEFT, TokenCounts(3, 3), is_untrained=True),
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_documents_and_the_losses_written_here(policy):
    documents, after, *stages = BY_HAND[policy]
    expected = PreparationCounts(BEFORE, after, tuple(stages))
    assert fit(THREE, policy, stop_ids=STOPS) == (documents, expected)


def test_a_completion_that_does_not_fit_behind_its_prompt_is_cut_at_the_end():
    documents, _ = fit([document(0, 9, prompt=2), document(10, 6)], "truncate_prompt")
    assert [ids for ids, _ in documents] == ["1 2 3 4", "10 11 12 13"]


def test_the_error_policy_names_the_first_document_that_is_too_long():
    sentence = "document 1 of the {} has 6 tokens but max_length is 4; raise max_length"
    with pytest.raises(ValueError, match=sentence.format("train dataset")):
        fit(THREE, "error")
    with pytest.raises(ValueError, match=sentence.format("stream")):
        list(fit_stream(stream_of(THREE), Overflow("error", 4)))
    assert len(fit(THREE, "error", capacity=6)[0]) == 3


def test_documents_that_fit_are_neither_copied_nor_changed():
    dataset = Dataset.from_list(THREE)
    whole = TokenCounts(3, 13, 7)
    for overflow in (Overflow("truncate", 6), Overflow("overlap", None), Overflow("error", 6)):
        fitted, counts = fit_and_count(dataset, overflow)
        assert fitted is dataset
        assert counts == PreparationCounts(whole, whole)


def laid_in_rows(rows, capacity):
    """Documents end to end, cut at every multiple of `capacity`; pieces without a target go."""
    place = 0
    pieces = []
    for row in rows:
        pairs = list(zip(row["input_ids"], row["labels"], strict=True))
        while pairs:
            room = capacity - place % capacity
            piece, pairs = pairs[:room], pairs[room:]
            place += len(piece)
            if any(label != -100 for _, label in piece[1:]):
                ids, labels = zip(*piece, strict=True)
                pieces.append({"input_ids": ids, "labels": labels})
    return pieces


def test_wrapped_is_cut_in_batches_as_in_one_table():
    rows = [document(7 * i, 1 + i % 9, prompt=i % 3) for i in range(2300)]
    dataset = Dataset.from_list(rows).shuffle(seed=0)  # documents of the batches are not stored so
    fitted, _ = fit_and_count(dataset, Overflow("wrapped", 13))
    assert words(fitted) == words(laid_in_rows(dataset, 13))


def test_an_overlap_is_an_eighth_of_a_piece():
    documents, counts = fit([document(0, 100)], "overlap", 40)
    # 40, then 35 new tokens, then 25
    assert [len(ids.split()) for ids, _ in documents] == [40, 40, 30]
    assert str(counts).endswith("pieces that overlap; 10 tokens repeated as context")


# --- nothing lost, by property --------------------------------------------------------------------

STOP_EVERY = range(0, 1_400, 3)


def assert_nothing_lost(rows, fitted, counts, capacity):
    """Put together again, the pieces are the original tokens, less what the counts say.

    What is missing has no trained token left; a token loses its training only at the start of a
    piece.
    """
    before = [token for row in rows for token in row["input_ids"]]
    after = [token for row in fitted for token in row["input_ids"]]
    assert len(set(after)) == len(after)
    assert after == [token for token in before if token in set(after)]
    targets = {label for row in rows for label in row["labels"][1:]} - {-100}
    kept = {label for row in fitted for label in row["labels"][1:]} - {-100}
    lost = counts.before - counts.after
    assert (len(before) - len(after), len(targets - kept)) == (lost.tokens, lost.trained)
    assert len(set(STOP_EVERY) & (targets - kept)) == lost.stops
    starts = {row["input_ids"][0] for row in fitted}
    for token in targets - kept:
        assert token in starts or token not in after
    assert all(len(row["input_ids"]) <= capacity for row in fitted)


def assert_trained_once(rows, fitted, capacity):
    """Every target is trained in exactly one piece, with a token before it."""
    trained = [label for row in fitted for label in row["labels"] if label != -100]
    targets = {label for row in rows for label in row["labels"][1:]} - {-100}
    firsts = {row["labels"][0] for row in rows if row["labels"]}
    assert len(set(trained)) == len(trained)
    assert targets <= set(trained) <= targets | firsts
    begins = {row["input_ids"][0] for row in rows if row["input_ids"]}
    for row in fitted:
        assert len(row["input_ids"]) <= capacity
        if row["input_ids"][0] not in begins:
            assert row["labels"][0] == -100


def slow_counts(rows) -> TokenCounts:
    """Documents, tokens, trained tokens and stop tokens, counted one by one."""
    targets = [label for row in rows for label in row["labels"][1:] if label != -100]
    tokens = sum(len(row["input_ids"]) for row in rows)
    return TokenCounts(len(rows), tokens, len(targets), sum(t in STOP_EVERY for t in targets))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_any_documents_are_counted_one_by_one_and_a_stream_gives_the_same(policy, rows, capacity):
    overflow = Overflow(policy, capacity)
    dataset = weighted(rows)
    fitted, counts = fit_and_count(dataset, overflow, stop_ids=STOP_EVERY)
    pieces = list(fitted)
    assert (counts.before, counts.after) == (slow_counts(rows), slow_counts(pieces))
    assert sum((stage.lost for stage in counts.stages), counts.after) == counts.before
    kept = {label for row in pieces for label in row["labels"][1:]}
    fewer = sum(bool(set(row["labels"][1:]) & set(STOP_EVERY) - kept) for row in rows)
    assert sum(s.lost_eos for s in counts.stages) == fewer
    num_cut = sum(s.affected for s in counts.stages if not s.is_untrained)
    assert policy == "wrapped" or num_cut == sum(len(row["input_ids"]) > capacity for row in rows)
    assert all(set(row["labels"][1:]) - {-100} for row in pieces)
    assert [[2 * w for w in row["loss_weights"]] for row in pieces] == fitted["input_ids"][:]
    if policy in ("split", "wrapped"):
        assert_nothing_lost(rows, pieces, counts, capacity)
    if policy == "overlap":
        assert_trained_once(rows, pieces, capacity)
    rule = EosRule(tiny_tokenizer(), frozenset(STOP_EVERY))
    streamed = fit_stream(stream_of(list(dataset)), overflow, rule)
    assert list(streamed) == pieces
    assert replace(take_counts(streamed), notes=()) == counts


def test_the_checks_notice_damage():
    rows = [document(0, 9), document(100, 7)]
    split, counts = fit_and_count(Dataset.from_list(rows), Overflow("split", 4))
    pieces = list(split)
    counts = replace(counts, before=slow_counts(rows))
    counts = replace(counts, after=slow_counts(pieces))
    assert_nothing_lost(rows, pieces, counts, 4)
    with pytest.raises(AssertionError):
        assert_trained_once(rows, pieces, 4)
    for damaged in (pieces[1:], pieces + pieces[:1], pieces[::-1]):
        with pytest.raises(AssertionError):
            assert_nothing_lost(rows, damaged, counts, 4)


# --- as data sets come ----------------------------------------------------------------------------


def weighted(rows, kind=None) -> Dataset:
    """`rows` with the weight id / 2 at each token."""
    rows = [{**row, "loss_weights": [token / 2 for token in row["input_ids"]]} for row in rows]
    return Dataset.from_list(rows).cast_column("loss_weights", kind or List(Value("float32")))


def test_types_and_other_columns_stay():
    features = Features(
        input_ids=LargeList(Value("uint16")),
        labels=LargeList(Value("int64")),
        loss_weights=List(Value("float16")),
        source=Value("string"),
    )
    names = ["web", "book", "chat"]
    rows = [{**row, "source": name} for row, name in zip(weighted(THREE), names, strict=True)]
    fitted, _ = fit_and_count(Dataset.from_list(rows, features=features), Overflow("wrapped", 4))
    assert words(fitted) == BY_HAND["wrapped"][0]
    assert fitted.features == features
    assert fitted["source"][:] == [names[ids[0] // 10 - 1] for ids in fitted["input_ids"]]


def test_rows_are_read_through_mappings_chunks_slices_and_formats_and_cached(tmp_path):
    rows = [document(100 * i, n, prompt=n // 3) for i, n in enumerate((3, 9, 2, 6, 4, 12, 5, 1))]
    joined = concatenate_datasets([Dataset.from_list(rows[:3]), Dataset.from_list(rows[3:])])
    dataset = joined.shuffle(seed=1).select(range(1, 8)).with_format("torch")
    dataset = dataset.filter(lambda row: len(row["input_ids"]) != 5)
    expected = fit(list(dataset.with_format(None)), "overlap")
    assert fit(dataset, "overlap") == expected
    dataset.save_to_disk(tmp_path)
    first, again = (
        fit_and_count(Dataset.load_from_disk(tmp_path), Overflow("overlap", 4)) for _ in range(2)
    )
    assert first[0].cache_files == again[0].cache_files
    assert first[1] == again[1] == expected[1]
    table = pa.Table.from_pylist([document(10, 3), *THREE]).slice(1)
    assert fit(Dataset(table), "split")[0] == BY_HAND["split"][0]


# --- streams --------------------------------------------------------------------------------------


def test_a_stream_is_counted_from_time_to_time_and_keeps_token_columns():
    rows = [document(3, 1), *[document(0, 6)] * 2_000, document(0, 0)] * 2
    streamed = fit_stream(stream_of([{**row, "n": 1} for row in rows]), Overflow("truncate", 4))
    assert set(next(iter(streamed))) == {"input_ids", "labels"}
    take_counts(streamed)
    iterator = iter(streamed)
    parts = []
    for _ in range(3):
        list(islice(iterator, 1_300))
        parts.append(take_counts(streamed))
    list(iterator)
    parts.append(take_counts(streamed))
    assert all(part.before.documents for part in parts)
    expected = fit_and_count(Dataset.from_list(rows), Overflow("truncate", 4))[1]
    assert sum(parts, PreparationCounts()) == expected != parts[0]
    assert take_counts(streamed) == take_counts(THREE) == PreparationCounts(), "nothing since"


def test_a_data_set_without_a_trained_token_left_is_an_error():
    sentence = r"no document .* token left \(2 read, the longest has 9"
    with pytest.raises(ValueError, match=sentence):
        fit([document(10, 9, prompt=5), document(20, 2, prompt=2)], "truncate")
