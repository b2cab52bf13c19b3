"""`trl-packing prepare`, and commands and recipes on what it wrote."""

import re

import pytest
import yaml
from helpers.command import run_command, says
from helpers.prepared import chats, write_rows
from helpers.recipes import module
from helpers.runs import call_of_command, flags_of, records_of, run_of_call
from helpers.tiny import tiny_dataset, tiny_tokenizer

RUN = ["--model", "model", "--max_length", "64", "--train_on", "assistant"]
COLUMNS = {"prompt_column": "question", "completion_column": "answer"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with a tokenizer and two files, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer(chat=True).save_pretrained("model")
    write_rows("chats.jsonl", chats(20))
    write_rows("pairs.jsonl", tiny_dataset("question_answer", 20))
    return tmp_path


@pytest.fixture
def pairs(place):
    """Return a folder in which `out` holds prepared splits of the pairs."""
    words = [*flags_of(COLUMNS), "--model", "model", "--test_split_size", "0.25"]
    assert run_command(["prepare", "pairs.jsonl", "out", *words]) == 0
    return place


def mixture_call(entries, **more):
    """Write a YAML file with these `datasets`, and return the call of its run."""
    settings = {"model_name_or_path": "model", "max_length": 64, "output_dir": "out"}
    with open("run.yaml", "w") as file:
        yaml.safe_dump({**settings, "datasets": entries, **more}, file)
    return call_of_command("--config", "run.yaml")


def test_a_folder_is_planned_and_inspected_like_its_rows(place, capsys):
    shown = {}
    for data in ("chats.jsonl", "out"):
        plan = says(capsys, "plan", "--data", data, *RUN)
        rows = says(capsys, "inspect", "--data", data, *RUN, "--rows", "0", "7")
        # A folder holds documents that were cut already.
        shown[data] = plan, re.sub(r"row 7 · longer than .*\n+", "", rows)
        if data == "chats.jsonl":
            said = says(capsys, "prepare", data, "out", *RUN)
            assert "train        20 rows → 20 documents · " in said
            assert "written      out · " in said
    assert shown["out"] == shown["chats.jsonl"]
    said = says(capsys, "plan", "--data", "out", *RUN, "--max_length", "32", status=2)
    assert "do not fit this run: max_length=64 there and 32 here; use the same settings" in said
    assert len(said.splitlines()) == 1


MISTAKES = [
    ([*RUN], "name the data and the folder to write first"),
    (["chats.jsonl", "chats.jsonl", *RUN], "chats.jsonl is there already; name"),
    (["none.jsonl", "out", *RUN], "Unable to find .*none.jsonl"),
    (["out", *RUN], "name the model and the data"),
    (["out", "--config", "run.yaml"], "the data sets of a mixture are prepared one by one"),
]


@pytest.mark.parametrize(("words", "said"), MISTAKES)
def test_mistakes_are_one_line(place, capsys, words, said):
    entry = {"path": "chats.jsonl", "weight": 1}
    mixture_call([entry, entry | {"source": "more"}])
    assert re.search(said, says(capsys, "prepare", *words, status=2).splitlines()[-1])
    assert not (place / "out").exists()


# --- the recipe with columns and splits -----------------------------------------------------------


def test_the_recipe_trains_prepared_splits_and_refuses_others(pairs):
    words = ["--model", "model", "--data", "out"]
    call = call_of_command(*words, "--prompt_column", "question", "--test_split_size", "0.25")
    assert (len(call.train_dataset), len(call.eval_dataset)) == (15, 5)
    assert call.train_dataset.column_names == ["input_ids", "labels"]
    for others, said in (
        ("--prompt_column answer", "prompt_column='question', and here prompt_column='answer'"),
        ("--test_split_size 0.5", "test_split_size='0.25', and here test_split_size=0.5"),
    ):
        with pytest.raises(ValueError, match=said):
            call_of_command(*words, *others.split())


def test_prepared_entries_take_no_settings_of_rows_and_join_rows_in_a_mixture(pairs):
    data = module("recipe_data")
    with pytest.raises(ValueError, match="out holds prepared data: leave prompt_column out"):
        data.read(data.SourceConfig("out", prompt_column="question"), streaming=False)
    with pytest.raises(ValueError, match=r"test_split_size=0\.2 cannot divide .* prepared data"):
        mixture_call([{"path": "out"}], test_split_size=0.2)
    rows = {"path": "pairs.jsonl", "fraction": 0.25, "source": "pairs", **COLUMNS}
    call = mixture_call([{"path": "out", "fraction": 0.75}, rows], max_length=1024)
    sets = call.train_dataset
    assert {name: len(rows) for name, rows in sets.items()} == {"out": 15, "pairs": 5}
    (record,) = records_of(sets["out"])
    assert record.is_whole(sets["out"])
    assert len(run_of_call(call).documents()[0]) == 20
