"""recipes/sft_packed.py reads every form of data, refuses mistakes, and its demo learns."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from helpers.prepared import write_rows
from helpers.recipes import FOLDER, module, parse
from transformers import AutoModelForCausalLM

from trl_packing import PackedSFTConfig, load_rows

sft_packed, recipe_data = module("sft_packed"), module("recipe_data")
ROWS = [{"question": f"What is {i}?", "answer": f"A number: {i}.", "n": i} for i in range(10)]
NAMED = {"prompt_column": "question", "completion_column": "answer"}
MESSAGES = [{"role": "user", "content": "Why?"}]


def write(path, rows):
    """Write `rows` in the format of the file's ending, and return its name."""
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_rows(path, rows)
    return str(path)


def load(name, *, chat_template=None, prompt_template=None, needs_test=False, **named):
    """Return the rows to train and those held out, of a run with these settings."""
    run = PackedSFTConfig("unused", prompt_template=prompt_template, use_cpu=True, bf16=False)
    tokenizer = SimpleNamespace(chat_template=chat_template)
    arguments = recipe_data.DataArguments(dataset_name=name, **named)
    return recipe_data.load_data(arguments, run, tokenizer, needs_test=needs_test)


# --- what it reads ------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".parquet"])
def test_named_columns_of_a_file_or_a_stream_become_prompt_and_completion(tmp_path, ending):
    name = write(tmp_path / f"data{ending}", ROWS)
    train, test = load(name, **NAMED)
    assert test is None
    assert train.column_names == ["prompt", "completion"]
    assert train[3] == {"prompt": "What is 3?", "completion": "A number: 3."}
    stream, _ = load(name, dataset_streaming=True, **NAMED)
    assert isinstance(stream, IterableDataset)
    assert list(stream) == list(train)


def test_a_folder_has_splits_and_a_file_a_share_to_hold_out(tmp_path):
    write(tmp_path / "train.jsonl", ROWS[:7])
    write(tmp_path / "test.jsonl", ROWS[7:])
    train, test = load(str(tmp_path), needs_test=True, **NAMED)
    assert (len(train), len(test), test[0]["prompt"]) == (7, 3, "What is 7?")
    train, test = load(str(tmp_path / "train.jsonl"), test_split_size=0.3, **NAMED)
    assert (len(train), len(test)) == (4, 3)
    assert {*train["prompt"], *test["prompt"]} == {row["question"] for row in ROWS[:7]}


