"""Axes of a chart: values → pixels, round ticks, gridlines.

HEIGHT ┬  12k ┄┄┄┄┄┄┄┄┄┄┄┄┄┄     gridlines at round counts
       │   6k ┄┄┄┄┄┄┄┄┄┄┄┄┄┄
       ┴      ──┬────┬────┬──     round ticks, linear or logarithmic
               100  200  300
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_packing.pages.page import escape

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 20, 42
_BASE = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Axis:
    """The x-axis from `low` to `high`, in one frame of fixed size."""

    low: float
    high: float
    is_log: bool = False

    def x(self, value: float) -> float:
        """Return the place of a value in pixels."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = np.log(value), np.log(low), np.log(high)
        return float(_LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low))

    def ticks(self) -> list[float]:
        """Return round numbers on the axis."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)

    def drawn(self, label: str) -> list[str]:
        """Return the line, its ticks and its label."""
        parts = [f'<path d="M{_LEFT} {_BASE}H{WIDTH - _RIGHT}" stroke="var(--axis)"/>']
        for tick in self.ticks():
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {_BASE}v4" stroke="var(--axis)"/>')
            side = "end" if x > WIDTH - 20 else "middle"
            x = min(x, WIDTH - 1) if side == "end" else x
            parts.append(
                f'<text x="{x:.1f}" y="{_BASE + 17}" text-anchor="{side}">{short(tick)}</text>'
            )
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
        )
        return parts

    def mark(self, value: float | None) -> list[str]:
        """Return a dashed line at a value, with the value; nothing if it is not on the axis."""
        if value is None or not self.low <= value <= self.high:
            return []
        x = self.x(value)
        side = "end" if x > WIDTH / 2 else "start"
        return [
            f'<path d="M{x:.1f} {_TOP - 8}V{_BASE}" stroke="var(--red)" stroke-dasharray="4 3"/>',
            f'<text x="{x + (-5 if side == "end" else 5):.1f}" y="{_TOP - 4}" class="mark" '
            f'text-anchor="{side}">{value:,.6g}</text>',
        ]


def y_axis(
    high: float, low: float = 0.0, *, whole: bool = False
) -> tuple[list[str], Callable[[float], float]]:
    """Return gridlines with their values, and the function from a value to its pixels.

    Args:
        high: the highest value.
        low: the lowest value.
        whole: leave out ticks that are no whole numbers.
    """
    if high == low:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)

    def y(value: float) -> float:
        return float(_BASE - (_BASE - _TOP) * (value - low) / (high - low))

    parts = []
    for tick in ticks(low, high, most=4):
        if whole and tick % 1:
            continue
        if tick != 0 or low < 0:
            parts.append(
                f'<path d="M{_LEFT} {y(tick):.1f}H{WIDTH - _RIGHT}" stroke="var(--grid)"/>'
            )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    return parts, y


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between `low` and `high`, at most `most` of them."""
    step = round_up((high - low) / most)
    first = np.ceil(low / step)
    found = [float(i * step) + 0.0 for i in np.arange(first, np.floor(high / step) + 1)]
    return found if len(found) <= most else ticks(low, high, most - 1)


def round_up(value: float, steps: Sequence[float] = (1, 2, 5, 10)) -> float:
    """Return the next number that is one of `steps` × 10ⁿ."""
    magnitude = 10.0 ** np.floor(np.log10(value))
    # The margin is for rounding errors: 0.30000000000000004 is a round 0.3.
    return next(float(s * magnitude) for s in steps if s * magnitude >= value * 0.999999)


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... between `low` and `high`; fewer for each decade of a long axis."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found = [s * 10.0**d for d in decades for s in (1, 2, 5) if low <= s * 10.0**d <= high]
    return found if len(found) <= 9 else [t for t in found if f"{t:e}".startswith("1")]


def short(value: float) -> str:
    """Return a number in a few characters: 12k, 1.5M, 0.02."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.5g}"
