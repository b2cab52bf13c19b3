"""The messages of the package: every text in its sources, and the errors and warnings.

`…` stands for a value, as on the troubleshooting pages.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "trl_packing"

_SAYS = ("warn", "warning", "warning_once")
_MARK = "<!-- every message -->"


class Message(NamedTuple):
    """An error or a warning: its module, its kind and its text."""

    module: str
    kind: str
    text: str


def text_of(node: ast.AST) -> str | None:
    """Return the text of an expression, with … for values; None if it is not a text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is right is None else (left or "…") + (right or "…")
    return None


def one_line(text: str) -> str:
    """Return `text` with one space for each run of white space."""
    return re.sub(r"\s+", " ", text).strip()


def texts(package: Path = PACKAGE) -> Iterator[str]:
    """Yield every text in the sources of `package`."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = text_of(node)
            if text:
                yield one_line(text)


def messages(package: Path = PACKAGE) -> list[Message]:
    """Return the errors and warnings of `package`, by module, without texts of other libraries."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        for call in sorted(calls, key=lambda c: c.lineno):
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", "")
            text = text_of(call.args[0]) if call.args else None
            if (name.endswith("Error") or name in _SAYS) and text and len(text.split()) > 3:
                kind = "warning" if name in _SAYS else name
                found.append(Message(module.removesuffix(".__init__"), kind, one_line(text)))
    return found


def table() -> str:
    """Return every message as a Markdown table."""
    rows = ["| module | | message |", "| --- | --- | --- |"]
    for module, kind, text in messages():
        shown = text.replace("|", "\\|").replace("`", "'")
        rows.append(f"| `{module.removeprefix('trl_packing.')}` | {kind} | `{shown}` |")
    return "\n".join(rows)


def on_page_markdown(markdown, page, config, files):
    return markdown.replace(_MARK, table()) if _MARK in markdown else markdown
