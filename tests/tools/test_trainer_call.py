"""A training script of a user runs up to its trainer, and nothing is trained or left changed."""

import argparse
import json
import sys

import pytest
from helpers.command import run_command, says
from helpers.runs import call_of_script, run_of_call
from helpers.tiny import save_tiny_model, tiny_rows, tiny_tokenizer
from transformers import Trainer, TrainingArguments

from trl_packing import PackedSFTTrainer

START = """
import sys
from datasets import Dataset, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl_packing import DataCollatorForCompletionOnlyLM, PackedSFTConfig, PackedSFTTrainer

model, out = sys.argv[1:3]
rows = Dataset.from_list([{"q": f"Why {i}?", "a": f"So {i}."} for i in range(6)])
texts = rows.map(lambda r: {"text": f"{r['q']} ### {r['a']}"}, remove_columns=["q", "a"])
"""
SCRIPTS = {
    "positional": "PackedSFTTrainer(model, PackedSFTConfig(out), None, texts).train()",
    "a model and a plain config": "loaded = AutoModelForCausalLM.from_pretrained(model)\n"
    "PackedSFTTrainer(loaded, SFTConfig(out, packing=True), train_dataset=texts).train()",
    "a formatting function": "PackedSFTTrainer(model, PackedSFTConfig(out), train_dataset=rows,\n"
    "    formatting_func=lambda row: row['q'] + ' ### ' + row['a']).train()",
    "a collator": "tokenizer = AutoTokenizer.from_pretrained(model)\n"
    "collator = DataCollatorForCompletionOnlyLM('###', tokenizer=tokenizer)\n"
    "PackedSFTTrainer(model, PackedSFTConfig(out), collator, texts).train()",
    "a class for GPUs, with a helper beside it": "from beside import same\n"
    "class Mine(PackedSFTTrainer):\n    pass\n\n"
    "args = PackedSFTConfig(out, bf16=True, tf32=True)\n\n"
    "def main():\n    try:\n        Mine(model, args, train_dataset=same(texts)).train()\n"
    "    except Exception:\n        print('caught')\n\n"
    "if __name__ == '__main__':\n    main()",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


def script(folder, text: str) -> str:
    (folder / "beside.py").write_text("def same(rows):\n    return rows\n")
    (folder / "train.py").write_text(START + text + "\nprint('trained')\n")
    return str(folder / "train.py")


def state():
    """Return what running a script must leave as it was."""
    inits = PackedSFTTrainer.__init__, Trainer.__init__, TrainingArguments.__post_init__
    return inits, [*sys.path], [*sys.argv], argparse.ArgumentParser.error


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_user_is_previewed(name, model, tmp_path, capsys):
    before = state()
    call = call_of_script(script(tmp_path, SCRIPTS[name]), [model, str(tmp_path / "out")])
    documents, _ = run_of_call(call).documents()
    shown = tiny_tokenizer().decode(documents[5]["input_ids"])
    assert shown.startswith("Why 5? ### So 5.")
    trained = sum(label != -100 for label in documents[5]["labels"])
    assert (trained < len(documents[5]["labels"])) == (name == "a collator")
    assert "trained" not in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert state() == before
    sys.modules.pop("beside", None)


LOSS = "def loss(outputs, labels, num_items_in_batch=None):\n    return outputs.loss\n\n"


REFUSED = [
    ("pass", "train.py builds no PackedSFTTrainer"),
    (
        "SFTTrainer(model, SFTConfig(out), train_dataset=texts).train()",
        "train.py builds trl.SFTTrainer; only a PackedSFTTrainer can be shown",
    ),
    ("PackedSFTTrainer(model, PackedSFTConfig(out))", "args and a train_dataset"),
    ("{}['key']", "KeyError: 'key' (TRL_PACKING_TRACEBACK=1 shows where)"),
    (
        f"{LOSS}texts = texts.add_column('loss_weight', [0.5] * 6)\n"
        "PackedSFTTrainer(model, PackedSFTConfig(out), None, texts, compute_loss_func=loss)",
        "loss_weight",
    ),
]


@pytest.mark.parametrize(("text", "sentence"), REFUSED)
def test_a_script_that_cannot_be_previewed_is_one_line(text, sentence, model, tmp_path, capsys):
    words = ["plan", script(tmp_path, text), model, str(tmp_path / "out")]
    last = says(capsys, *words, status=2).splitlines()[-1]
    assert last.startswith("trl-packing: ")
    assert sentence in last


def test_the_output_of_a_script_is_no_part_of_the_result(model, tmp_path, capsys):
    file = script(tmp_path, "print('loading')\n" + SCRIPTS["positional"])
    assert run_command(["plan", file, model, str(tmp_path / "out"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["documents"] == 6
    assert "loading" in err


def test_a_stream_is_read_no_further_than_needed(model, tmp_path, capsys):
    rows = [f"{i} {row['text']}" for i, row in enumerate(tiny_rows("language_modeling"))]
    text = (
        f"def read():\n    for text in {rows!r}:\n"
        f"        with open({str(tmp_path / 'read')!r}, 'a') as file:\n"
        "            print('read', text[:2], file=file)\n"
        "        yield {'text': text}\n\n"
        "stream = IterableDataset.from_generator(read)\n"
        "PackedSFTTrainer(model, PackedSFTConfig(out), train_dataset=stream).train()"
    )
    words = [script(tmp_path, text), model, str(tmp_path / "out")]
    assert run_command(["inspect", *words, "--rows", "2"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("row 2 · ")
    assert "a stream: only its first 3 rows" in err
    assert "read 7" not in (tmp_path / "read").read_text()
    out = says(capsys, "plan", *words, "--stream_rows", "8")
    assert out.startswith("The first 8 rows of a stream, as if they were all:")
    assert "documents    8 ·" in out
    none = says(capsys, "plan", *words, "--stream_rows", "0", status=2)
    assert "--stream_rows 0 must be at least 1" in none
