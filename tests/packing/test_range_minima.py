"""Minima of many ranges are those of slices."""

import numpy as np
import pytest

from trl_packing.packing.prefix_index import RangeMinima


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 33, 64, 500])
def test_minima_are_those_of_slices(size):
    values = np.random.default_rng(size).integers(0, 1000, size).astype(np.int32)
    starts, stops = np.triu_indices(size + 1, 1)
    expected = [values[start:stop].min() for start, stop in zip(starts, stops, strict=True)]
    assert RangeMinima(values).of(starts, stops).tolist() == expected


def test_no_ranges_have_no_minima():
    nothing = np.zeros(0, np.int64)
    assert len(RangeMinima(np.zeros(0, np.int32)).of(nothing, nothing)) == 0
