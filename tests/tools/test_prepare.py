"""Prepared data are whole or not there, and the same command again changes nothing."""

from dataclasses import replace

import pytest
from datasets import Dataset
from helpers.prepared import call_for, chats
from helpers.runs import prepare_run
from helpers.tiny import tiny_dataset, tiny_iterable

from trl_packing import load_prepared


def test_an_interrupted_command_leaves_nothing_behind(tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    call = replace(call_for(Dataset.from_list([{"a": "Row"}])), formatting_func=stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_run(call, tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path):
        with pytest.raises(ValueError, match="is there already; name a new folder"):
            prepare_run(call_for(chats()), place)
    (tmp_path / "empty").mkdir()
    prepare_run(call_for(chats()), tmp_path / "empty")
    assert len(load_prepared(tmp_path / "empty")) == 24


def test_other_rows_of_equal_numbers_are_other_data(tmp_path):
    """`datasets` caches what it makes of a data set by this fingerprint."""
    rows = [{"text": f"{word} row"} for word in ("One", "Two", "Six")]
    for name, texts in (("a", rows), ("b", rows[::-1])):
        prepare_run(call_for(Dataset.from_list(texts)), tmp_path / name)
    one, other = (load_prepared(tmp_path / name) for name in "ab")
    assert one._fingerprint != other._fingerprint


def test_evaluation_sets_are_prepared_by_the_rules_of_the_training_set(tmp_path):
    evaluated = {"a b": chats(5), "c/d": tiny_dataset("conversational_prompt_completion", 4)}
    prepare_run(call_for(chats(), evaluated), tmp_path / "out")
    assert len(load_prepared(tmp_path / "out", "a b")) == 5
    # The training set has no completions, so prompts are trained in all sets, as in TRL.
    labels = load_prepared(tmp_path / "out", "c/d")["labels"][:]
    assert all(-100 not in row for row in labels)
    assert {path.name for path in (tmp_path / "out").iterdir()} > {"a%20b", "c%2Fd"}


REFUSED = {
    "a stream": (tiny_iterable(), {}, "the train dataset is a stream.* cannot be prepared"),
    "images": (Dataset.from_dict({"images": [[]], "text": ["a"]}), {}, "has images"),
    "no preparation": (
        tiny_dataset("tokenized"),
        {"dataset_kwargs": {"skip_prepare_dataset": True}},
        "skip_prepare_dataset=True leaves nothing to prepare",
    ),
    "generation marks": (chats(), {"assistant_only_loss": True}, "set train_on='assistant'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_cannot_be_prepared_are_refused(tmp_path, case):
    rows, changes, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        prepare_run(call_for(rows, **changes), tmp_path / "out")
    assert [*tmp_path.iterdir()] == []


def test_the_manifest_says_what_was_made_of_what(tmp_path):
    call = call_for(chats(), max_length=24)
    made = prepare_run(call, tmp_path / "out", options={"train_on": "all"})
    stored = made["sets"]["train"]
    documents = load_prepared(tmp_path / "out")
    assert stored["documents"] == len(documents)
    assert stored["tokens"] == sum(map(len, documents["input_ids"]))
    assert stored["counts"]["stages"][0]["affected"] > 0
    assert {"trl_packing", "trl", "transformers", "tokenizers"} < set(made["versions"])
    assert made["options"] == {"train_on": "all"}
    with pytest.raises(ValueError, match="the train dataset is prepared already"):
        prepare_run(call_for(documents), tmp_path / "again")
