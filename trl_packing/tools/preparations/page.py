"""A comparison of two preparations as an HTML page: counts, then differences side by side."""

from collections.abc import Sequence
from typing import Any

from trl_packing.formatting.printable import escape_text
from trl_packing.pages.page import HtmlPage, asset, cards, columns, escape, page, section, table
from trl_packing.tools.preparations.compare import Comparison, Difference
from trl_packing.tools.preparations.excerpt import Excerpt, ShownToken, excerpts
from trl_packing.tools.preparations.side import Tokens
from trl_packing.tools.preparations.text import heading, outcomes, totals, verdict

_LEGEND = (
    '<div class="legend"><span class="target">trained</span><span class="prompt">not trained</span>'
    '<span class="differs">differs</span></div>'
)


def comparison_page(
    comparison: Comparison, tokenizers: Sequence[Any], *, title: str, command: str = ""
) -> HtmlPage:
    """Return the HTML page, which a notebook shows as the value of a cell.

    Args:
        comparison: of two preparations.
        tokenizers: of both.
        title: of the page.
        command: the command line that made it; "" leaves it out.
    """
    sections = [
        f"<p>{escape(verdict(comparison))}</p>",
        section("Rows", cards((f"{number:,}", name) for name, number in outcomes(comparison))),
        section("In all", table(["", *comparison.names], totals(comparison))),
    ]
    if comparison.differences:
        sections.append(_LEGEND)
    sections += [_difference(found, comparison, tokenizers) for found in comparison.differences]
    if command:
        sections.append(section("How it was made", f"<pre>{escape(command)}</pre>"))
    return page(title, sections, style=asset("rows.css"))


def _difference(difference: Difference, comparison: Comparison, tokenizers: Sequence[Any]) -> str:
    found = excerpts(difference, tokenizers, before=80, after=240)
    return section(
        heading(difference),
        columns(
            *(
                _side(name, side, excerpt)
                for name, side, excerpt in zip(
                    comparison.names, difference.sides, found, strict=True
                )
            )
        ),
    )


def _side(name: str, side: Tokens, excerpt: Excerpt) -> str:
    lengths = " + ".join(f"{length:,}" for length in side.lengths)
    facts = f"{lengths} tokens, {side.num_trained:,} trained" if side.lengths else "dropped"
    before = f'<span class="note">{excerpt.before:,} tokens … </span>' if excerpt.before else ""
    after = f'<span class="note"> … {excerpt.after:,} tokens</span>' if excerpt.after else ""
    tokens = "".join(map(_token, excerpt.tokens))
    return (
        f'<div class="document of0"><h3>{escape(name)} <span class="note"> · {facts}</span></h3>'
        f'<div class="tokens">{before}{tokens}{after}</div></div>'
    )


def _token(token: ShownToken) -> str:
    kinds = ["token", *["target"] * token.is_trained, *["differs"] * token.differs]
    about = f"id {token.token_id}, label {token.label}, weight {token.weight:g}"
    text = escape(escape_text(token.text)).replace("\n", "⏎\n") or "·"
    boundary = '<hr title="next document">' * token.starts_document
    return f'{boundary}<span class="{" ".join(kinds)}" title="{about}">{text}</span>'
