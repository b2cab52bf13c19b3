"""Rank pages in the search: guides, then recipes and the API, then measurements; no sources."""

import re

RANKS = {
    r"repository/(?!.*\.\w+\.md)|LOG\.md": {"boost": 0.2},
    r"repository/|recipes/.*\.yaml\.md|recipes/(make_demo|recipe)_data": {"exclude": True},
    r"api\.md|recipes/|notebooks/": {"boost": 0.5},
}


def rank(address: str) -> dict[str, float] | None:
    """Return the rank of a page by its file, such as `repository/benchmarks/results/pack.md`."""
    return next((given for files, given in RANKS.items() if re.match(files, address)), None)


def on_page_markdown(markdown, page, config, files):
    given = rank(page.file.src_uri)
    if given:
        page.meta["search"] = given
