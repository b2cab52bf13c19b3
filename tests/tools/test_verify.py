"""`trl-packing verify` measures models on text."""

import json

from helpers.command import says


def test_a_model_that_reads_images_is_verified_on_text_and_says_so(capsys):
    words = ("verify", "recipes/vision.py", "--max_length", "256")
    found = json.loads(says(capsys, *words, "--json"))
    assert found["class"] == "LlavaNextForConditionalGeneration"
    assert [result["verdict"] for result in found["backends"]] == ["isolated"]
    assert "Text was checked; a run checks its own images." in says(capsys, *words)
