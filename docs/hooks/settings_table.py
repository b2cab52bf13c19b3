"""A list of the fields of `PackedSFTConfig`, from its source: name, type, default, help."""

import ast
import re
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[2] / "trl_packing" / "config.py"

# A quoted value, a name with an underscore, or both: packing_strategy='wrapped', eval_loss_<x>
_NAME = re.compile(r"(?<!\w)(?:\w+=)?'[^'\n]+'(?!\w)|\b[a-z]+(?:_(?:[a-z0-9]+|<\w+>))+(?:=\w+)?")
_MARK = "<!-- settings -->"


def fields() -> list[tuple[str, str, str, str]]:
    """Return (name, type, default, help) of every field that `PackedSFTConfig` adds or changes."""
    body = ast.parse(CONFIG.read_text()).body
    classes = {node.name: node.body for node in body if isinstance(node, ast.ClassDef)}
    nodes = [*classes["PackedSFTConfig"], *classes["PackingOptions"]]
    return [_field(node) for node in nodes if isinstance(node, ast.AnnAssign)]


def _field(node: ast.AnnAssign) -> tuple[str, str, str, str]:
    call = node.value
    assert isinstance(call, ast.Call), f"{ast.unparse(node)}: expected setting(...)"
    default, help = call.args[0], call.args[1]
    words = ast.literal_eval(help)
    return ast.unparse(node.target), ast.unparse(node.annotation), ast.unparse(default), words


def list_of_settings() -> str:
    """Return the fields as Markdown: a heading each, so that a link can lead to it."""
    return "\n\n".join(
        f"### `{name}` {{ #{name} }}\n\n`{kind}`, default `{default}`\n\n{_shown(words)}"
        for name, kind, default, words in fields()
    )


def _shown(words: str) -> str:
    """Return a help text as Markdown: names and values as code, the rest escaped."""
    shown = re.sub(_NAME, r"`\g<0>`", words.replace("\n", "\\n"))
    text = re.split(r"(`[^`]*`)", shown)
    text[::2] = [part.replace("<", "&lt;").replace("#", "\\#") for part in text[::2]]
    return "".join(text)


def on_page_markdown(markdown, page, config, files):
    return markdown.replace(_MARK, list_of_settings()) if _MARK in markdown else markdown
