"""The shapes of a plan as HTML: histograms of its documents, bins, steps and micro-batches."""

import numpy as np

from trl_packing.pages.charts import histogram
from trl_packing.pages.page import columns, figure, section
from trl_packing.tools.plan.run_plan import RunPlan


def shapes_section(plan: RunPlan) -> str:
    """Return histograms of the documents, bins, steps and micro-batches of the first epoch."""
    epoch, bins, limit = plan.epoch, plan.bins, plan.report.capacity
    lengths = plan.lengths_before()
    beyond = int((lengths > limit).sum()) if limit else 0
    note = f"{beyond:,} of {len(lengths):,} are longer than max_length={limit:,}" if limit else ""
    if limit and not beyond:
        note = f"the longest has {lengths.max():,}, and max_length is {limit:,}"
    charts = [
        figure(
            "Length of documents",
            histogram(lengths, label="tokens", counted="documents", cut=limit),
            note=note,
        )
    ]
    if bins is not None:
        documents, fill = np.diff(bins.offsets), bins.tokens / bins.capacity
        charts += [
            _figure("Documents in a bin", documents, "documents", "bins"),
            _figure("Fill of bins", fill * 100, "% of the bin's tokens are real", "bins"),
        ]
    charts += [
        _figure("Documents in a step", epoch.documents_by_step, "documents", "steps"),
        _figure("Tokens in a step", epoch.tokens_by_step, "tokens", "steps"),
    ]
    if not plan.report.bins or plan.report.bins == len(plan.documents):
        batches = _figure("Tokens in a micro-batch", epoch.tokens, "tokens", "micro-batches")
        charts.insert(1, batches)
    else:
        trained = 100 * plan.documents.num_trained() / np.maximum(plan.documents.lengths(), 1)
        chart = _figure("Trained share of documents", trained, "% of the tokens", "documents")
        charts.insert(1, chart)
    if epoch.patches is not None:
        batches = _figure("Patches in a micro-batch", epoch.patches, "patches", "micro-batches")
        charts.append(batches)
    return section("Shapes", columns(*charts), note="of the first epoch")


def _figure(title: str, values: np.ndarray, label: str, counted: str) -> str:
    color = "var(--blue)" if counted == "documents" else "var(--green)"
    mean = float(values.mean())
    note = f"mean {mean:,.{0 if mean >= 1000 else 1}f}{'%' * label.startswith('%')}"
    return figure(title, histogram(values, label=label, counted=counted, color=color), note=note)
