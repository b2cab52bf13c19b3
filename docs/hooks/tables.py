"""Tables that fit: cells know their column, and long code may be broken at its punctuation.

In narrow windows, docs/stylesheets/extra.css shows a row as a card and writes the name of the
column before the cell. Cells of two columns stand below each other and need no names.
"""

import re
from html import escape, unescape

_TABLE = re.compile(r"<table>.*?</table>", re.S)
_ROW = re.compile(r"<tr\b.*?</tr>", re.S)
_CELL = re.compile(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.S)
_NARROW = 48  # characters that fit a window of 390 pixels, with 3 for the margins of a cell
_CODE = re.compile(r"<code>([^<]{16,})</code>")
_PLACE = re.compile(r"(?<=[_=/.,(\[])(?=\w)")
_HEADING = re.compile(r"<th\b[^>]*>(.*?)</th>", re.S)


def named(table: str) -> str:
    """Return a table with `data-column` on the cells after the first of each row.

    A table that fits a narrow window as it is gets `data-narrow` instead; one of many small cells
    also gets `data-dense`.
    """
    columns = [_text(cell) for cell in _HEADING.findall(table)]
    if len(columns) > 12:
        return table.replace("<table>", "<table data-narrow data-dense>")
    widths = zip(*map(_widths, _ROW.findall(table)), strict=False)
    if sum(max(column) + 3 for column in widths) <= _NARROW:
        return table.replace("<table>", "<table data-narrow>")
    if len(columns) < 3:
        return table
    return _ROW.sub(lambda row: _named_row(row[0], columns), table)


def _widths(row: str) -> list[int]:
    return [len(_text(cell)) for cell in _CELL.findall(row)]


def _text(cell: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", cell)).strip()


def _named_row(row: str, columns: list[str]) -> str:
    names = iter(columns)

    def opening(cell: re.Match[str]) -> str:
        name = next(names, "")
        first = name == columns[0]
        return cell[0] if first or not name else f'<td data-column="{escape(name)}"{cell[1]}>'

    return re.sub(r"<td((?: [^>]*)?)>", opening, row)


def breakable(table: str) -> str:
    """Return a table whose long code has places to break it: after _ = / . , and brackets."""

    def broken(code: re.Match[str]) -> str:
        return f"<code>{_PLACE.sub('<wbr>', code[1])}</code>"

    return _CODE.sub(broken, table)


def on_page_content(html, page, config, files):
    return _TABLE.sub(lambda table: breakable(named(table[0])), html)
