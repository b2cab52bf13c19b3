"""Append public names of `trl_packing` that the API page does not show yet."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "trl_packing"

_MARK = "<!-- other public names -->"


def homes() -> dict[str, str]:
    """Return public name -> module, from `_HOME` in the package's `__init__.py`."""
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME":
            return ast.literal_eval(node.value)
    raise LookupError(f"{PACKAGE / '__init__.py'} has no _HOME")


def completed(markdown: str) -> str:
    """Return the page with its missing public names."""
    shown = set(re.findall(r"^::: trl_packing\.[\w.]*?(\w+)$", markdown, re.M))
    lacking = {name: home for name, home in homes().items() if name not in shown}
    blocks = [f"::: trl_packing.{home}.{name}" for name, home in lacking.items()]
    return markdown.replace(_MARK, "\n\n".join(["## More", *blocks]) if blocks else "")


def on_page_markdown(markdown, page, config, files):
    return completed(markdown) if _MARK in markdown else markdown
