"""`datasets:` of TRL's sft.py works in sft_packed.py, and shares beside it reach the trainer."""

import json

from trl_packing.recipes import sft_packed
from trl_packing.recipes.recipe_data import SourceConfig, load_sources

import pytest
import yaml
from datasets import concatenate_datasets
from trl import DatasetMixtureConfig, get_dataset

from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import TrainingCommand

A = [{"prompt": f"What is {i}?", "completion": f"A number: {i}."} for i in range(30)]
B = [{"prompt": f"And {i}?", "completion": f"Another: {i}."} for i in range(12)]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Return the names of two files, by their sources."""
    for name, rows in (("a", A), ("b", B)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b")}


def config_of(tmp_path, entries, **more) -> str:
    path = tmp_path / "run.yaml"
    settings = {
        "model_name_or_path": str(sft_packed.DEMO_FILES / "tokenizer"),
        "datasets": entries,
        "max_length": 128,
        "output_dir": str(tmp_path / "out"),
        "report_to": "none",
        **more,
    }
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def by_trl(entries):
    """Return the training rows of TRL's own reader, which takes a file by its format."""
    given = [
        {"path": "json", "data_files": entry["path"]} | {k: entry[k] for k in entry if k != "path"}
        for entry in entries
    ]
    return get_dataset(DatasetMixtureConfig(datasets=given))["train"]


@pytest.mark.parametrize(
    "shares",
    [({}, {}), ({"fraction": 0.5}, {"fraction": 0.5}), ({"fraction": 0.75}, {"fraction": 0.25})],
)
def test_the_rows_are_those_of_trl(files, shares):
    entries = [{"path": file, **share} for file, share in zip(files.values(), shares, strict=True)]
    loaded = load_sources(
        [SourceConfig(**entry) for entry in entries], streaming=False, test_size=None, seed=0
    )
    assert list(loaded.train) == ["a", "b"]
    ours = concatenate_datasets([*loaded.train.values()])
    assert list(ours) == list(by_trl(entries))


def test_names_are_those_of_files_or_given(tmp_path, files):
    entries = [SourceConfig(path="json", data_files=files["a"])]
    entries += [SourceConfig(path=files["a"], source="c")]
    loaded = load_sources(entries, streaming=False, test_size=None, seed=0)
    assert list(loaded.train) == ["a", "c"]


def call_of(config, *more):
    """Return the arguments of the trainer that the recipe would build."""
    return TrainingCommand.from_words(["--config", config, *more]).call


def test_weights_and_epochs_become_the_mixture_of_the_run(tmp_path, files):
    entries = [
        {"path": files["a"], "epochs": 0.5, "source": "numbers"},
        {"path": files["b"], "epochs": 2},
    ]
    call = call_of(config_of(tmp_path, entries))
    assert call.args.mixture == {"numbers": {"epochs": 0.5}, "b": {"epochs": 2}}
    assert {name: len(rows) for name, rows in call.train_dataset.items()} == {
        "numbers": 30,
        "b": 12,
    }


# Files of data sets as people have them, by source.
FILES = {
    "alpaca": [
        {"instruction": f"Add {i}.", "input": "" if i % 2 else f"{i} and 1", "output": f"{i + 1}"}
        for i in range(6)
    ],
    "math": [{"question": f"What is {i}?", "answer": f"{i}."} for i in range(5)],
    "tools": [
        {"talk": [{"from": "human", "value": f"Hi {i}"}, {"from": "gpt", "value": "Ho"}], "n": i}
        for i in range(4)
    ],
    "web": [{"body": f"A page about {i}.", "url": "…"} for i in range(3)],
    "trl": [{"prompt": "Why?", "completion": f"Because of {i}."} for i in range(2)],
}
OWN = {
    "alpaca": {"prompt_template": "{instruction}\n{input}\n", "completion_column": "output"},
    "math": {"prompt_column": "question", "completion_column": "answer"},
    "tools": {"messages_column": "talk"},
    "web": {"dataset_text_field": "body"},
    "trl": {},
}


def entries_of(tmp_path, own: dict[str, dict]) -> list[dict]:
    for name, rows in FILES.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"path": str(tmp_path / f"{name}.jsonl"), **named} for name, named in own.items()]


