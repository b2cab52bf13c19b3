"""`datasets:` of TRL's sft.py works in sft_packed.py, and shares beside it reach the trainer."""

import pytest
import yaml
from datasets import concatenate_datasets
from helpers.prepared import write_rows
from helpers.recipes import module
from helpers.runs import call_of_command, run_of_call
from trl import DatasetMixtureConfig, get_dataset

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
    "trl": [{"prompt": "Why?", "completion": f"Because of {i}."} for i in range(30)],
    "more": [{"prompt": f"And {i}?", "completion": f"Another: {i}."} for i in range(12)],
}
OWN = {
    "alpaca": {"prompt_template": "{instruction}\n{input}\n", "completion_column": "output"},
    "math": {"prompt_column": "question", "completion_column": "answer"},
    "tools": {"messages_column": "talk"},
    "web": {"dataset_text_field": "body"},
    "trl": {},
}


def config_of(tmp_path, own, **more) -> str:
    """Write the files of some sources, and a YAML file with an entry for each."""
    for name, rows in FILES.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    settings = {
        "model_name_or_path": str(module("sft_packed").DEMO_FILES / "tokenizer"),
        "datasets": [{"path": str(tmp_path / f"{name}.jsonl"), **own[name]} for name in own],
        "max_length": 128,
        "output_dir": str(tmp_path / "out"),
        "report_to": "none",
        **more,
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return str(tmp_path / "run.yaml")


def call_of(config):
    """Return the arguments of the trainer that the recipe would build."""
    return call_of_command("--config", config)


@pytest.mark.parametrize("shares", [(None, None), (0.5, 0.5), (0.75, 0.25)])
def test_the_rows_are_those_of_trl(tmp_path, shares):
    """TRL's own reader takes a file by its format."""
    own = {name: {"fraction": share} for name, share in zip(("trl", "more"), shares, strict=True)}
    sets = call_of(config_of(tmp_path, own)).train_dataset
    files = {name: {"path": "json", "data_files": str(tmp_path / f"{name}.jsonl")} for name in own}
    by_trl = DatasetMixtureConfig(datasets=[files[name] | own[name] for name in own])
    assert list(sets) == ["trl", "more"]
    assert list(concatenate_datasets([*sets.values()])) == list(get_dataset(by_trl)["train"])


def test_each_entry_names_its_own_columns_and_shares(tmp_path):
    shares = {"math": {"epochs": 2}, "web": {"epochs": 0.5, "source": "pages"}}
    own = {name: named | shares.get(name, {}) for name, named in OWN.items()}
    call = call_of(config_of(tmp_path, own))
    assert call.args.mixture == {"math": {"epochs": 2}, "pages": {"epochs": 0.5}}
    sets = call.train_dataset
    assert {name: rows[0] for name, rows in sets.items()} == {
        "alpaca": {"prompt": "Add 0.\n0 and 1\n", "completion": "1"},
        "math": {"prompt": "What is 0?", "completion": "0."},
        "tools": {"messages": FILES["tools"][0]["talk"]},
        "pages": {"text": "A page about 0."},
        "trl": {"prompt": "Why?", "completion": "Because of 0."},
    }
    assert [len(rows) for rows in sets.values()] == [len(FILES[name]) for name in OWN]
    streams = call_of(config_of(tmp_path, own, streaming=True, max_steps=1)).train_dataset
    assert {n: list(r) for n, r in streams.items()} == {n: list(r) for n, r in sets.items()}


MISTAKES = [
    ("alpaca", {}, "alpaca: no column to train on .* options fit: prompt_template alpaca"),
    ("tools", {"messages_column": "n"}, "the 'tools' dataset .* 'messages' is int"),
    ("more", {"fractoin": 1}, "entry 2: unknown key 'fractoin'; its keys are .*fraction"),
    ("more", {"path": None}, "entry 2: no path; its keys are .*path"),
    ("more", {"source": "trl"}, "two entries of datasets have the name 'trl'"),
]


@pytest.mark.parametrize(("source", "named", "sentence"), MISTAKES)
def test_a_mistake_in_an_entry_is_one_sentence_that_names_it(tmp_path, source, named, sentence):
    config = config_of(tmp_path, {"trl": {}, source: named})
    with pytest.raises(ValueError, match=sentence) as refusal:
        run_of_call(call_of(config)).documents()
    assert "\n" not in str(refusal.value)


MISPLACED = [
    ({"eval_strategy": "steps"}, "evaluation needs a test_split_size"),
    ({"mixture": {"trl": {"epochs": 2}}}, "say the same; give one"),
]


@pytest.mark.parametrize(("more", "sentence"), MISPLACED)
def test_settings_that_belong_into_entries_are_refused(tmp_path, more, sentence):
    config = config_of(tmp_path, {"trl": {"epochs": 1}, "more": {}}, **more)
    with pytest.raises(ValueError, match=sentence):
        call_of(config)
