"""The docstrings of the recipes and `recipes/README.md` describe the recipes as they are."""

import os
import re
import subprocess
import sys

from helpers.recipes import FOLDER, RECIPES, YAMLS


def test_every_recipe_sets_the_wait_policy_of_openmp_before_torch_is_loaded():
    """torch reads it when it is loaded; trl_packing.recipes sets it, and loads nothing."""
    for recipe in (*RECIPES, "sft_packed", "compare_packing", "padding_free"):
        text = (FOLDER / f"{recipe}.py").read_text()
        heavy = r"^(?:import|from) (?:torch|transformers|trl|datasets|accelerate)[\w.]*"
        first = re.search(heavy, text, re.MULTILINE)
        assert first is not None
        assert first[0].startswith("from trl_packing.recipes"), recipe
    code = (
        "import os, sys, trl_packing.recipes\n"
        "assert os.environ['OMP_WAIT_POLICY'] == 'PASSIVE' and 'torch' not in sys.modules"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    subprocess.run([sys.executable, "-c", code], check=True, env=inherited)


def test_the_readme_lists_every_recipe_and_every_yaml_file():
    named = set(re.findall(r"`([\w./]+\.(?:py|yaml))`", (FOLDER / "README.md").read_text()))
    parts = {"recipe_run.py", "recipe_data.py", "make_demo_data.py", "demo_pictures.py"}
    assert {path.name for path in FOLDER.glob("*.py")} - parts | {*YAMLS} <= named
    assert [name for name in named if not (FOLDER / name).exists()] == []
