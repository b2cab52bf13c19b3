"""Draw the curves of runs by matplotlib: `trl-packing compare … --png FILE`."""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite, nan
from typing import TYPE_CHECKING, Any

from trl_packing.formatting.printable import escape_hidden
from trl_packing.pages.curves import Values
from trl_packing.tools.runs.compare import Comparison, place_on
from trl_packing.training.run_curves import charts_of, num_main
from trl_packing.training.run_record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which color-blind readers tell apart.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a6d00", "#56b4e9", "#6e6e6e")
_COLUMNS = 2


def plot_runs(records: Sequence[RunRecord], comparison: Comparison) -> "Figure":
    """Return a figure with the main charts of these runs, over the axis of the comparison.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ValueError(
            "a picture is drawn by matplotlib, which is not installed; pip install "
            "'trl-packing[plots]', or leave --png out"
        ) from error
    named = [replace(r, name=name) for r, name in zip(records, comparison.runs, strict=True)]
    charts = charts_of(named)
    charts = charts[: num_main(charts)]
    over = comparison.over or "steps"
    rows = max(-(-len(charts) // _COLUMNS), 1)
    figure = Figure(figsize=(10, 2.8 * rows), layout="constrained")
    frames = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for chart, frame in zip(charts, frames, strict=False):
        frame.set_title(_plain(chart.title), loc="left", fontsize="medium")
        frame.set_xlabel("seconds of training" if over == "hours" else over)
        for curve in chart.curves:
            color = _COLORS[curve.color % len(_COLORS)]
            _draw(frame, curve.points, over, label=_plain(curve.name), color=color)
        frame.locator_params(axis="x", nbins=6)
        frame.xaxis.set_major_formatter(EngFormatter(sep=""))
        frame.grid(alpha=0.3)
        frame.spines[["top", "right"]].set_visible(False)
        frame.legend(frameon=False, fontsize="small")
    for frame in list(frames):
        frame.set_visible(False)
    return figure


def _draw(frame: Any, points: Sequence[Values], over: str, **style: Any) -> None:
    place = place_on(over)
    known = [(place(p), p[-1] if isfinite(p[-1]) else nan) for p in points]
    known = [(x, y) for x, y in known if x is not None]
    marker = "." if len(known) <= 40 else None
    frame.plot([x for x, _ in known], [y for _, y in known], marker=marker, lw=1.4, **style)


def _plain(text: str) -> str:
    """Return text that matplotlib draws as it is: neither formulas nor a hidden label."""
    text = escape_hidden(text).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
