"""The charts of one or several runs, from the numbers that they logged.

[record]            a chart a kind: loss, losses by source, eval_loss, learning rate, ...
[record, record]    a chart a name, with a curve for each run
"""

import re
from collections.abc import Sequence

from trl_packing.pages.curves import Chart, Curve
from trl_packing.training.run_record import RunRecord

MAIN = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "utilization")
_BY_SOURCE, _SHARE = "loss by source", "share of tokens by source"
_TITLES = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens per second",
    "computed_tokens_per_second": "computed tokens per second",
}
_NOTES = {
    "loss": "mean over trained tokens since the last log",
    "grad_norm": "before clipping",
    "tokens_per_second": "tokens of documents",
    "computed_tokens_per_second": "a token that documents share counts once",
    "utilization": "computed tokens of documents / room for tokens",
}
_SHARES = ("utilization", "mfu", "mean_token_accuracy")

_EVAL_LOSS = re.compile(r"eval_(.+_)?loss(_.+)?")
# Counts and times of day are axes, or figures of the whole run.
_NO_CURVE = re.compile(
    r"epoch|step|num_tokens|num_input_tokens_seen|total_flos|train_(loss|runtime|.*seconds?|tokens|"
    r"trained_tokens|computed_tokens|documents|utilization|documents_per_step|peak_memory_gib|mfu)|"
    r"eval_(.*_)?(runtime|samples_per_second|steps_per_second|num_tokens|num_documents.*)"
)
_MOST_CURVES = 24
_COUNT = "num_trained_tokens_"  # of a source, in the training log


def is_eval_loss(name: str) -> bool:
    """Return whether `name` is that of an evaluation loss, of a set or a source too."""
    return _EVAL_LOSS.fullmatch(name) is not None


def trained_sources(names: Sequence[str]) -> list[str]:
    """Return the sources that the training log tells apart, given the names in it."""
    return [name.removeprefix(_COUNT) for name in names if name.startswith(_COUNT)]


def charts_of(records: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts of the numbers that these runs logged, the main ones first."""
    logged = list(dict.fromkeys(name for record in records for name in record.names()))
    sources = trained_sources(logged)
    by_source = {
        prefix: [f"{prefix}_{source}" for source in sources]
        for prefix in ("loss", "num_documents", "num_tokens", "num_trained_tokens")
    }
    apart = {name for group in by_source.values() for name in group}
    apart |= {f"train_{name}" for name in apart}
    names = [name for name in logged if name not in apart and not _NO_CURVE.fullmatch(name)]
    losses = [name for name in names if is_eval_loss(name)]
    trained = [name for name in by_source["loss"] if name in logged]
    charts: list[Chart] = []
    for name in MAIN:
        if name == "eval_loss":
            charts += _of_losses(records, losses, name)
        elif name in names:
            charts.append(_chart(records, name))
        if name == "loss" and len(records) == 1:
            charts += _of_losses(records, trained, _BY_SOURCE)
    if len(records) == 1:
        charts += _shares(records[0], by_source["num_tokens"])
        trained = []
    rest = [name for name in names if name not in MAIN and name not in losses]
    return charts + [_chart(records, name) for name in [*trained, *rest]]


def num_main(charts: Sequence[Chart]) -> int:
    """Return how many of `charts_of` are main ones."""
    titles = [*(_TITLES.get(name, name) for name in MAIN), _BY_SOURCE, _SHARE]
    return sum(chart.title in titles or is_eval_loss(chart.title) for chart in charts)


def _of_losses(records: Sequence[RunRecord], names: list[str], title: str) -> list[Chart]:
    if len(records) > 1:
        return [_chart(records, name) for name in names[:_MOST_CURVES]]
    if not names:
        return []
    curves = [_curve(records[0], name, name, i) for i, name in enumerate(names[:_MOST_CURVES])]
    left_out = len(names) - len(curves)
    note = f"{left_out:,} more in run.json" if left_out else ""
    return [Chart(title, curves, note=note, may_be_log=True)]


def _shares(record: RunRecord, names: list[str]) -> list[Chart]:
    """Return the chart of each source's share of the tokens since the last log, if any."""
    points = {name: record.points(name) for name in names if name in record.names()}
    if not points:
        return []
    totals: dict[int, float] = {}
    for point in (point for curve in points.values() for point in curve):
        totals[point.step] = totals.get(point.step, 0.0) + point.value
    # The log of a stream leaves out sources that its interval does not have.
    at = {point.step: point for curve in points.values() for point in curve}
    tokens = {name: {p.step: p.value for p in curve} for name, curve in points.items()}
    curves = [
        Curve(
            name.removeprefix("num_tokens_"),
            [
                at[step]._replace(value=tokens[name].get(step, 0.0) / totals[step])
                for step in sorted(at)
                if totals[step]
            ],
            i,
        )
        for i, name in enumerate([*points][:_MOST_CURVES])
    ]
    return [Chart(_SHARE, curves, note="since the last log", percent=True)]


def _chart(records: Sequence[RunRecord], name: str) -> Chart:
    """Return the chart of one name, with a curve for each run that logged it."""
    curves = [
        _curve(record, name, name if len(records) == 1 else record.name, i)
        for i, record in enumerate(records)
        if name in record.names()
    ]
    return Chart(
        _TITLES.get(name, name),
        curves,
        note=_NOTES.get(name, ""),
        may_be_log=name in ("loss", "grad_norm", "learning_rate") or is_eval_loss(name),
        percent=name in _SHARES,
    )


def _curve(record: RunRecord, name: str, shown: str, color: int) -> Curve:
    return Curve(shown, record.points(name), color)
