"""A run on prepared documents trains them as they are, or refuses them and says what differs."""

import dataclasses
import json

import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets
from helpers.prepared import call_for, chats, write_rows
from helpers.runs import TrainerCall, prepare_run, records_of, run_of_call
from helpers.tiny import tiny_dataset, tiny_tokenizer
from transformers import TrainingArguments

from trl_packing import PackedSFTConfig, load_prepared, load_rows


def made(out, call, **options):
    prepare_run(call, out, **options)
    return load_prepared(out)


def documents_of(call):
    return run_of_call(call).documents()


CASES = {
    "whole completions": (tiny_dataset("prompt_completion"), {"completion_only_loss": False}),
    "every turn": (chats(), {"train_on": "every_turn"}),
    "weights": (chats(weights=True), {}),
    "sources": (chats(sources=True), {"source_column": "source"}),
    "overlap": (chats(), {"max_length": 24, "overflow": "overlap"}),
    "EOS": (tiny_dataset("tokenized_completion_mask"), {"append_eos": True}),
    "shuffled": (chats(), {"shuffle_dataset": True, "max_length": 24, "overflow": "split"}),
    "template": (tiny_dataset("language_modeling"), {"response_template": "?"}),
}


@pytest.mark.parametrize("case", CASES)
def test_prepared_documents_and_counts_are_those_of_the_run(tmp_path, case):
    rows, changes = CASES[case]
    call = call_for(rows, **changes)
    expected, counts = documents_of(call)
    prepared = made(tmp_path / "out", call)
    again = TrainerCall(None, call.args, prepared, tiny_tokenizer(chat=True))
    documents, found = documents_of(again)
    assert documents is prepared
    assert found == counts
    assert len(prepared) == len(expected)
    kept = {"input_ids", "labels"} | ({"loss_weights", "source"} & {*expected.column_names})
    assert set(prepared.column_names) == kept
    assert all(prepared[column][:] == expected[column][:] for column in kept)


CHANGES = {
    "max_length": 63,
    "overflow": "drop",
    "train_on": "all",
    "completion_only_loss": True,
    "append_eos": True,
    "source_column": "source",
    "shuffle_dataset": True,
}


def test_a_run_with_another_setting_is_refused_by_its_name(tmp_path):
    prepared = made(tmp_path / "out", call_for(chats(), train_on="assistant"))
    for name, value in CHANGES.items():
        changed = {"train_on": "assistant"} | {name: value}
        with pytest.raises(ValueError, match=f"{tmp_path / 'out'} do not fit this run: .*{name}="):
            documents_of(call_for(prepared, **changed))
    other = made(tmp_path / "other", call_for(chats(), max_length=32, overflow="overlap"))
    both = concatenate_datasets([prepared, other])
    assert [record.folder.rpartition("/")[2] for record in records_of(both)] == ["out", "other"]
    with pytest.raises(ValueError, match=r"/other do not fit this run: .*max_length=32 there"):
        documents_of(call_for(both, train_on="assistant"))


def test_a_run_with_the_same_documents_is_taken(tmp_path):
    prepared = made(tmp_path / "out", call_for(chats()))
    others = {"overflow": "truncate", "packing_strategy": "next_fit", "prefix_sharing": "bin"}
    assert documents_of(call_for(prepared, seed=7, **others))[0] is prepared
    pairs = made(tmp_path / "pairs", call_for(tiny_dataset("prompt_completion")))
    assert documents_of(call_for(pairs, completion_only_loss=True))[0] is pairs
    with pytest.raises(ValueError, match="completion_only_loss=True there and False here"):
        documents_of(call_for(pairs, completion_only_loss=False))


def test_packing_may_change_where_it_changes_no_document(tmp_path):
    prepared = made(tmp_path / "out", call_for(chats(), train_on="assistant"))
    expected, _ = documents_of(call_for(chats(), train_on="assistant", packing=False))
    documents, _ = documents_of(call_for(prepared, train_on="assistant", packing=False))
    assert documents["labels"][:] == expected["labels"][:]
    # A padded run keeps a document whose only label is on its first token, which trains nothing.
    rows = [{"input_ids": [5, 6, 7], "labels": labels} for labels in ([5, -100, -100], [5, 6, 7])]
    for packing in (True, False):
        name = f"packing={packing}"
        prepared = made(tmp_path / name, call_for(Dataset.from_list(rows), packing=packing))
        assert len(prepared) == 2 - packing
        with pytest.raises(ValueError, match=f"packing={packing} there and {not packing} here"):
            documents_of(call_for(prepared, packing=not packing))


