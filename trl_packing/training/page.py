"""One self-contained HTML file: no framework, no external request, light and dark.

sections of HTML, data for the script  →  page()  →  text of a file that opens from disk

Text of a data set reaches HTML only through `escape`, and scripts only through the JSON of `page`.
"""

import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from trl_packing.data.printable import escape_hidden

# The page may neither load nor send anything, whatever text it holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def escape(text: object) -> str:
    """Return `text` as HTML that shows it; hidden characters are shown as escapes."""
    return html.escape(escape_hidden(str(text)))


class HtmlPage(str):
    """The text of an HTML file; a notebook shows it in a frame."""

    def _repr_html_(self) -> str:
        style = "width:100%;height:900px;border:0"
        return f'<iframe srcdoc="{html.escape(self)}" style="{style}"></iframe>'


def page(
    title: str,
    sections: Iterable[str],
    *,
    data: Any = None,
    script: str = "",
    style: str = "",
    note: str = "",
) -> HtmlPage:
    """Return the text of an HTML file.

    Args:
        title: plain text, shown as heading.
        sections: HTML, from the functions of this folder.
        data: JSON for the script, which finds it as ``data``.
        script: JavaScript, run when the page is loaded.
        style: CSS, after that of all pages.
        note: plain text, shown beside the title in a lighter color.
    """
    code = f"const data = JSON.parse(document.getElementById('data').textContent);\n{script}"
    parts = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title>",
        f"<style>\n{asset('page.css')}{style}</style>\n</head>\n<body>",
        f"<h1>{_with_note(title, note)}</h1>",
        *sections,
        f'<script type="application/json" id="data">{json_in_html(data)}</script>' * bool(script),
        f"<script>{{\n{code}\n}}</script>" * bool(script),
        "</body>\n</html>\n",
    )
    return HtmlPage("\n".join(parts))


def check_can_write(option: str, path: str | None) -> None:
    """Raise ValueError if a page cannot be written to `path`, or would replace other data.

    Args:
        option: its name on the command line.
        path: of a new file, or of an older page; None if the option is not given.
    """
    if path is None:
        return
    file = Path(path)
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: its folder does not exist; create it first")
    if file.is_dir():
        raise ValueError(f"{option} {path or repr(path)} is a folder; name a file")
    if file.is_file() and file.stat().st_size:
        with file.open("rb") as opened:
            if not opened.read(16).lower().lstrip().startswith((b"<!doctype", b"<html")):
                raise ValueError(f"{option} {path} exists and is no page; name another file")


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def json_in_html(data: Any) -> str:
    """Return `data` as JSON that cannot end the script element around it. NaN becomes null."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def section(heading: str, *content: str, note: str = "") -> str:
    """Return content under a heading, with a note in a lighter color beside it."""
    beside = _with_note(heading, note)
    return f"<section>\n<h2>{beside}</h2>\n" + "\n".join(content) + "\n</section>"


def columns(*content: str) -> str:
    """Return blocks side by side, below each other on a narrow screen."""
    return '<div class="columns">' + "".join(f"<div>{block}</div>" for block in content) + "</div>"


def cards(items: Iterable[tuple[str, str]]) -> str:
    """Return figures as cards: (value, name)."""
    card = '<div class="card"><b>{}</b><span>{}</span></div>'
    shown = "".join(card.format(escape(value), escape(name)) for value, name in items)
    return f'<div class="cards">{shown}</div>'


def figure(title: str, content: str, *, note: str = "") -> str:
    """Return a chart under its title."""
    return f"<figure><figcaption>{_with_note(title, note)}</figcaption>{content}</figure>"


def bars(items: Iterable[tuple[str, float, str]], *, color: str = "var(--blue)") -> str:
    """Return horizontal bars from 0: (name, length, words at the end)."""
    items = list(items)
    longest = max((length for _, length, _ in items), default=0) or 1
    line = '<i style="width:{:.2f}%;background:{}"></i>'
    shown = [
        f'<span>{escape(name)}</span><div class="bar">'
        f"{line.format(100 * length / longest, color)}</div><span>{escape(words)}</span>"
        for name, length, words in items
    ]
    return f'<div class="bars">{"".join(shown)}</div>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, marked: int | None = None
) -> str:
    """Return a table that scrolls sideways on a narrow screen.

    Args:
        head: names of the columns.
        rows: cells; numbers align to the right, except in the first column.
        marked: the row in bold.
    """
    header = "".join(f"<th>{escape(name)}</th>" for name in head)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = [f"<tr{' class=this' * (i == marked)}>{row}</tr>" for i, row in enumerate(cells)]
    return (
        f'<div class="scroll"><table>\n<thead><tr>{header}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def _with_note(title: str, note: str) -> str:
    return escape(title) + (f' <span class="note">{escape(note)}</span>' if note else "")
