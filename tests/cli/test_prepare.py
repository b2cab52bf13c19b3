"""`trl-packing prepare`, and commands and recipes on what it wrote."""

import json
import re

from trl_packing.recipes.recipe_data import SourceConfig, read

import pytest
import yaml
from helpers.prepared import chats
from helpers.tiny import tiny_dataset, tiny_tokenizer

from trl_packing.cli import main
from trl_packing.data.prepared import records_of
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import TrainingCommand


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Return a folder with a tokenizer and two files, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tiny_tokenizer(chat=True).save_pretrained("model")
    write("chats.jsonl", chats(20))
    write("pairs.jsonl", tiny_dataset("question_answer", 20))
    return tmp_path


def write(name, rows):
    with open(name, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


RUN = ["--model", "model", "--max_length", "64", "--train_on", "assistant"]


def test_a_folder_is_planned_and_inspected_like_its_rows(place, capsys):
    assert main(["plan", "--data", "chats.jsonl", *RUN]) == 0
    plan = capsys.readouterr().out
    assert main(["prepare", "chats.jsonl", "out", *RUN]) == 0
    said = capsys.readouterr().out
    assert "train        20 rows → 20 documents · " in said
    assert "written      out · " in said
    assert main(["plan", "--data", "out", *RUN]) == 0
    assert capsys.readouterr().out == plan
    shown = []
    for data in ("chats.jsonl", "out"):
        assert main(["inspect", "--data", data, *RUN, "--rows", "0", "7"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert main(["plan", "--data", "out", *RUN, "--max_length", "32"]) == 2
    said = capsys.readouterr().err
    assert "do not fit this run: max_length=64 there and 32 here; use the same settings" in said
    assert said.count("\n") == 1


def run_of(entries, **more):
    """Write a YAML file with these `datasets`, and return its documents before training."""
    settings = {"model_name_or_path": "model", "max_length": 64, "output_dir": "out"}
    with open("run.yaml", "w") as file:
        yaml.safe_dump({**settings, "datasets": entries, **more}, file)
    call = TrainingCommand.from_words(["--config", "run.yaml"]).call
    documents, counts = PreviewedRun.from_call(call).documents()
    return [(d["input_ids"], d["labels"]) for d in documents], call.args.mixture, counts.after


def test_a_mixture_is_prepared_as_its_yaml_file_trains_it(place, capsys):
    own = {"prompt_template": "{question}\n", "completion_column": "answer", "source": "a.b"}
    entries = [{"path": "chats.jsonl", "epochs": 0.5}, {"path": "pairs.jsonl", **own}]
    rows = run_of(entries)
    assert main(["prepare", "made", "--config", "run.yaml"]) == 0
    said = capsys.readouterr().out
    assert "chats        20 rows → 20 documents · " in said
    folders = {name: f"made/{name}".replace(".", "%2E") for name in ("chats", "a.b")}
    printed = yaml.safe_load(said[said.index("\ndatasets:") :])["datasets"]
    assert printed == [
        {"path": folders["chats"], "source": "chats", "epochs": 0.5},
        {"path": folders["a.b"], "source": "a.b"},
    ]
    assert main(["prepare", "made", "--config", "run.yaml"]) == 2
    assert "made is there already; name a new folder" in capsys.readouterr().err
    assert run_of(printed) == rows
    entries[1]["prompt_template"] = "{question}: "
    assert run_of(entries) != rows, "the comparison above can fail"


@pytest.mark.parametrize(
    ("out", "more", "said"),
    [
        ("made", {"test_split_size": 0.2}, "rows to evaluate: leave out test_split_size and eval"),
        ("run.yaml", {}, "run.yaml is there already; name a new folder"),
        ("made", {"streaming": True, "max_steps": 1}, "the source 'chats': the train dataset is"),
    ],
)
def test_a_mixture_that_cannot_be_prepared_is_one_line(place, capsys, out, more, said):
    chats = {"path": "chats.jsonl", "weight": 1}
    run_of([chats, chats | {"source": "more"}], **more)
    assert main(["prepare", out, "--config", "run.yaml"]) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (place / "made").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["prepare", *RUN], "name the data and the folder to write first"),
        (["prepare", "chats.jsonl", "chats.jsonl", *RUN], "chats.jsonl is there already; name"),
        (["prepare", "none.jsonl", "out", *RUN], "Unable to find .*none.jsonl"),
        (["prepare", "chats.jsonl", "out", *RUN, "--maxlength", "3"], "--maxlength is unknown"),
        (["prepare", "out", *RUN], "name the model and the data"),
    ],
)
def test_mistakes_are_one_line(place, capsys, words, said):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(said, err)
    assert not (place / "out").exists()


