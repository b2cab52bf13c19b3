"""docs/compatibility.md holds every architecture once, and its counts add up."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def test_the_stored_page_holds_every_architecture_once_and_its_counts_add_up():
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([^`]+)` \| ([^|,]+?)(?:,[^|]+)? \| ", page, re.M)
    stored = [name for name, _ in rows]
    assert len(set(stored)) == len(stored) > 250
    counted = {
        "shares prefixes exactly": len(re.findall(r"^\| `\S+` \| [^|]+ \| exact \| ", page, re.M)),
        "packs images exactly": len(re.findall(r"^\| .* \| exact, `\w+` \| ", page, re.M)),
        "exact in one row": sum(here == "one row" for _, here in rows),
        "exact as padded rows": sum(here == "padded rows" for _, here in rows),
        "not built": sum(here == "not built" for _, here in rows),
        "**all**": len(rows),
    }
    for result, count in counted.items():
        assert f"| {result} | {count} |" in page
