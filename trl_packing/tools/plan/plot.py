"""Draw a plan by matplotlib: `trl-packing plan … --png FILE`."""

from typing import TYPE_CHECKING, Any

import numpy as np

from trl_packing.pages.axes import log_ticks, short
from trl_packing.pages.charts import bar_edges
from trl_packing.tools.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _GREEN, _RED, _TEXT = "#3b78d8", "#2f9e44", "#cf222e", "#57606a"


def figure_class() -> "type[Figure]":
    """Return matplotlib's class; ValueError if it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "a picture is drawn by matplotlib, which is not installed; pip install "
            "'trl-packing[plots]'"
        ) from error
    return Figure


def plot_plan(plan: RunPlan) -> "Figure":
    """Return a figure of six charts.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = figure_class()(figsize=(12, 6.4), layout="constrained", facecolor="white")
    axes = figure.subplots(2, 3).ravel()
    if plan.bins is not None:
        documents = np.diff(plan.bins.offsets)
        bins = np.arange(documents.min(), documents.max() + 2) - 0.5
        axes[1].hist(documents, bins if len(bins) < 40 else 32, color=_GREEN)
    else:
        axes[1].hist(plan.epoch.tokens, 32, color=_GREEN)
    axes[1].set_xlabel("documents in a bin" if plan.bins else "tokens in a micro-batch")
    axes[2].hist(plan.epoch.tokens_by_step, 32, color=_GREEN)
    axes[2].set_xlabel("tokens in a step")
    for ax, counted in zip(axes, ("documents", "bins" if plan.bins else "", "steps"), strict=False):
        ax.xaxis.set_major_formatter(lambda value, _: short(value))
        ax.yaxis.set_major_formatter(lambda value, _: short(value))
        ax.set_ylabel(counted or "micro-batches")
        ax.locator_params(integer=True)
    _draw_lengths(axes[0], plan)
    _draw_max_lengths(axes[3], plan)
    _draw_ways(axes[4], plan)
    _draw_ranks(axes[5], plan)
    for ax in axes:
        _tidy(ax)
    return figure


def _draw_lengths(ax: Any, plan: RunPlan) -> None:
    lengths, limit = plan.lengths_before(), plan.report.capacity
    edges, is_log = bar_edges(lengths)
    ax.hist(lengths, edges, color=_BLUE)
    if limit is not None and (lengths > limit).any():
        ax.hist(lengths[lengths > limit], edges, color=_RED)
        ax.axvline(limit, color=_RED, linestyle="--")
        ax.set_title(f"max_length={limit:,}", color=_RED, loc="right", fontsize="medium")
    if is_log:
        ax.set_xscale("log")
        ticks = log_ticks(edges[0], edges[-1])
        ax.set_xticks(ticks, [short(tick) for tick in ticks])
        ax.minorticks_off()
    ax.set_xlabel("tokens of a document")


def _draw_max_lengths(ax: Any, plan: RunPlan) -> None:
    rows = [row for row in plan.what_if if not row.refused and row.max_length is not None]
    x = [row.max_length for row in rows]
    if x:
        ax.set_xscale("log", base=2)
        ax.set_xticks(x, [f"{value:,}" for value in x], rotation=45)
        ax.minorticks_off()
        ax.plot(x, [100 * row.lost for row in rows], "o-", color=_RED, label="tokens lost")
        if all(row.utilization is not None for row in rows):
            free = [100 * (1 - (row.utilization or 0)) for row in rows]
            ax.plot(x, free, "o-", color=_BLUE, label="free room in bins")
        _legend(ax)
    ax.set_xlabel("max_length")
    ax.set_ylabel("%")


def _draw_ways(ax: Any, plan: RunPlan) -> None:
    names = [way.name.replace(", ", ",\n") for way in plan.ways]
    ax.barh(names, [way.tokens for way in plan.ways], color=_BLUE, label="real")
    padding = [way.computed - way.tokens for way in plan.ways]
    ax.barh(names, padding, left=[w.tokens for w in plan.ways], color=_RED, label="padding")
    ax.invert_yaxis()
    if names:
        _legend(ax)
    ax.xaxis.set_major_formatter(lambda value, _: short(value))
    ax.set_xlabel("tokens computed in an epoch")


def _draw_ranks(ax: Any, plan: RunPlan) -> None:
    ranks = [f"{row.ranks}" for row in plan.ranks]
    ax.bar(ranks, [100 * row.waiting for row in plan.ranks], color=_BLUE)
    ax.set_xlabel("ranks")
    ax.set_ylabel("% of the time that they wait")


def _legend(ax: Any) -> None:
    """Put the legend above the chart, where it covers nothing."""
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.99), ncols=2)


def _tidy(ax: Any) -> None:
    ax.tick_params(colors=_TEXT)
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_TEXT)
