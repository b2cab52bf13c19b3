"""Documents end in a trained stop token, or are counted, or get one."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets
from harness import make_trainer
from helpers.tiny import CHATML, tiny_dataset, tiny_iterable, tiny_model, tiny_rows, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.stop_tokens import (
    EosRule,
    append_eos,
    append_eos_to_table,
    note_missing_eos,
    stop_token_ids,
)
from trl_packing.data.stream import fit_stream
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import TOKEN_COLUMNS

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
(A,) = TOKENIZER.encode("A")
(NEWLINE,) = TOKENIZER.encode("\n")
(SPACE,) = TOKENIZER.encode(" ")
STOPS = {EOS, END}


def document(ids: list[int], trained: str) -> dict:
    """`trained` has an x for every trained token and a . for every other one."""
    marks = zip(ids, trained, strict=True)
    return {"input_ids": ids, "labels": [token if mark == "x" else -100 for token, mark in marks]}


def documents(*pairs) -> Dataset:
    return Dataset.from_list([document(*pair) for pair in pairs])


# --- which tokens stop ----------------------------------------------------------------------------


def special(name: str) -> int:
    return TOKENIZER.convert_tokens_to_ids(name)


@pytest.mark.parametrize(
    ("end", "name"),
    [("<|im_end|>\n", "<|im_end|>"), (" <|other|><|im_end|>", "<|other|>"), ("\n", None)],
)
def test_the_end_of_a_turn_is_read_from_the_template(end, name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("'<|im_end|>'", repr(end))
    found = {EOS} if name is None else {EOS, special(name)}
    assert stop_token_ids(tokenizer) == found


def test_without_a_template_or_with_one_that_raises_there_is_the_eos_token():
    assert stop_token_ids(tiny_tokenizer()) == {EOS}
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert stop_token_ids(tokenizer) == {EOS}
    tokenizer.chat_template = "{{ messages[0]['content'] }}<|im_end|>"  # not the answer's end
    assert stop_token_ids(tokenizer) == {EOS}


def test_a_template_can_be_given_apart():
    assert stop_token_ids(tiny_tokenizer(), chat_template=CHATML) == {EOS, END}


@pytest.mark.parametrize(("eos", "more"), [(7, {7}), ([7, 8], {7, 8}), (None, set())])
def test_the_generation_config_adds_its_own(eos, more):
    assert stop_token_ids(tiny_tokenizer(), GenerationConfig(eos_token_id=eos)) == {EOS, *more}
    assert stop_token_ids(tiny_tokenizer(), SimpleNamespace()) == {EOS}


def test_a_tokenizer_without_any_stop_token_has_none():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    assert stop_token_ids(tokenizer) == frozenset()
    assert missing(documents(([A, A], "xx")), tokenizer, frozenset()) is None


def missing(dataset: Dataset, tokenizer=TOKENIZER, stop_ids=STOPS):
    rule = EosRule(tokenizer, frozenset(stop_ids))
    found = note_missing_eos(ArrowDocuments(dataset, TOKEN_COLUMNS), rule)
    if found is None:
        return None
    a, b = re.match(r"([\d,]+) of ([\d,]+)", found[0]).groups()
    return SimpleNamespace(
        documents=int(a.replace(",", "")),
        of=int(b.replace(",", "")),
        row=int(re.search(r"is document (\d+)", found[1])[1]),
        note=lambda append_eos: found[0],
        warning=lambda append_eos: found[1],
    )


# --- the check ------------------------------------------------------------------------------------

ENDED = [
    ([A, EOS], "xx"),
    ([A, END], ".x"),
    ([A, END, NEWLINE], "xxx"),
    ([A, END, NEWLINE, SPACE, NEWLINE], "xxxxx"),
    ([A, END, NEWLINE], ".x."),
    ([A, END, A, A, END, NEWLINE], ".x...."),  # the user has the last word
]
UNENDED = [
    ([A, A], "xx"),
    ([A, A, NEWLINE], ".xx"),
    ([A, A, END], ".x."),  # not trained
    ([A, END, A], "xxx"),
    ([A, A, END, NEWLINE], ".x.."),
    ([NEWLINE, NEWLINE], "xx"),
]
LEFT_OUT = [([A, EOS], ".."), ([], "")]


@pytest.mark.parametrize("good", ENDED)
def test_white_space_and_untrained_tokens_may_follow_the_stop_token(good):
    assert missing(documents(good)) is None


@pytest.mark.parametrize("bad", UNENDED)
def test_these_do_not_end_in_a_trained_stop_token(bad):
    found = missing(documents(*ENDED, bad))
    assert (found.documents, found.of, found.row) == (1, len(ENDED) + 1, len(ENDED))


def test_documents_without_a_trained_token_are_left_out():
    found = missing(documents(*LEFT_OUT, *ENDED, *LEFT_OUT, *UNENDED))
    assert (found.documents, found.of) == (len(UNENDED), len(UNENDED) + len(ENDED))


def test_the_sentence_has_the_percentage_the_row_its_end_and_the_way_out():
    rows = [document(ids, marks) for ids, marks in [([A, EOS], ".x")] * 963]
    text = TOKENIZER.encode("What is better than ugly? Beautiful, they say, but is it so?")
    rows[12:12] = [document(text, "." + "x" * (len(text) - 1))] * 37
    found = missing(Dataset.from_list(rows))
    counted = (
        "37 of 1,000 documents (3.7%) do not end in a trained stop token (one of '<eos>', "
        "'<|im_end|>'); "
    )
    set_it = "set append_eos=True, or end them in one"
    assert found.note(append_eos=False) == counted + set_it
    warning = found.warning(append_eos=False)
    assert warning.startswith(counted + set_it + ": the model may not learn to stop there")
    assert "(the first is document 12, ending '" in warning
    assert "say, but is it so?')" in warning


def test_rows_are_counted_through_a_mapping_and_over_chunks():
    parts = [documents(*ENDED), documents(*UNENDED, *LEFT_OUT), documents(*ENDED, UNENDED[0])]
    joined = concatenate_datasets(parts)
    assert joined.data.column("labels").num_chunks == 3
    mixed = joined.shuffle(seed=2).select(range(15))
    alone = [missing(mixed.select([i])) is not None for i in range(15)]
    found = missing(mixed)
    assert found.documents == sum(alone) > 0
    assert found.row == alone.index(True)


def test_only_tokens_met_at_ends_are_decoded(monkeypatch):
    tokenizer = tiny_tokenizer()
    decoded, decode = [], tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(ids) or decode(ids))
    assert missing(documents(*ENDED, ([7, 8, 9, EOS], "xxxx")), tokenizer) is None
    assert sorted(decoded) == sorted([[NEWLINE], [SPACE]])


# --- appending ------------------------------------------------------------------------------------

# The input, and the expected output.
APPENDED = [
    (([A, A], ".x"), ([A, A, EOS], ".xx")),
    (([A], "x"), ([A, EOS], "xx")),
    (([A, A, NEWLINE], ".xx"), ([A, A, NEWLINE, EOS], ".xxx")),
    (([A, END, A], "xxx"), ([A, END, A, EOS], "xxxx")),
    # The stop token is there: it is trained, none is appended.
    (([A, A, END], ".x."), ([A, A, END], ".xx")),
    (([A, A, END, NEWLINE], ".x.."), ([A, A, END, NEWLINE], ".xx.")),
    (([A, A, EOS], ".x."), ([A, A, EOS], ".xx")),
]
LEFT_ALONE = [
    *ENDED,
    *LEFT_OUT,
    ([A, A, A], ".x."),  # the end is not trained, and no stop token
    ([A, A, A, END], ".x.."),  # the stop token belongs to an untrained turn
    ([END], "."),
]


def appended(rows, **settings) -> Dataset:
    dataset = rows if isinstance(rows, Dataset) else Dataset.from_list(rows)
    return appended_by(EosRule(TOKENIZER, STOPS), dataset, **settings)


def appended_by(rule: EosRule, dataset: Dataset, **settings) -> Dataset:
    rows = ArrowDocuments(dataset, TOKEN_COLUMNS)
    rule = replace(rule, appends=True)
    return append_eos(rows, rule, **settings).dataset if note_missing_eos(rows, rule) else dataset


ALL_IN = [document(*pair) for pair in (*(before for before, _ in APPENDED), *LEFT_ALONE)]
ALL_OUT = [document(*pair) for pair in (*(after for _, after in APPENDED), *LEFT_ALONE)]


@pytest.mark.parametrize(("before", "after"), APPENDED)
def test_a_document_that_is_trained_to_its_end_gets_a_stop_token(before, after):
    assert list(appended([document(*before)])) == [document(*after)]


@pytest.mark.parametrize("alone", LEFT_ALONE)
def test_other_documents_are_left_alone(alone):
    rows = [document(*alone), document([A, A], "xx")]  # the second one makes `map` run
    assert list(appended(rows)) == [rows[0], document([A, A, EOS], "xxx")]


def test_all_of_a_batch_at_once():
    assert list(appended(ALL_IN)) == ALL_OUT
    assert list(appended(ALL_OUT)) == ALL_OUT, "a second time changes nothing"


def test_what_needs_nothing_is_not_copied():
    dataset = documents(*ENDED)
    assert appended(dataset) is dataset


def test_what_is_still_counted_afterwards():
    found = missing(appended(ALL_IN))
    assert found.documents == 2  # the two untrained tails


@st.composite
def any_documents(draw):
    tokens = st.sampled_from([A, 7, EOS, END, NEWLINE])
    ids = draw(st.lists(tokens, max_size=6))
    return document(ids, "".join(draw(st.sampled_from("x.")) for _ in ids))


def slowly_appended(row: dict) -> dict:
    """One document at a time, in plain Python."""
    ids, labels = list(row["input_ids"]), list(row["labels"])
    blank = {NEWLINE}
    trained = [label for label in labels if label != -100 and label not in blank]
    if not ids or (trained and trained[-1] in STOPS):
        return row
    end = max((i for i, token in enumerate(ids) if token not in blank), default=-1)
    if end >= 0 and ids[end] in STOPS:
        if end > 0 and labels[end - 1] != -100:
            labels[end] = ids[end]
    elif labels[-1] != -100:
        ids.append(EOS)
        labels.append(EOS)
    return {"input_ids": ids, "labels": labels}


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(any_documents(), min_size=1, max_size=8))
def test_any_documents_are_those_of_the_slow_way(rows):
    features = Features(input_ids=List(Value("int32")), labels=List(Value("int64")))
    table = Dataset.from_list(rows, features=features).data.table
    out = append_eos_to_table(table, EOS, sorted(STOPS), [NEWLINE])
    assert out.to_pylist() == [slowly_appended(row) for row in rows]
    assert out.schema.types == table.schema.types


def test_weights_get_a_one():
    weights = [[0.5] * len(row["input_ids"]) for row in ALL_IN]
    dataset = Dataset.from_list(ALL_IN).add_column("loss_weights", weights)
    dataset = dataset.cast_column("loss_weights", List(Value("float32")))
    out = appended(dataset)
    assert out.features == dataset.features
    for before, after in zip(dataset, out, strict=True):
        was = [*before["labels"], None]
        for label, old, weight in zip(after["labels"], was, after["loss_weights"], strict=False):
            assert weight == (0.5 if label == old else 1.0)
        assert len(after["loss_weights"]) == len(after["input_ids"])
    assert sum(out["loss_weights"][0]) == 0.5 * 2 + 1.0


@pytest.mark.parametrize("list_type", [List, LargeList])
@pytest.mark.parametrize("integers", ["int32", "int64", "uint16"])
def test_types_and_other_columns_stay(list_type, integers):
    features = Features(
        input_ids=list_type(Value(integers)), labels=list_type(Value("int64")), n=Value("int8")
    )
    rows = [{**row, "n": n} for n, row in enumerate(ALL_IN)]
    out = appended(Dataset.from_list(rows, features=features))
    assert out.features == features
    assert list(out) == [{**row, "n": n} for n, row in enumerate(ALL_OUT)]


def test_lists_of_fixed_size_grow():
    features = Features(input_ids=List(Value("int32"), length=2), labels=List(Value("int64"), 2))
    rows = [document([A, A], "xx"), document([A, EOS], "xx")]
    out = list(appended(Dataset.from_list(rows, features=features)))
    assert out == [document([A, A, EOS], "xxx"), rows[1]]


def test_a_second_run_reads_the_cache(tmp_path):
    Dataset.from_list(ALL_IN).save_to_disk(tmp_path)
    first = appended_by(EosRule(tiny_tokenizer(), STOPS), Dataset.load_from_disk(tmp_path))
    used = tiny_tokenizer()
    used(["a", "b c"], padding=True, truncation=True, max_length=2)  # changes the hash of it
    again = appended_by(EosRule(used, STOPS), Dataset.load_from_disk(tmp_path))
    assert again.cache_files == first.cache_files != []


def test_selected_and_chunked_rows_are_those_that_are_seen():
    joined = concatenate_datasets([Dataset.from_list(ALL_IN[:4]), Dataset.from_list(ALL_IN[4:])])
    order = np.random.default_rng(0).permutation(len(ALL_IN))
    assert list(appended(joined.select(order))) == [ALL_OUT[i] for i in order]


def test_an_eos_token_is_needed():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="append_eos=True, but the tokenizer has no eos_token"):
        appended_by(EosRule(tokenizer, frozenset({END})), documents(([A, A], "xx")))


def test_a_stream_gets_what_the_data_set_gets():
    stream = Dataset.from_list(ALL_IN).to_iterable_dataset()
    overflow = Overflow("truncate", 4)
    fitted, _ = fit_and_count(appended(ALL_IN), overflow)
    streamed = fit_stream(stream, overflow, EosRule(TOKENIZER, STOPS, appends=True))
    assert list(streamed) == list(fitted)
    assert list(fit_stream(stream, overflow)) != list(fitted), "the control"


def test_an_empty_batch_stays_empty():
    table = pa.table({"input_ids": [[], []], "labels": [[], []]})
    out = append_eos_to_table(table, EOS, sorted(STOPS), [])
    assert out.to_pylist() == [{"input_ids": [], "labels": []}] * 2


# --- in the trainer -------------------------------------------------------------------------------


def trainer_of(folder, dataset, tokenizer=None, **settings):
    return make_trainer(folder, dataset, tokenizer=tokenizer, max_length=32, **settings)


TOKENIZED = [{"input_ids": [A, 7, 8, EOS]}] * 3 + [{"input_ids": [A, 7, 8]}]


@pytest.mark.parametrize("packing", [True, False])
def test_the_trainer_counts_and_appends(tmp_path, caplog, packing):
    sentence = "1 of 4 documents (25.0%) do not end in a trained stop token ('<eos>')"
    dataset = Dataset.from_list(TOKENIZED)
    with caplog.at_level("WARNING"):
        trainer = trainer_of(tmp_path, dataset, packing=packing)
    assert f"train dataset: {sentence}" in caplog.text
    assert sentence in str(trainer.packing_report)
    assert trainer.train_dataset["input_ids"][3] == [A, 7, 8]
    caplog.clear()
    with caplog.at_level("WARNING"):
        trainer = trainer_of(tmp_path, dataset, packing=packing, append_eos=True)
    assert "stop token" not in caplog.text
    assert "stop token" not in str(trainer.packing_report)
    assert trainer.train_dataset["input_ids"][3] == [A, 7, 8, EOS]
    assert trainer.train_dataset["labels"][3] == [A, 7, 8, EOS]


def test_the_trainer_appends_to_a_stream(tmp_path):
    stream = Dataset.from_list(TOKENIZED).to_iterable_dataset()
    for appends, last in ((True, [A, 7, 8, EOS]), (False, [A, 7, 8])):
        trainer = trainer_of(tmp_path, stream, append_eos=appends, max_steps=1)
        assert list(trainer.train_dataset)[3]["input_ids"] == last


def test_the_stop_token_is_appended_before_the_overflow_policy(tmp_path):
    rows = [{"input_ids": list(range(10, 42))}, *TOKENIZED]
    dataset = Dataset.from_list(rows)
    trainer = trainer_of(tmp_path, dataset, append_eos=True)
    (stage,) = trainer.packing_report.preparation.stages
    assert (stage.why, stage.lost.tokens, stage.lost.stops, stage.lost_eos) == (
        "longer than max_length=32: cut at the end",
        1,
        1,
        1,
    )
    report = " ".join(str(trainer.packing_report).split())  # a narrow terminal breaks lines
    assert "20.0% of the documents lost a stop token" in report


def test_the_end_of_a_turn_stops_where_the_eos_token_is_another(tmp_path, caplog):
    tokenizer = tiny_tokenizer(eos="<eos>", chat=True)
    with caplog.at_level("WARNING"):
        trainer_of(tmp_path, tiny_dataset("conversational_prompt_completion"), tokenizer)
    assert "stop token" not in caplog.text


FORMS = ["language_modeling", "prompt_completion", "conversational_language_modeling"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streams", [False, True])
def test_forms_that_end_by_themselves_do_not_change(tmp_path, form, streams):
    data = (tiny_iterable if streams else tiny_dataset)(form)
    tokenizer = tiny_tokenizer(chat="conversational" in form)
    plain, appends = (
        list(trainer_of(tmp_path, data, tokenizer, append_eos=on, max_steps=1).train_dataset)
        for on in (False, True)
    )
    assert plain == appends


def test_packed_rows_and_skipped_preparation_are_refused(tmp_path):
    packed = Dataset.from_list(tiny_rows("packed"))
    with pytest.raises(ValueError, match="append_eos=True, but the rows of the train dataset are"):
        trainer_of(tmp_path, packed, append_eos=True)
    skipped = Dataset.from_list([document([A, A], "xx")])
    with pytest.raises(ValueError, match="skip_prepare_dataset=True skips append_eos=True"):
        trainer_of(
            tmp_path, skipped, append_eos=True, dataset_kwargs={"skip_prepare_dataset": True}
        )


def test_where_trl_prepares_the_data_appending_is_refused(tmp_path):
    dataset = Dataset.from_list([document([A, A], "xx")]).with_transform(lambda batch: batch)
    with pytest.raises(ValueError, match=r"append_eos=True, but .* transform .* TRL's path"):
        trainer_of(tmp_path, dataset, append_eos=True)


def test_the_generation_config_of_a_named_model_is_read(tmp_path, caplog):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"input_ids": [A, 9, 8]}, {"input_ids": [A, 9, 10]}])
    with caplog.at_level("WARNING"):
        PackedSFTTrainer(
            model=str(tmp_path / "model"),
            args=PackedSFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False),
            train_dataset=rows,
            processing_class=tiny_tokenizer(),
        )
    assert "1 of 2 documents (50.0%) do not end in a trained stop token" in caplog.text
