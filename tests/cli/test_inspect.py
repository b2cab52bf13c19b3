"""`trl-packing inspect` draws micro-batches."""

import json
import re

import pytest
from datasets import Dataset
from helpers.tiny import save_tiny_model

from trl_packing.cli import main


@pytest.fixture
def command(tmp_path):
    """The options of a run on conversations."""
    turns = [("user", "Why?"), ("assistant", "Because."), ("user", "Who?"), ("assistant", "Me.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    data = tmp_path / "chats.jsonl"
    Dataset.from_list([{"messages": messages[: 2 + 2 * (i % 2)]} for i in range(6)]).to_json(data)
    model = save_tiny_model(tmp_path / "model", "llama", chat=True)
    return ["inspect", "--model", model, "--data", str(data), "--max_length", "64"]


def test_micro_batches_are_drawn_with_the_prefixes_that_they_share(command, capsys):
    command[-1] = "512"
    prompt = "one two three four five six seven eight nine ten " * 2
    rows = [{"prompt": prompt, "completion": answer} for answer in ("Yes.", "No.", "Yes, and no.")]
    Dataset.from_list(rows).to_json(command[4])
    assert main([*command, "--prefix_sharing", "off", "--micro_batches", "1"]) == 0
    apart = capsys.readouterr().out
    assert apart.startswith("micro-batch 1, bin 1 · ")
    assert "═" not in apart
    shared = [*command, "--prefix_sharing", "bin", "--micro_batches", "1"]
    assert main(shared) == 0
    heading, *lines = capsys.readouterr().out.rstrip().split("\n")
    assert re.fullmatch(
        r"micro-batch 1 · 3 documents · \d+ tokens instead of \d+ \([\d.]+× fewer\)", heading
    )
    assert lines[0].startswith("═")
    assert all(line.startswith(" ") and " above" in line for line in lines[1:])
    assert all(len(line) <= 80 for line in lines)
    assert main([*shared, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["packed_rows"]
    assert {d["row"] for d in row["documents"]} == {0, 1, 2}
    computed = sum(d["tokens"] - d["shared"] for d in row["documents"])
    assert row["tokens"] == computed < sum(d["tokens"] for d in row["documents"])
    assert main([*shared, "2"]) == 2
    assert "micro-batch 2 is not among the 1 of the epoch" in capsys.readouterr().err
