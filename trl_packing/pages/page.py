"""One self-contained HTML file: no framework, no external request, light and dark.

A jinja2 template of this folder extends page.html. Templates escape all text, and show its hidden
characters as escapes. Scripts get data as JSON that cannot end their element.
"""

import html
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden

REPORT = "report.html"  # the lines of a report as a table

PageData = dict[str, Any]  # what a template or a script draws, as JSON


class HtmlPage(str):
    """The text of an HTML file; a notebook shows it in a frame."""

    def _repr_html_(self) -> str:
        text = html.escape(self)
        return f'<iframe srcdoc="{text}" style="width:100%;height:900px;border:0"></iframe>'


def render(template: str, **values: Any) -> HtmlPage:
    """Return the page that a template makes of `title` and what else it and page.html name."""
    page = _environment().get_template(template)
    return HtmlPage(page.render({"note": "", "styles": (), "script": "", "data": None} | values))


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=loader, autoescape=True, finalize=_shown, undefined=StrictUndefined)
    made.trim_blocks = made.lstrip_blocks = True
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])
    made.filters |= {"number": _number, "quantity": quantity}
    made.policies["json.dumps_kwargs"] = {"allow_nan": False}
    return made


def storable(value: Any) -> Any:
    """Return `value` as JSON; numbers that JSON lacks, and other objects, become texts."""
    return json.loads(json.dumps(value, default=str, skipkeys=True), parse_constant=str)


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else escape_hidden(str(value))


def _number(number: float | None, form: str = ",") -> str:
    return "–" if number is None else f"{number:{form}}".replace("-", "−")
