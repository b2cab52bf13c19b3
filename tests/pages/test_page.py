"""Pages replace pages alone, and charts show the numbers that they are given."""

import re

import numpy as np
import pytest

from trl_packing.cli.program import check_can_write
from trl_packing.pages.histograms import histogram
from trl_packing.pages.record import RunRecord
from trl_packing.pages.run_page import run_page


def test_a_page_replaces_an_older_page_and_nothing_else(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(run_page(RunRecord("a")))
    check_can_write(str(page))
    data = tmp_path / "c.jsonl"
    data.write_text('{"text": "a"}\n')
    for path, problem in ((data, "exists and is no page"), (tmp_path, "must name a file")):
        with pytest.raises(ValueError, match=f"^--html .*{problem}"):
            check_can_write(str(path))


# --- charts ---------------------------------------------------------------------------------------

BAR = re.compile(r"([\d.,]+)(?: to ([\d.,]+))?: ([\d,]+) ")


def shown(chart):
    """Return first value, last value and count of each bar."""
    titles = [BAR.match(title.replace(",", "")) for *_, title in chart["bars"]]
    return [(float(t[1]), float(t[2] or t[1]), int(t[3])) for t in titles]


LONG_TAIL = np.append(np.full(900, 100), [5, 40_000])  # its axis is logarithmic
DRAWN = [np.random.default_rng(0).integers(1, high, 5000) for high in (4, 33, 40_001)]


@pytest.mark.parametrize("values", [*DRAWN, LONG_TAIL], ids=["3", "32", "40,000", "long tail"])
def test_the_bars_of_a_histogram_hold_each_value_once(values):
    found = shown(histogram(values, label="tokens", counted="documents"))
    assert 2 < len(found) < 45
    for first, last, count in found:
        assert count == ((values >= first) & (values <= last)).sum()
    assert sum(count for *_, count in found) == len(values)
