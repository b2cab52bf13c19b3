"""Documents that are too long follow the overflow policy, and whatever is lost is counted."""

from dataclasses import astuple, replace
from itertools import islice

import datasets
import pyarrow as pa
import pytest
from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets
from helpers.tiny import tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data.counts import PreparationCounts, Stage, TokenCounts
from trl_packing.data.fitting import Overflow, cut_table, documents_of, fit_and_count
from trl_packing.data.fitting import fit as fit_pieces
from trl_packing.data.stop_tokens import EosRule
from trl_packing.data.stream import fit_stream, take_counts


def fit_table(table, overflow):
    documents = documents_of(Dataset(table))
    return cut_table(table, fit_pieces(documents, overflow)[0], documents.columns)


def adds_up(counts):
    return counts.before - sum((s.lost for s in counts.stages), TokenCounts()) == counts.after


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
    return words(fitted), counts


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
RAISE = "raise max_length"  # pieces of an answer without its prompt would make no sense

BY_HAND = {
    # The second document keeps its prompt only, so it goes.
    "truncate": (
        [("10 11 12", "10 11 12"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(2, 7, 5, 1),
        Stage(1, "longer than max_length=4: cut at the end", TokenCounts(0, 2, 2, 1), 1, RAISE),
        Stage(1, "with no trained token left: dropped", TokenCounts(1, 4, 0, 0)),
    ),
    "truncate_start": (
        [("10 11 12", "10 11 12"), ("22 23 24 25", ". . 24 25"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(3, 11, 7, 2),
        Stage(1, "longer than max_length=4: cut at the start", TokenCounts(0, 2), 0, RAISE),
    ),
    "truncate_prompt": (
        [("10 11 12", "10 11 12"), ("22 23 24 25", ". . 24 25"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(3, 11, 7, 2),
        Stage(1, "longer than max_length=4: prompt cut at the start", TokenCounts(0, 2), 0, RAISE),
    ),
    "drop": (
        [("10 11 12", "10 11 12"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(2, 7, 5, 1),
        Stage(1, "longer than max_length=4: dropped", TokenCounts(1, 6, 2, 1), 1, RAISE),
    ),
    # 20 21 22 23 | 24 25: the first piece has nothing to train; 24 begins a piece: no target.
    "split": (
        [("10 11 12", "10 11 12"), ("24 25", "24 25"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(3, 9, 6, 2),
        Stage(
            1,
            "longer than max_length=4: split into pieces",
            TokenCounts(-1, 0, 1, 0),
            0,
            "raise max_length",
        ),
        Stage(1, "with no trained token left: dropped", TokenCounts(1, 4), unit="piece"),
    ),
    # 20 21 22 23 | 23 24 25: the token before 24 is context, so 24 stays a target.
    "overlap": (
        [("10 11 12", "10 11 12"), ("23 24 25", ". 24 25"), ("30 31 32 33", "30 31 32 33")],
        TokenCounts(3, 10, 7, 2),
        Stage(
            1,
            "longer than max_length=4: split into pieces that overlap",
            TokenCounts(-1, -1),
            0,
            "raise max_length",
            repeated=1,
        ),
        Stage(1, "with no trained token left: dropped", TokenCounts(1, 4), unit="piece"),
    ),
    # 10 11 12 20 | 21 22 23 24 | 25 30 31 32 | 33: 20, 25 and 33 stand alone in their pieces.
    "wrapped": (
        [("10 11 12", "10 11 12"), ("21 22 23 24", ". . . 24"), ("30 31 32", "30 31 32")],
        TokenCounts(3, 10, 5, 1),
        Stage(
            2, "cut where rows of max_length=4 end", TokenCounts(-3, 0, 2, 1), 1, "raise max_length"
        ),
        Stage(3, "with no trained token left: dropped", TokenCounts(3, 3), unit="piece"),
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_gives_the_documents_and_the_losses_written_here(policy):
    documents, after, *stages = BY_HAND[policy]
    expected = PreparationCounts(BEFORE, after, tuple(stages))
    assert fit(THREE, policy, stop_ids=STOPS) == (documents, expected)


@pytest.mark.parametrize(
    ("prompt", "length", "kept"),
    [
        (2, 4, "0 1 2 3"),
        (4, 7, "3 4 5 6"),  # the whole completion, behind the last token of the prompt
        (4, 6, "2 3 4 5"),
        (2, 9, "1 2 3 4"),  # a completion that does not fit behind it is cut at the end
        (0, 6, "0 1 2 3"),  # no prompt: as "truncate"
        (1, 6, "0 1 2 3"),
    ],
)
def test_cutting_the_prompt_keeps_the_completion(prompt, length, kept):
    documents, _ = fit([document(0, length, prompt)], "truncate_prompt")
    assert [ids for ids, _ in documents] == [kept]


@settings(max_examples=25, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_cutting_the_prompt_loses_no_trained_token_of_completions_that_fit(rows, capacity):
    fitted, _ = fit_and_count(Dataset.from_list(rows), Overflow("truncate_prompt", capacity))
    kept = {label for row in fitted for label in row["labels"][1:]}
    for row in rows:
        completion = [label for label in row["labels"][1:] if label != -100]
        if len(completion) < capacity:
            assert kept.issuperset(completion)
    # The control: cutting at the end does lose them.
    cut, _ = fit(
        [document(0, 3), document(50, capacity + 2, prompt=capacity)], "truncate", capacity
    )
    assert len(cut) == 1


def test_the_error_policy_names_the_first_document_that_is_too_long():
    sentence = (
        "document 1 of the train dataset has 6 tokens but max_length is 4; raise max_length or set "
        "overflow='truncate' or 'drop'"
    )
    with pytest.raises(ValueError, match=sentence):
        fit(THREE, "error")
    assert len(fit(THREE, "error", capacity=6)[0]) == 3


@pytest.mark.parametrize("policy", [p for p in (*POLICIES, "error") if p != "wrapped"])
def test_documents_that_fit_are_neither_copied_nor_changed(policy):
    dataset = Dataset.from_list(THREE)
    for capacity in (6, None):
        fitted, counts = fit_and_count(dataset, Overflow(policy, capacity))
        assert fitted is dataset
        assert counts == PreparationCounts(TokenCounts(3, 13, 7), TokenCounts(3, 13, 7))


def test_documents_without_a_trained_token_go_after_the_policy_and_are_counted():
    rows = [
        document(10, 3),
        document(20, 3, prompt=3),  # nothing marked
        document(30, 1),  # a first token is never a target
        document(40, 0),  # empty
        document(50, 8, prompt=6),  # truncated to its prompt
    ]
    documents, counts = fit(rows, "truncate")
    assert documents == [("10 11 12", "10 11 12")]
    assert counts.before - counts.after == TokenCounts(4, 12, 2)
    assert [(stage.affected, stage.why, stage.lost) for stage in counts.stages] == [
        (1, "longer than max_length=4: cut at the end", TokenCounts(0, 4, 2)),
        (3, "without a trained token: dropped", TokenCounts(3, 4)),
        (1, "with no trained token left: dropped", TokenCounts(1, 4)),
    ]
    assert fit(rows, "split")[0] == [("10 11 12", "10 11 12"), ("54 55 56 57", ". . 56 57")]


def test_other_columns_follow_their_pieces():
    rows = [
        {**row, "source": name} for row, name in zip(THREE, ["web", "book", "chat"], strict=True)
    ]
    fitted, _ = fit_and_count(Dataset.from_list(rows), Overflow("split", 3))
    assert fitted["source"][:] == ["web", "book", "chat"]
    assert fitted["input_ids"][:] == [[10, 11, 12], [23, 24, 25], [30, 31, 32]]


def test_wrapped_runs_on_over_all_rows_and_not_over_chunks_of_a_thousand():
    rows = [document(0, 3)] * 2500  # 7,500 tokens; a cut at row 1,000 would leave a short row
    fitted, counts = fit_and_count(Dataset.from_list(rows), Overflow("wrapped", 4))
    # Of every 4 documents, laid over 3 rows: 3 | 1 2 | 2 1 | 3, of which single tokens go.
    assert len(fitted) == 2500
    assert counts.before - counts.after == TokenCounts(0, 2 * 625, 2 * 625)


@pytest.mark.parametrize(
    "num_proc", [None, pytest.param(2, marks=pytest.mark.slow, id="2 processes")]
)
def test_wrapped_is_cut_in_batches_as_in_one_table(num_proc):
    rows = [document(7 * i, 1 + i % 9, prompt=i % 3) for i in range(2300)]
    dataset = Dataset.from_list(rows).shuffle(seed=0)  # documents of the batches are not stored so
    fitted, _ = fit_and_count(dataset, Overflow("wrapped", 13), num_proc=num_proc)
    whole = fit_table(dataset.with_format("arrow")[:], overflow=Overflow("wrapped", 13))
    assert words(fitted) == words(whole.to_pylist())
    # Control: batches that begin anew have other pieces.
    alone = [
        fit_table(
            dataset.with_format("arrow")[start : start + 1000], overflow=Overflow("wrapped", 13)
        )
        for start in range(0, 2300, 1000)
    ]
    assert words(fitted) != words(row for table in alone for row in table.to_pylist())


# --- nothing lost, by property --------------------------------------------------------------------

# Every third token is a stop token.
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
    lost = counts.before - counts.after
    assert len(before) - len(after) == lost.tokens
    targets = {label for row in rows for label in row["labels"][1:]} - {-100}
    kept = {label for row in fitted for label in row["labels"][1:]} - {-100}
    assert len(targets - kept) == lost.trained
    assert len(set(STOP_EVERY) & (targets - kept)) == lost.stops
    starts = {row["input_ids"][0] for row in fitted}
    for token in targets - kept:
        assert token in starts or token not in after
    assert all(len(row["input_ids"]) <= capacity for row in fitted)
    assert all(set(row["labels"][1:]) - {-100} for row in fitted)


@pytest.mark.parametrize("policy", ["split", "wrapped"])
@settings(max_examples=25, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_splitting_and_wrapping_lose_nothing_that_is_not_counted(policy, rows, capacity):
    fitted, counts = fit_and_count(
        Dataset.from_list(rows), Overflow(policy, capacity), stop_ids=STOP_EVERY
    )
    assert_nothing_lost(rows, list(fitted), counts, capacity)


def assert_trained_once(rows, fitted, capacity, overlap):
    """Every target is trained in exactly one piece, with at least `overlap` tokens before it."""
    trained = [label for row in fitted for label in row["labels"] if label != -100]
    targets = {label for row in rows for label in row["labels"][1:]} - {-100}
    firsts = {row["labels"][0] for row in rows if row["labels"]}
    assert len(set(trained)) == len(trained)
    assert targets <= set(trained) <= targets | firsts
    assert {row["labels"][0] for row in fitted} - {-100} <= firsts, "no target begins a piece"
    begins = {row["input_ids"][0] for row in rows if row["input_ids"]}
    for row in fitted:
        assert len(row["input_ids"]) <= capacity
        if row["input_ids"][0] not in begins:
            assert row["labels"][:overlap] == [-100] * overlap


@settings(max_examples=40, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8), data=st.data())
def test_overlapping_pieces_train_every_token_once(rows, capacity, data):
    overlap = data.draw(st.integers(1, capacity // 2))
    policy = Overflow("overlap", capacity, overlap_tokens=overlap)
    fitted, counts = fit_and_count(Dataset.from_list(rows), policy, stop_ids=STOP_EVERY)
    fitted = list(fitted)
    assert_trained_once(rows, fitted, capacity, overlap)
    assert (counts.before.trained, counts.before.stops) == (
        counts.after.trained,
        counts.after.stops,
    )
    distinct = {token for row in fitted for token in row["input_ids"]}
    cut = [stage for stage in counts.stages if "overlap" in stage.why]
    context = sum(
        row["input_ids"][0] not in {r["input_ids"][0] for r in rows if r["input_ids"]}
        for row in fitted
    )
    assert sum(stage.repeated for stage in cut) == context * overlap
    assert counts.after.tokens >= len(distinct)


def test_pieces_that_do_not_overlap_fail_the_same_check():
    rows = [document(0, 9), document(100, 7)]
    overlapping, _ = fit_and_count(Dataset.from_list(rows), Overflow("overlap", 4))
    assert_trained_once(rows, list(overlapping), 4, 1)
    split, _ = fit_and_count(Dataset.from_list(rows), Overflow("split", 4))
    with pytest.raises(AssertionError):
        assert_trained_once(rows, list(split), 4, 1)


def test_an_overlap_is_an_eighth_of_a_piece_unless_it_is_set():
    assert Overflow("overlap", 1024).overlap == 128
    assert Overflow("overlap", 1024, overlap_tokens=100).overlap == 100
    assert Overflow("overlap", 4).overlap == 1
    assert Overflow("split", 1024).overlap is None
    lengths = [len(ids.split()) for ids, _ in fit([document(0, 100)], "overlap", 40)[0]]
    assert lengths == [40, 40, 30]  # 40, then 35 new tokens, then 25


def test_the_report_says_how_many_tokens_are_repeated():
    _, counts = fit([document(0, 100)], "overlap", 40)
    assert str(counts) == (
        "1 document longer than max_length=40: split into pieces that overlap; 10 tokens repeated "
        "as context"
    )


@pytest.mark.parametrize("damage", ["dropped", "repeated", "moved"])
def test_the_check_for_losses_notices_damage(damage):
    rows = [document(0, 9), document(100, 7)]
    fitted, counts = fit_and_count(
        Dataset.from_list(rows), Overflow("split", 4), stop_ids=STOP_EVERY
    )
    pieces = list(fitted)
    assert_nothing_lost(rows, pieces, counts, 4)
    if damage == "dropped":
        del pieces[1]
    elif damage == "repeated":
        pieces.append(pieces[0])
    else:
        pieces.reverse()
    with pytest.raises(AssertionError):
        assert_nothing_lost(rows, pieces, counts, 4)


def slow_counts(rows) -> TokenCounts:
    """Documents, tokens, trained tokens and stop tokens, counted one by one."""
    targets = [label for row in rows for label in row["labels"][1:] if label != -100]
    tokens = sum(len(row["input_ids"]) for row in rows)
    return TokenCounts(len(rows), tokens, len(targets), sum(t in STOP_EVERY for t in targets))


def slow_documents_with_fewer_stops(rows, fitted) -> int:
    kept = {label for row in fitted for label in row["labels"][1:]}
    return sum(bool(set(row["labels"][1:]) & set(STOP_EVERY) - kept) for row in rows)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_the_report_adds_up_to_what_came_out(policy, rows, capacity):
    fitted, counts = fit_and_count(
        Dataset.from_list(rows), Overflow(policy, capacity), stop_ids=STOP_EVERY
    )
    fitted = list(fitted)
    assert (counts.before, counts.after) == (slow_counts(rows), slow_counts(fitted))
    assert sum((stage.lost for stage in counts.stages), counts.after) == counts.before
    assert sum(s.lost_eos for s in counts.stages) == slow_documents_with_fewer_stops(rows, fitted)
    cut = sum(s.affected for s in counts.stages if "max_length" in s.why)
    assert policy == "wrapped" or cut == sum(len(row["input_ids"]) > capacity for row in rows)


def test_counts_that_do_not_add_up_are_noticed():
    _, counts = fit(THREE, "split", stop_ids=STOPS)
    assert adds_up(counts)
    assert not adds_up(replace(counts, stages=counts.stages[1:]))
    assert not adds_up(replace(counts, after=counts.after + TokenCounts(stops=1)))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_second_run_reads_the_cache_and_reports_the_same(tmp_path, policy):
    Dataset.from_list(THREE * 700).save_to_disk(tmp_path)
    overflow = Overflow(policy, 4)
    first, counts = fit_and_count(Dataset.load_from_disk(tmp_path), overflow, stop_ids=STOPS)
    again, same = fit_and_count(Dataset.load_from_disk(tmp_path), overflow, stop_ids=STOPS)
    assert again.cache_files == first.cache_files
    assert same == counts
    assert counts.before == TokenCounts(*(700 * n for n in astuple(BEFORE)))


# --- weights --------------------------------------------------------------------------------------


def weighted(rows, kind=None) -> Dataset:
    """`rows` with the weight id / 2 at each token."""
    rows = [{**row, "loss_weights": [token / 2 for token in row["input_ids"]]} for row in rows]
    dataset = Dataset.from_list(rows)
    return dataset.cast_column("loss_weights", kind or List(Value("float32")))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "kind", [List(Value("float32")), LargeList(Value("float64")), List(Value("float16"))]
)
def test_weights_stay_with_their_tokens(policy, kind):
    dataset = weighted(THREE, kind)
    fitted, counts = fit_and_count(dataset, Overflow(policy, 4))
    assert words(fitted) == BY_HAND[policy][0]
    assert [[2 * w for w in row["loss_weights"]] for row in fitted] == fitted["input_ids"][:]
    assert fitted.features == dataset.features
    assert counts == fit(THREE, policy)[1]
    rows = list(fit_stream(dataset.to_iterable_dataset(), Overflow(policy, 4)))
    assert rows == list(fitted)


@settings(max_examples=15, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_weights_of_any_documents_stay_with_their_tokens(rows, capacity):
    fitted, _ = fit_and_count(weighted(rows), Overflow("split", capacity))
    assert [[2 * w for w in row["loss_weights"]] for row in fitted] == fitted["input_ids"][:]


BAD_WEIGHTS = {
    "too few": ([1.0], "has 3 input_ids but 1 entries in 'loss_weights'"),
    "null row": (None, "row 0 of the stream has no 'loss_weights', but others have"),
    "null": ([1.0, None, 1.0], "column 'loss_weights' has a missing (null) "),
    "words": (["a", "b", "c"], "column 'loss_weights' holds list<item: string>, but weights are"),
}


@pytest.mark.parametrize("bad", BAD_WEIGHTS)
def test_a_stream_with_bad_weights_is_one_clear_sentence(bad):
    weights, sentence = BAD_WEIGHTS[bad]
    with pytest.raises(ValueError) as error:
        list(fit_stream(stream([{**GOOD, "loss_weights": weights}]), Overflow("truncate", 4)))
    assert sentence in str(error.value)


# --- as data sets come ----------------------------------------------------------------------------

INTEGERS = ["int32", "int64", "uint16"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("list_type", [List, LargeList])
@pytest.mark.parametrize("integers", INTEGERS)
def test_any_integers_in_any_lists_give_the_same_documents(policy, list_type, integers):
    features = Features(input_ids=list_type(Value(integers)), labels=list_type(Value("int64")))
    fitted, counts = fit_and_count(Dataset.from_list(THREE, features=features), Overflow(policy, 4))
    assert words(fitted) == BY_HAND[policy][0]
    assert fitted.features == features, "a policy does not change the type of a column"
    assert counts == fit(THREE, policy)[1]


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "drop"])
def test_lists_of_fixed_size_become_pieces_of_any_size(policy):
    rows = [document(10, 6), document(20, 6)]
    fixed = Features(
        input_ids=List(Value("int32"), length=6), labels=List(Value("int64"), length=6)
    )
    dataset = Dataset.from_list(rows, features=fixed)
    assert fit(dataset, policy) == fit(rows, policy)
    assert fit(dataset, policy, capacity=6)[0] == words(rows)


@pytest.mark.parametrize("policy", POLICIES)
def test_selected_shuffled_and_filtered_rows_are_read_through_their_mapping(policy):
    rows = [document(100 * i, n, prompt=n // 3) for i, n in enumerate((3, 9, 2, 6, 4, 12, 5, 1))]
    dataset = Dataset.from_list(rows).shuffle(seed=1).select(range(1, 8))
    dataset = dataset.filter(lambda row: len(row["input_ids"]) != 5)
    assert dataset._indices is not None
    assert fit(dataset, policy) == fit(list(dataset), policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_several_arrow_chunks_are_one_data_set(policy):
    parts = [Dataset.from_list(THREE[i : i + 1] * 2) for i in range(3)]
    joined = concatenate_datasets(parts)
    assert joined.data.column("input_ids").num_chunks == 3
    assert fit(joined, policy) == fit(list(joined), policy)


@pytest.mark.parametrize("format_name", ["torch", "numpy", "arrow"])
def test_the_format_of_the_data_set_does_not_matter(format_name):
    dataset = Dataset.from_list(THREE)
    fitted, counts = fit_and_count(dataset.with_format(format_name), Overflow("split", 4))
    assert words(fitted) == BY_HAND["split"][0]
    assert counts == fit(THREE, "split")[1]
    stream = dataset.to_iterable_dataset().with_format(format_name)
    assert words(fit_stream(stream, Overflow("split", 4))) == BY_HAND["split"][0]


# --- streams --------------------------------------------------------------------------------------


def stream(rows) -> datasets.IterableDataset:
    """A stream that knows neither its columns nor their types before it is read."""
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=10, deadline=None)
@given(rows=data_sets(), capacity=st.integers(3, 8))
def test_a_stream_gives_and_counts_the_documents_of_the_data_set(policy, rows, capacity):
    overflow = Overflow(policy, capacity)
    fitted, counts = fit_and_count(Dataset.from_list(rows), overflow, stop_ids=[11, 12])
    streamed = fit_stream(stream(rows), overflow, EosRule(tiny_tokenizer(), frozenset([11, 12])))
    assert words(streamed) == words(fitted)
    assert replace(take_counts(streamed), notes=()) == counts


def test_a_stream_is_counted_from_time_to_time():
    rows = [document(3, 1), *[document(0, 6)] * 2_000, document(0, 0)] * 2
    streamed = fit_stream(stream(rows), Overflow("truncate", 4))
    iterator, parts = iter(streamed), []
    for _ in range(3):
        list(islice(iterator, 1_300))
        parts.append(take_counts(streamed))
    list(iterator)
    parts.append(take_counts(streamed))
    assert all(part.before.documents for part in parts)
    expected = fit_and_count(Dataset.from_list(rows), Overflow("truncate", 4))[1]
    total = sum(parts, PreparationCounts())
    assert str(total) == str(expected)
    assert adds_up(total)
    assert total != parts[0], "the control"
    assert take_counts(streamed) == PreparationCounts(), "nothing since"


def test_a_stream_of_somebody_else_counts_nothing():
    assert take_counts(stream(THREE)) == take_counts(THREE) == PreparationCounts()


def test_a_stream_keeps_token_columns_only():
    rows = [{**row, "source": "web"} for row in THREE]
    assert set(next(iter(fit_stream(stream(rows), Overflow("truncate", 4))))) == {
        "input_ids",
        "labels",
    }


def test_a_stream_refuses_long_documents_under_error():
    with pytest.raises(
        ValueError, match="document 1 of the stream has 6 tokens but max_length is 4"
    ):
        list(fit_stream(stream(THREE), Overflow("error", 4)))


def test_a_stream_may_hold_nothing_but_empty_documents():
    assert list(fit_stream(stream([document(0, 0)]), Overflow("truncate", 4))) == []


GOOD = document(10, 3)
BAD_ROWS = {
    "missing row": (
        {"input_ids": None, "labels": [1]},
        "row 1 of the stream has no 'input_ids', but others have",
    ),
    "missing token": (
        {"input_ids": [1, None], "labels": [1, 2]},
        "column 'input_ids' has a missing (null) token",
    ),
    "numbers with a fraction": (
        {"input_ids": [1.5, 2.0], "labels": [1, 2]},
        "column 'input_ids' holds list<item: double>, but tokens are lists of integers",
    ),
    "too few labels": (
        {"input_ids": [1, 2, 3], "labels": [1, 2]},
        "document 1 of the stream has 3 input_ids but 2 entries in 'labels'",
    ),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_stream_with_a_bad_row_is_one_clear_sentence(bad):
    row, sentence = BAD_ROWS[bad]
    with pytest.raises(ValueError) as error:
        list(fit_stream(stream([GOOD, row]), Overflow("truncate", 4)))
    assert sentence in str(error.value)


# --- bad input ------------------------------------------------------------------------------------


def test_a_data_set_without_a_trained_token_left_is_an_error():
    sentence = (
        r"no document of the train dataset has a trained token left \(2 read, 1 longer than "
        r"max_length=4, overflow='truncate'\); raise max_length, or check the completion or "
        "assistant masks"
    )
    with pytest.raises(ValueError, match=sentence):
        fit([document(10, 9, prompt=5), document(20, 2, prompt=2)], "truncate")
    with pytest.raises(ValueError, match="overflow='drop'"):
        fit([document(10, 9)], "drop")


def test_tables_with_rows_left_out_at_the_front_are_read_at_the_right_offset():
    """A sliced Arrow table keeps its values and starts its offsets later."""
    table = pa.Table.from_pylist([document(10, 3), *THREE]).slice(1)
    assert fit(Dataset(table), "split")[0] == BY_HAND["split"][0]
