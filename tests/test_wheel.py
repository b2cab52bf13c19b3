"""The wheel holds the right files, and works outside the repository."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from helpers.repository import copy_repository, files_of_repository

import trl_packing

VERSION = trl_packing.__version__

# The smallest possible run, in a folder outside the repository.
TRAINING = """
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
import trl_packing.recipes
from trl_packing import PackedSFTConfig, PackedSFTTrainer

tokenizer = AutoTokenizer.from_pretrained(trl_packing.recipes.FOLDER / "demo" / "tokenizer")
config = LlamaConfig(
    vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)
args = PackedSFTConfig(
    output_dir="out", max_length=64, max_steps=2, bf16=False, report_to="none", use_cpu=True,
)
trainer = PackedSFTTrainer(
    LlamaForCausalLM(config), args, processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": ["one two three " * n for n in range(1, 9)]}),
)
print("loss", trainer.train().training_loss, trl_packing.__file__)
"""


# --- built and installed --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from the source distribution as `python -m build` does."""
    out = tmp_path_factory.mktemp("dist")
    # Build a copy, so that stray files of a developer's folder change nothing.
    source = tmp_path_factory.mktemp("source") / "repository"
    copy_repository(source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    found = folder / "bin" / "python"
    # This adds the dependencies of this environment but not its editable install, because .pth
    # files are not read in folders that a .pth file names.
    get = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([found, "-c", get], capture_output=True, text=True, check=True)
    here = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    Path(site.stdout.strip(), "dependencies.pth").write_text("\n".join(here))
    install = [found, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    return found


def outside(python: Path, folder: Path, *arguments: str) -> str:
    """Run the environment's Python in `folder`, and return its output."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_the_recipes_and_nothing_else(wheel):
    assert wheel.name == f"trl_packing-{VERSION}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    inside = re.compile(r"trl_packing(-[\d.]+\.dist-info)?/(?!.*(^|/)(tests?_|__pycache__))")
    assert [name for name in names if not inside.match(name)] == []
    assert {*files_of_repository("trl_packing")} <= {*names}, "style sheets and scripts too"
    assert any(n.endswith("licenses/LICENSE") for n in names)
    carried = {n.removeprefix("trl_packing/") for n in names if "/recipes/" in n}
    assert carried == {*files_of_repository("recipes"), "recipes/__init__.py"}


@pytest.mark.slow
def test_the_wheel_works_outside_the_repository(python, tmp_path):
    which = "import trl_packing, importlib.metadata as m; print(trl_packing.__file__)"
    version = "print(trl_packing.__version__, m.version('trl-packing'))"
    place, versions = outside(python, tmp_path, "-c", f"{which}; {version}").splitlines()
    assert Path(place).is_relative_to(python.parents[1])
    assert versions == f"{VERSION} {VERSION}"
    command = subprocess.run(
        [python.with_name("trl-packing"), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert command.returncode == 0, command.stderr
    assert "verify" in command.stdout
    output = outside(python, tmp_path, "-c", TRAINING)
    assert "packed into" in output
    assert str(python.parents[1]) in output.splitlines()[-1]
