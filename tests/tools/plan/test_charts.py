"""Charts show the numbers that they are given."""

import re

import numpy as np
import pytest

from trl_packing.tools.plan.charts import histogram

BAR = re.compile(r"([\d.,]+)(?: to ([\d.,]+))?: ([\d,]+) ")


def shown(chart):
    """Return first value, last value and count of each bar."""
    titles = [BAR.match(title.replace(",", "")) for *_, title in chart["bars"]]
    return [(float(t[1]), float(t[2] or t[1]), int(t[3])) for t in titles]


@pytest.mark.parametrize("high", [3, 32, 40_000])
def test_the_bars_of_a_histogram_hold_each_value_once(high):
    values = np.random.default_rng(0).integers(1, high, 5000, endpoint=True)
    found = shown(histogram(values, label="tokens", counted="documents"))
    assert 2 < len(found) < 45
    for first, last, count in found:
        assert count == ((values >= first) & (values <= last)).sum()
    assert sum(count for *_, count in found) == len(values)


def test_a_long_tail_gets_a_logarithmic_axis_with_every_value():
    values = np.append(np.full(900, 100), [5, 40_000])
    found = shown(histogram(values, label="tokens"))
    assert [(count, first <= 100 <= last) for first, last, count in found] == [
        (1, False),
        (900, True),
        (1, False),
    ]
