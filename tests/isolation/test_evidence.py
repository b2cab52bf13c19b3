"""The report shows the verdict on the backend in use with its numbers, or why there is none."""

import json

from architectures.tiny_step import tiny_documents
from harness import make_trainer

from trl_packing.isolation.guard import brief


def checked_line(trainer) -> str:
    return dict(line for line in trainer.packing_report.lines() if line[0])["checked"]


def test_the_numbers_are_those_of_the_check(tmp_path, capsys):
    trainer = make_trainer(tmp_path, tiny_documents(), max_length=120, max_steps=1)
    assert checked_line(trainer) == "nothing (train() checks before its first step)"
    trainer.train()
    line = checked_line(trainer)
    before, _, after = capsys.readouterr().out.partition("checking that no document of a packed")
    assert line not in " ".join(before.split())
    assert line in " ".join(after.split()), "printed after the check"
    evidence = trainer.packing_report.checked.evidence
    assert evidence.mode == "training"
    assert evidence.leak > 100 * evidence.difference
    assert f"differs by {brief(evidence.difference)}" in line
    written = json.loads(trainer.packing_report.to_json())["checked"]
    assert written["verdict"] == "isolated"
    assert written["evidence"]["leak"] == evidence.leak
