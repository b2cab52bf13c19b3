"""`trl-packing verify` measures models on text."""

import json

from helpers.command import run_command


def test_a_model_that_reads_images_is_verified_on_text_and_says_so(capsys):
    assert run_command(["verify", "recipes/vision.py", "--max_length", "256", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result["verdict"] for result in found["backends"]] == ["isolated"]
    assert run_command(["verify", "recipes/vision.py", "--max_length", "256"]) == 0
    assert "Text was checked; a run checks its own images." in capsys.readouterr().out