def test_rows_of_later_files_bring_keys_and_no_key_is_invented(tmp_path, monkeypatch):
    """`datasets` reads the columns of the first 10 MB of the first file alone."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    answer = {"role": "assistant", "content": "So."}
    plain = [{"messages": [*MESSAGES, answer]}] * 3
    named = [{"messages": [*MESSAGES, answer | {"name": "B"}], "loss_weight": 0.5}] * 2
    write(tmp_path / "data" / "a.jsonl", plain)
    write(tmp_path / "data" / "b.jsonl", named)
    with pytest.raises(DatasetGenerationError):
        load_dataset(str(tmp_path / "data"), split="train")
    train, _ = load(str(tmp_path / "data"))
    assert [row["messages"] for row in [*plain, *named]] == train["messages"][:]
    assert train["loss_weight"][:] == [None] * 3 + [0.5] * 2
    traces = {"id": "1", "source": "s", "model": "m", "system_prompt": "p", **plain[0]}
    with pytest.raises(DatasetGenerationError):
        load_dataset("json", data_files=write(tmp_path / "traces.jsonl", [traces]))
    assert load_rows(str(tmp_path / "traces.jsonl"))[0] == traces


UNKNOWN = [
    ("--max_lenght 3", r"--max_lenght is unknown; did you mean --max_length\?"),
    ("--warmup_ratio=0.1", "--warmup_ratio is unknown; write --warmup_steps, where"),
    ("--evaluation_strategy steps", "--evaluation_strategy is unknown; write --eval_strategy"),
    ("--config old.yaml", "--max_seq_length is unknown; write --max_length"),
    ("more", "'more' belongs to no option"),
]


@pytest.mark.parametrize(("words", "sentence"), UNKNOWN)
def test_an_unknown_option_is_refused_as_in_a_preview(tmp_path, monkeypatch, words, sentence):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.yaml").write_text("max_seq_length: 64\n")
    for recipe in ("sft_packed", "chat_data"):
        with pytest.raises(ValueError, match=f"^{sentence}"):
            parse(recipe, ["--model_name_or_path", "m", "--dataset_name", "d", *words.split()])


HINTS = [
    ("question answer", "--prompt_column question --completion_column answer"),
    ("instruction input output", "--prompt_template alpaca --completion_column output"),
]


@pytest.mark.parametrize(("row", "options"), HINTS)
def test_columns_that_no_option_names_are_refused_with_options_that_fit(tmp_path, row, options):
    name = write(tmp_path / "data.jsonl", [{name: f"the {name}" for name in row.split()}] * 3)
    with pytest.raises(ValueError, match=f"these options fit: {options}"):
        load(name)
    words = options.replace("--", "").split()
    train, _ = load(name, **dict(zip(words[::2], words[1::2], strict=True)))
    assert f"the {row.split()[0]}" in train[0]["prompt"]


def test_strings_become_messages_where_the_tokenizer_has_a_chat_template(tmp_path, capsys):
    name = write(tmp_path / "data.jsonl", ROWS)
    train, _ = load(name, chat_template="any", **NAMED)
    assert train[0] == {
        "prompt": [{"role": "user", "content": "What is 0?"}],
        "completion": [{"role": "assistant", "content": "A number: 0."}],
    }
    assert "--chat false" in capsys.readouterr().out  # decided for the user, so said
    plain, _ = load(name, chat_template="any", chat=False, **NAMED)
    assert plain[0] == {"prompt": "What is 0?", "completion": "A number: 0."}


# --- what it refuses ----------------------------------------------------------------------------


BAD_DATA = [
    ("data.jsonl", {"prompt_template": "{q}"}, "'q' among .*--prompt_template"),
    ("data.jsonl", {"prompt_template": "{n}", **NAMED}, "not both"),
    ("data.jsonl", {"messages_column": "chat", **NAMED}, "name no prompt"),
    ("data.jsonl", {"test_split_size": 1.5, **NAMED}, "between 0 and 1"),
    ("no/such/folder", NAMED, "no folder and no file that ends in .json, .jsonl, .parquet"),
    ("empty.jsonl", NAMED, "it is empty"),
    ("missing.jsonl", NAMED, "row 1 has no value in the column 'answer'"),
    ("images.jsonl", {}, "'images'.* recipes/vision.py"),
    ("data.jsonl", {"needs_test": True, **NAMED}, 'split "test".*; .* --test_split_size 0.02'),
    ("broken.jsonl", {}, r"line 3 of .*broken\.jsonl is no JSON: .* \(column 8\); mend or"),
    ("broken.json", {}, r"line 2 of .*broken\.json is no JSON: "),
    ("kinds", {}, r"column 'n' of .* has values of several types \(int, text\); write one"),
]


@pytest.mark.parametrize(("file", "arguments", "sentence"), BAD_DATA)
def test_bad_data_is_refused_in_one_sentence(tmp_path, file, arguments, sentence):
    write(tmp_path / "data.jsonl", ROWS)
    write(tmp_path / "empty.jsonl", [])
    write(tmp_path / "missing.jsonl", [ROWS[0], ROWS[1] | {"answer": None}])
    good = json.dumps({"n": 1}) + "\n"
    (tmp_path / "broken.jsonl").write_text(good * 2 + '{"n": 1\n' + good)
    (tmp_path / "broken.json").write_text("[" + good + "; 2]")
    write(tmp_path / "kinds" / "a.jsonl", [{"n": 1}])
    write(tmp_path / "kinds" / "b.jsonl", [{"n": "one"}])
    write(tmp_path / "images.jsonl", [{"messages": MESSAGES, "images": ["a.png"]}])
    with pytest.raises(ValueError, match=sentence) as refusal:
        load(str(tmp_path / file), **arguments)
    assert "\n" not in str(refusal.value)


def test_bad_arguments_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="max_length"):  # no document is left
        sft_packed.main(["--max_length", "4", "--overflow", "drop"])
    assert list(tmp_path.iterdir()) == []


# --- the demo -----------------------------------------------------------------------------------


def test_what_the_user_says_wins_over_the_demo_and_the_yaml_file():
    assert sft_packed.parse(["--learning_rate", "0.5"])[1].learning_rate == 0.5
    config = ["--config", str(FOLDER / "sft_gsm8k.yaml")]
    data_args, training_args, model_args = sft_packed.parse([*config, "--use_peft"])
    assert (data_args.completion_column, training_args.learning_rate) == ("answer", 5e-5)
    assert model_args.use_peft
    assert sft_packed.parse([*config, "--learning_rate", "0.5"])[1].learning_rate == 0.5


def test_the_committed_demo_is_what_its_script_writes(tmp_path):
    def files_in(folder):
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder): path.read_bytes() for path in files}

    module("make_demo_data").main(tmp_path)
    assert files_in(tmp_path) == files_in(FOLDER / "demo")


def test_the_demo_runs_and_saves_a_model_that_loads(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--max_steps", "2", "--num_samples", "4"]
    metrics = sft_packed.main([*options, "--output_dir", "out"])
    assert metrics["exact_match_before"] == 0
    assert metrics["eval_loss"] > 0
    printed = capsys.readouterr().out
    assert "Exact match on 4 held-out prompts: 0.0% before" in printed
    assert re.search(r"^step     2 · epoch 0.01 · loss ", printed, flags=re.M)
    assert re.search(r"Training loss: \d\.\d+ at step 1, \d\.\d+ at step 2\.\n", printed)
    assert re.search(r"2 optimizer steps \(an epoch has \d+\) are too few to expect", printed)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


@pytest.mark.slow
def test_the_demo_learns_its_task(tmp_path):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
    command += ["--num_machines", "1", str(FOLDER / "sft_packed.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    found = re.search(r"Exact match on 200 held-out prompts: (.+)% before, (.+)% after", output)
    assert found, output[-5000:]
    before, after = map(float, found.groups())
    assert before <= 10
    assert after >= 80