def test_each_entry_names_its_own_columns(tmp_path):
    entries = entries_of(tmp_path, OWN)
    sets = call_of(config_of(tmp_path, entries)).train_dataset
    assert {name: rows[0] for name, rows in sets.items()} == {
        "alpaca": {"prompt": "Add 0.\n0 and 1\n", "completion": "1"},
        "math": {"prompt": "What is 0?", "completion": "0."},
        "tools": {"messages": FILES["tools"][0]["talk"]},
        "web": {"text": "A page about 0."},
        "trl": {"prompt": "Why?", "completion": "Because of 0."},
    }
    assert {name: len(rows) for name, rows in sets.items()} == {n: len(r) for n, r in FILES.items()}
    streams = call_of(config_of(tmp_path, entries, streaming=True, max_steps=1)).train_dataset
    assert {n: list(r) for n, r in streams.items()} == {n: list(r) for n, r in sets.items()}


@pytest.mark.parametrize(
    ("source", "named", "sentence"),
    [
        ("alpaca", {"prompt_column": "instrution"}, "alpaca: no column 'instrution' among instr"),
        ("alpaca", {"prompt_column": "instruction"}, "alpaca: no column 'completion' among"),
        (
            "alpaca",
            {},
            "alpaca: no column to train on among .* fit in its entry: prompt_template: alpaca",
        ),
        ("alpaca", {"prompt_template": "{q}"}, "alpaca: no column 'q' among .* with prompt_templ"),
        ("alpaca", {"prompt_template": "{q"}, "alpaca: prompt_template cannot be read"),
        ("math", OWN["math"] | {"prompt_template": "{answer}"}, "math: give prompt_column or prom"),
        ("math", OWN["math"] | {"chat": True}, "math: chat needs a chat template"),
        ("tools", {"messages_column": "n"}, "the 'tools' dataset .* 'messages' is int"),
        ("tools", OWN["tools"] | {"prompt_column": "n"}, "tools: messages_column is the whole doc"),
        ("web", {"dataset_text_field": "text"}, "web: no column 'text' among body, url: name your"),
        ("web", {"dataset_text_field": 3}, "entry 2: dataset_text_field=3 must be a text"),
        ("web", {"chat": "no"}, "entry 2: chat='no' must be true or false"),
    ],
)
def test_a_mistake_in_the_columns_of_an_entry_names_it(tmp_path, source, named, sentence):
    entries = entries_of(tmp_path, {"trl": {}, source: named})
    with pytest.raises(ValueError, match=sentence) as refusal:
        PreviewedRun.from_call(call_of(config_of(tmp_path, entries))).documents()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fractoin": 1}, "entry 1: 'fractoin' is unknown; choose among path, name"),
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"fraction": 1}, "fraction must be set for all entries of datasets, or for none"),
        ({"columns": ["text"]}, "has no column 'text' among prompt, completion"),
        ({"weight": 1, "epochs": 1}, "the entry 'a' of datasets has a weight and epochs"),
        ({"source": "b"}, "two entries of datasets have the name 'b'"),
    ],
)
def test_a_wrong_entry_is_one_sentence(tmp_path, files, change, sentence):
    config = config_of(tmp_path, [{"path": files["a"], **change}, {"path": files["b"]}])
    with pytest.raises(ValueError, match=sentence):
        call_of(config)


def test_evaluation_needs_rows_that_are_held_out(tmp_path, files):
    config = config_of(tmp_path, [{"path": file} for file in files.values()], eval_strategy="steps")
    with pytest.raises(ValueError, match="evaluation needs a test_split_size"):
        call_of(config)


@pytest.mark.slow
def test_the_recipe_trains_a_mixture(tmp_path, files, capsys):
    model = tmp_path / "model"
    quick = ["--max_steps", "1", "--num_samples", "0", "--run_page", "false"]
    sft_packed.main(["--output_dir", str(model), *quick])
    entries = [{"path": files["a"], "epochs": 0.5}, {"path": files["b"], "epochs": 2}]
    config = config_of(
        tmp_path,
        entries,
        model_name_or_path=str(model),
        max_steps=2,
        test_split_size=0.2,
        source_column="source",
        eval_strategy="steps",
        eval_steps=1,
    )
    metrics = sft_packed.main(["--config", config])
    assert {"eval_loss", "eval_loss_a", "eval_loss_b"} <= metrics.keys()
    assert " drawn of " in capsys.readouterr().out
