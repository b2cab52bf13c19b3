"""Notebooks as pages: their text, code and stored outputs, without running them."""

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

_TERMINAL = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colors


def markdown_of(path: Path) -> str:
    """Return a notebook as Markdown."""
    return "\n\n".join(_cell(cell) for cell in json.loads(path.read_text())["cells"])


def _cell(cell: Mapping[str, Any]) -> str:
    source = _text(cell["source"])
    if cell["cell_type"] != "code":
        return source
    shown = [block for output in cell["outputs"] for block in _output(output)]
    return "\n\n".join([f"````python\n{source}\n````", *shown])


def _output(output: Mapping[str, Any]) -> Iterator[str]:
    """Yield an output of a cell in its richest form."""
    if output["output_type"] == "stream":
        yield _block(_text(output["text"]))
    elif output["output_type"] == "error":
        yield _block("\n".join(output["traceback"]))
    else:
        data = output["data"]
        if "image/svg+xml" in data:
            yield _box(_text(data["image/svg+xml"]))
        elif "image/png" in data:
            image = _text(data["image/png"]).replace("\n", "")
            yield _box(f'<img alt="output of the cell" src="data:image/png;base64,{image}">')
        elif "text/html" in data:
            yield _box(re.sub(r"<table[^>]*>", "<table>", _text(data["text/html"])))
        elif "text/plain" in data:
            yield _block(_text(data["text/plain"]))


def _box(html: str) -> str:
    return f'<div class="output">{html}</div>'


def _block(text: str) -> str:
    """Return text as a block. Of a progress bar it shows the last state, as a terminal does."""
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in _TERMINAL.sub("", text).split("\n")]
    return _box(f"<pre><code>{escape(chr(10).join(lines).strip())}</code></pre>")


def _text(source: str | list[str]) -> str:
    return source if isinstance(source, str) else "".join(source)