def test_another_tokenizer_or_template_is_refused_where_it_makes_other_documents(tmp_path):
    texts = made(tmp_path / "texts", call_for(tiny_dataset("language_modeling")))
    conversations = made(tmp_path / "chats", call_for(chats()))
    longer, other_eos, used, rewritten = (tiny_tokenizer(chat=True) for _ in range(4))
    longer.add_tokens(["Explicit"])
    other_eos.eos_token = "<eos>"
    used(["a", "long text"], padding=True, truncation=True, max_length=3)
    rewritten.chat_template = rewritten.chat_template.replace("user", "USER") + " "
    for same in (used, tiny_tokenizer(chat=True, pad="<|other|>")):
        assert documents_of(call_for(texts, tokenizer=same))[0] is texts
    for other in (longer, other_eos, tiny_tokenizer(chat=True, bos=True)):
        with pytest.raises(ValueError, match="do not fit this run: another tokenizer"):
            documents_of(call_for(texts, tokenizer=other))
    with pytest.raises(ValueError, match="do not fit this run: another chat template; use"):
        documents_of(call_for(conversations, tokenizer=rewritten))


# Settings of a config that change no document. A new setting must be named here, or be compared.
NOT_COMPARED = {
    *("attention", "curriculum", "dataset_num_proc", "documents_per_step", "eval_packing"),
    *("isolation_check", "loss_weighting", "max_patches", "pad_to_multiple_of", "padding_free"),
    *("prefix_group_size", "prefix_sharing", "run_page", "static_shapes"),
    *("max_tokens_in_memory", "max_tokens_per_micro_batch", "sequence_parallel_size"),
    *("mixture", "mixture_unit"),  # drawn from documents
    *("packing_strategy", "truncation_mode"),  # by the overflow policy
    # TRL's
    *("activation_offloading", "loss_type", "model_init_kwargs", "router_aux_loss_coef"),
    *("eos_token", "pad_token", "trust_remote_code"),  # by the tokenizer
    "chat_template_path",  # by the template
    "dataset_kwargs",  # refused, if it skips preparation
}


def test_every_setting_is_compared_or_known_to_change_no_document(tmp_path):
    changes = {"prompt_template": "qa", "append_eos": True, "shuffle_dataset": True}
    compared = set()
    for call in (
        call_for(tiny_dataset("question_answer"), **changes),
        call_for(tiny_dataset("language_modeling")),
    ):
        (record,) = records_of(made(tmp_path / str(len(compared)), call))
        compared |= {*record.settings}
    ours, theirs = (
        {field.name for field in dataclasses.fields(cls)}
        for cls in (PackedSFTConfig, TrainingArguments)
    )
    assert ours - theirs - compared - NOT_COMPARED == set()
    assert NOT_COMPARED & compared == set()


# --- parts of prepared data -----------------------------------------------------------------------


def test_a_selection_is_checked_and_counted_anew(tmp_path):
    prepared = made(tmp_path / "out", call_for(chats()))
    part = prepared.select(range(3, 9))
    documents, counts = documents_of(call_for(part))
    assert counts.before.documents == 6
    assert documents["input_ids"][:] == prepared["input_ids"][3:9]
    with pytest.raises(ValueError, match="max_length=64 there and 32 here"):
        documents_of(call_for(part, max_length=32))


# --- the folder -----------------------------------------------------------------------------------


def test_sets_are_found_by_their_name_or_their_split(tmp_path):
    file = write_rows(tmp_path / "rows.jsonl", chats(20))
    train, test = (load_rows(file, split) for split in ("train[:75%]", "train[75%:]"))
    made(tmp_path / "out", call_for(train, test))
    assert len(load_rows(str(tmp_path / "out"), "train[:75%]")) == 15
    assert len(load_rows(str(tmp_path / "out"), "train[75%:]")) == 5
    assert len(load_prepared(tmp_path / "out")) == 15
    assert len(load_prepared(tmp_path / "out", "eval")) == 5
    with pytest.raises(ValueError, match=r"holds sets of the splits .'train': 'train\[:75%\]"):
        load_rows(str(tmp_path / "out"), "train[:10]")


def test_a_damaged_folder_is_refused(tmp_path):
    made(tmp_path / "out", call_for(chats()))
    (shard,) = (tmp_path / "out" / "train").glob("*.arrow")
    content, sink = shard.read_bytes(), pa.BufferOutputStream()
    with pa.ipc.open_stream(content) as reader, pa.ipc.new_stream(sink, reader.schema) as writer:
        writer.write_table(reader.read_all().slice(0, 20))
    half = sink.getvalue().to_pybytes()[:-8]  # without the mark of its end
    shard.write_bytes(half + bytes(len(content) - len(half)))
    with pytest.raises(ValueError, match=r"train cannot be read \(20 rows instead of 24\); copy"):
        load_prepared(tmp_path / "out")
    with pytest.raises(ValueError, match=r"holds no prepared data: it has no manifest\.json"):
        load_prepared(tmp_path)
    with pytest.raises(ValueError, match="none"):
        load_prepared(tmp_path / "none")
    file = tmp_path / "out" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trl_packing_prepared": 1}))
    with pytest.raises(ValueError, match=r"in a form that this version cannot read; prepare"):
        load_prepared(tmp_path / "out")
