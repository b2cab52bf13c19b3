"""SECURITY.md is true: no dynamic code, no pickles, no templates in data."""

import ast
from pathlib import Path

import pytest
from harness import make_trainer
from helpers.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[1]
FILES = [*sorted((ROOT / "trl_packing").rglob("*.py")), *sorted((ROOT / "recipes").glob("*.py"))]

# Calls that run code or unpickle. Methods of models (`model.eval()`) have an owner.
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "pickle.load", "pickle.loads",
    "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "joblib.load", "marshal.loads",
}  # fmt: skip
FORBIDDEN_MODULES = {"pickle", "subprocess", "marshal", "shelve", "dill", "cloudpickle"}


def dangers_in(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if name in FORBIDDEN:
                found.append(name)
            if name in ("np.load", "numpy.load") and options.get("allow_pickle") != "False":
                found.append(name)
            if options.get("trust_remote_code") == "True":
                found.append("trust_remote_code=True")
        elif isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module in FORBIDDEN_MODULES:
            found.append(node.module)
    return found


def test_nothing_runs_code_or_unpickles():
    assert {path: found for path in FILES if (found := dangers_in(path.read_text()))} == {}


def test_a_prompt_template_takes_columns_and_no_attributes(tmp_path):
    rows = [{"query": "{response} {query.__class__}", "response": "four"}]
    trainer = make_trainer(tmp_path, rows, prompt_template="Q: {query}")
    text = tiny_tokenizer().decode(trainer.train_dataset[0]["input_ids"])
    assert text == "Q: {response} {query.__class__}four<eos>"  # the text of a row is no template
    for attack in ("{query.__class__}", "{query.__class__.__mro__}", "{query[0]}"):
        with pytest.raises(ValueError, match="column"):
            make_trainer(tmp_path, rows, prompt_template=attack)