# --- the recipe with columns and splits -----------------------------------------------------------

COLUMNS = ["--prompt_column", "question", "--completion_column", "answer"]


def prepare_pairs():
    split = ["--test_split_size", "0.25"]
    words = ["prepare", "pairs.jsonl", "out", "--model", "model", *COLUMNS, *split]
    assert main(words) == 0


def call_of(*words):
    return TrainingCommand.from_words(["--model", "model", "--data", "out", *words]).call


def test_the_recipe_trains_prepared_splits(place):
    prepare_pairs()
    call = call_of("--prompt_column", "question", "--test_split_size", "0.25")
    assert (len(call.train_dataset), len(call.eval_dataset)) == (15, 5)
    assert call.train_dataset.column_names == ["input_ids", "labels"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--prompt_column", "answer"],
            "prompt_column='question', and here prompt_column='answer'",
        ),
        (["--test_split_size", "0.5"], "test_split_size='0.25', and here test_split_size=0.5"),
        (["--dataset_train_split", "test"], "dataset_train_split=None, and here"),
        (["--dataset_streaming", "true", "--max_steps", "1"], "leave dataset_streaming out"),
    ],
)
def test_the_recipe_refuses_other_columns_and_splits(place, words, said):
    prepare_pairs()
    with pytest.raises(ValueError, match=said):
        call_of(*words)


def test_an_entry_that_is_prepared_takes_no_settings_of_rows(place):
    prepare_pairs()
    with pytest.raises(ValueError, match="out holds prepared data: leave streaming out"):
        read(SourceConfig("out"), streaming=True)
    with pytest.raises(ValueError, match="out holds prepared data: leave prompt_column out"):
        read(SourceConfig("out", prompt_column="question"), streaming=False)
    with pytest.raises(ValueError, match=r"test_split_size=0\.2 cannot divide .* prepared data"):
        run_of([{"path": "out"}], test_split_size=0.2)


def test_prepared_entries_and_rows_are_one_mixture(place):
    prepare_pairs()
    named = {"prompt_column": "question", "completion_column": "answer", "source": "pairs"}
    entries = [{"path": "out", "fraction": 0.75}, {"path": "pairs.jsonl", "fraction": 0.25} | named]
    options = {"datasets": entries, "model_name_or_path": "model", "output_dir": "run"}
    (place / "run.yaml").write_text(json.dumps(options))
    call = TrainingCommand.from_words(["--config", "run.yaml"]).call
    sets = call.train_dataset
    assert {name: len(rows) for name, rows in sets.items()} == {"out": 15, "pairs": 5}
    (record,) = records_of(sets["out"])
    assert record.is_whole(sets["out"])
    assert len(PreviewedRun.from_call(call).documents()[0]) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "rows"),
    [
        ("every_turn", chats(20)),
        (
            "shared_prefixes",
            [{"prompt": f"Why {i}?", "answers": [f"So {i}.", "Because."]} for i in range(9)],
        ),
    ],
)
def test_recipes_take_a_prepared_folder(place, capsys, recipe, rows):
    write("rows.jsonl", rows)
    run = ["--model", "model", "--max_length", "64"]
    assert main(["prepare", f"{recipe}.py", "rows.jsonl", "out", *run, "--hub_token", "hf_1"]) == 0
    assert "hf_1" not in (place / "out" / "manifest.json").read_text()
    capsys.readouterr()
    plans = []
    for data in ("rows.jsonl", "out"):
        assert main(["plan", f"{recipe}.py", "--data", data, *run]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1]
