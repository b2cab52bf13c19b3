"""Every text in the sources of the package, with … for values, as on the page about messages."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "trl_packing"


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
