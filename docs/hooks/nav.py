"""Leave pages out of the navigation that are not written yet; what is written must be in it."""

from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]

# Written apart from the rest. Any other missing page fails the strict build.
MAY_BE_MISSING = {"distributed.md"}


def present(nav):
    """Return `nav`, lists of {title: page or list}, without missing pages that may be missing."""
    if isinstance(nav, list):
        return [kept for kept in map(present, nav) if kept not in (None, {})]
    if isinstance(nav, dict):
        return {title: kept for title, page in nav.items() if (kept := present(page)) is not None}
    return None if nav in MAY_BE_MISSING and not (DOCS / nav).exists() else nav


def on_config(config):
    config.nav = present(config.nav)
    return config
