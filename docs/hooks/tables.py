"""Name the column of each cell, so that narrow windows can show a row as a card.

docs/stylesheets/extra.css writes the name before the cell. Tables of two columns need no names:
their cells stand below each other.
"""

import re
from html import escape, unescape

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_ROW = re.compile(r"<tr>.*?</tr>", re.S)
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.S)


def named(table: str) -> str:
    """Return a table with `data-column` on the cells after the first of each row."""
    columns = [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in _HEADING.findall(table)]
    if len(columns) < 3:
        return table
    return _ROW.sub(lambda row: _named_row(row[0], columns), table)


def _named_row(row: str, columns: list[str]) -> str:
    names = iter(columns)

    def opening(cell: re.Match[str]) -> str:
        name = next(names, "")
        first = name == columns[0]
        return cell[0] if first or not name else f'<td data-column="{escape(name)}"{cell[1]}>'

    return re.sub(r"<td((?: [^>]*)?)>", opening, row)


def on_page_content(html, page, config, files):
    return _TABLE.sub(lambda table: named(table[0]), html)
