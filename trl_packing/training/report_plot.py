"""Draw the lengths of documents, and the documents of each bin, by matplotlib."""

from io import BytesIO
from typing import TYPE_CHECKING, Any

from trl_packing.training.histogram import Histogram

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Readable on white and on black: the figure has no background.
_BAR, _CUT, _TEXT = "#4a86d8", "#d1483f", "#7d8590"


def plot_lengths_and_bins(
    lengths: Histogram, documents_by_bin: Histogram | None, capacity: int | None
) -> "Figure":
    """Return a figure of one or two histograms.

    Args:
        lengths: tokens of documents.
        documents_by_bin: number of documents in bins; None where nothing is packed.
        capacity: most tokens of a bin, marked among the lengths.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plot() draws by matplotlib, which is not installed; pip install 'trl-packing[plots]'"
        ) from error

    class NotebookFigure(Figure):
        """A figure that a notebook shows, though pyplot does not know it."""

        def _repr_png_(self) -> bytes:
            png = BytesIO()
            self.savefig(png, format="png")
            return png.getvalue()

    number = 1 if documents_by_bin is None else 2
    figure = NotebookFigure(figsize=(4.6 * number, 2.9), layout="constrained", facecolor="none")
    axes = figure.subplots(1, number, squeeze=False)[0]
    _draw(axes[0], lengths, "tokens of a document", "documents")
    if capacity is not None and capacity <= lengths.edges[-1]:
        axes[0].axvline(capacity, color=_CUT, linestyle="--")
        axes[0].set_title(f"max_length={capacity:,}", color=_CUT, loc="right", fontsize="medium")
    if documents_by_bin is not None:
        _draw(axes[1], documents_by_bin, "documents in a bin", "bins")
    return figure


def _draw(axes: Any, histogram: Histogram, xlabel: str, ylabel: str) -> None:
    # A bar of width 1 is centered on its number; wider bars begin at theirs.
    shift = 0.5 if histogram.edges[1] - histogram.edges[0] == 1 else 0.0
    edges = [edge - shift for edge in histogram.edges]
    axes.stairs(histogram.counts, edges, fill=True, color=_BAR)
    axes.locator_params(integer=True)
    axes.set_xlabel(xlabel, color=_TEXT)
    axes.set_ylabel(ylabel, color=_TEXT)
    axes.tick_params(colors=_TEXT)
    axes.set_facecolor("none")
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_TEXT)
