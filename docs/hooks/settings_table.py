"""A table of the fields of `PackedSFTConfig`, from its source: name, type, default, help."""

import ast
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[2] / "trl_packing" / "config.py"

_MARK = "<!-- settings -->"


def fields() -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, help) of every field that `PackedSFTConfig` adds or changes."""
    body = ast.parse(CONFIG.read_text()).body
    classes = {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
    nodes = [*classes["PackedSFTConfig"], *classes["PackingOptions"]]
    return [_field(node) for node in nodes if isinstance(node, ast.AnnAssign)]


def _field(node: ast.AnnAssign) -> tuple[str, str, str, str]:
    call = node.value
    assert isinstance(call, ast.Call), f"{ast.unparse(node)}: expected field(...) or _choice(...)"
    given = {k.arg: k.value for k in call.keywords}
    if "metadata" in given:
        default, metadata = given["default"], given["metadata"]
        assert isinstance(metadata, ast.Dict)
        help = next(v for k, v in zip(metadata.keys, metadata.values, strict=True) if _is_help(k))
    else:
        default, help = call.args[0], call.args[1]
    words = ast.literal_eval(help)
    return ast.unparse(node.target), ast.unparse(node.annotation), ast.unparse(default), words


def _is_help(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value == "help"


def table() -> str:
    """Return the fields as a Markdown table."""
    rows = ["| setting | type | default | |", "| --- | --- | --- | --- |"]
    for name, kind, default, words in fields():
        words, kind = (text.replace("|", "\\|") for text in (words, kind))
        rows.append(f"| `{name}` | `{kind}` | `{default}` | {_shown(words)} |")
    return "\n".join(rows)


def _shown(words: str) -> str:
    """Return a help text as Markdown, with line breaks and angle brackets escaped."""
    return words.replace("\n", "\\n").replace("<", "&lt;").replace("#", "\\#")


def on_page_markdown(markdown, page, config, files):
    return markdown.replace(_MARK, table()) if _MARK in markdown else markdown
