"""Lines of a report, each with a label, laid out for a terminal or a notebook.

a label and a text  →  one frame of the terminal's width, at most 100 columns
                    →  an HTML table without scripts, in the colors of the notebook
"""

import shutil
import textwrap
from collections.abc import Sequence

from trl_packing.formatting.printable import escape_hidden
from trl_packing.pages.page import escape

Line = tuple[str, str]  # label, text

_TITLE = " trl_packing "
_LABEL = 13  # columns of a label and the space behind it
_NARROWEST, _WIDEST = 50, 100

# The theme of the notebook gives text and background. Its own table styles are overridden.
_TABLE = "border-collapse:collapse;text-align:left;font-size:13px;line-height:1.5;margin:.3em 0"
_CELL = "text-align:left;vertical-align:top;padding:.1em .9em .1em 0;border:0;background:none"
_LABEL_STYLE = f"{_CELL};white-space:nowrap;font-weight:600;opacity:.7"
_TEXT_STYLE = f"{_CELL};white-space:normal;overflow-wrap:anywhere;max-width:60em"
_WARNING_STYLE = f"{_TEXT_STYLE};border-left:3px solid #d29922;padding-left:.6em"


def terminal_columns() -> int:
    """Return the columns to write in: those of COLUMNS or the terminal, between 50 and 100."""
    columns = shutil.get_terminal_size((_WIDEST, 24)).columns
    return min(max(columns, _NARROWEST), _WIDEST)


def as_text(lines: Sequence[Line], columns: int | None = None) -> str:
    """Return `lines` between two rules; long ones continue under their text.

    Args:
        lines: label and text; a line without label belongs to the one above.
        columns: most characters of a line, by default those of the terminal.
    """
    wrapped = []
    for label, text in lines:
        wrapped += textwrap.wrap(
            escape_hidden(text),
            columns or terminal_columns(),
            initial_indent=f"{label:<{_LABEL}}",
            subsequent_indent=" " * _LABEL,
            break_on_hyphens=False,
        )
    width = max(map(len, [*wrapped, _TITLE]))
    return "\n".join([f"{_TITLE:─^{width}}", *wrapped, "─" * width])


def as_html(lines: Sequence[Line]) -> str:
    """Return `lines` as a table for a notebook; text is escaped."""
    rows = "".join(
        f'<tr style="background:none"><th scope="row" style="{_LABEL_STYLE}">{escape(label)}</th>'
        f'<td style="{_WARNING_STYLE if is_warning(text) else _TEXT_STYLE}">{escape(text)}</td>'
        "</tr>"
        for label, text in lines
    )
    return f'<table style="{_TABLE}"><caption hidden>trl_packing</caption>{rows}</table>'


def is_warning(text: str) -> bool:
    return text.startswith("warning:")
