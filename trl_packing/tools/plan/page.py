"""The page of a plan: `trl-packing plan … --html plan.html`.

RunPlan  →  cards, histograms, other settings, losses, rows, documents  →  one HTML file
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from trl_packing.data.counts import TokenCounts, quantity
from trl_packing.pages.charts import histogram
from trl_packing.pages.page import (
    HtmlPage,
    asset,
    bars,
    cards,
    columns,
    escape,
    figure,
    page,
    section,
    table,
)
from trl_packing.tools.plan.documents import example_documents, strips
from trl_packing.tools.plan.run_plan import RunPlan
from trl_packing.tools.plan.sources import sources_section
from trl_packing.tools.plan.what_if import WhatIf
from trl_packing.training.prefix_savings import times_fewer
from trl_packing.training.run_settings import all_settings, installed_versions

_MOST_RANKS = 64  # with a bar of their own


def plan_page(plan: RunPlan, *, title: str = "Plan", note: str = "", command: str = "") -> HtmlPage:
    """Return the text of an HTML file that shows `plan`.

    Args:
        plan: as `plan_run` returns it.
        title: of the page.
        note: shown beside the title; "" for the model and max_length.
        command: that makes the page.

    Examples:
        >>> run = PreviewedRun.from_settings(rows, tokenizer, ["--max_length", "1024"])
        ... # doctest: +SKIP
        >>> Path("plan.html").write_text(plan_page(plan_run(run, ranks=8)))  # doctest: +SKIP
    """
    sections = [
        cards(_cards(plan)),
        sources_section(plan),
        _shapes(plan),
        _max_lengths(plan),
        _ways(plan),
        _sharing(plan),
        _ranks(plan),
        _losses(plan),
        _rows(plan),
        section("Documents", example_documents(plan), note="trained tokens are marked green"),
        _provenance(plan, command),
    ]
    return page(title, filter(None, sections), style=asset("plan.css"), note=note or _about(plan))


def _about(plan: RunPlan) -> str:
    """Return the model and the most important setting."""
    run, limit = plan.run, plan.run.args.max_length
    model = run.model if isinstance(run.model, str) else type(run.model).__name__
    words = [model] * (run.model is not None)
    words += [f"max_length {limit:,}" if limit else "no max_length"]
    words += [f"the first {len(run.dataset):,} rows of a stream"] * run.is_stream
    return " · ".join(words)


# --- cards ----------------------------------------------------------------------------------------


def _cards(plan: RunPlan) -> Iterator[tuple[str, str]]:
    report, counts = plan.report, plan.report.preparation
    tokens, trained = report.tokens or 0, report.trained_tokens or 0
    whole = report.documents_in_data
    yield f"{report.documents:,}", "documents" if whole is None else f"documents of {whole:,} drawn"
    yield f"{tokens:,}", "tokens"
    yield f"{trained / tokens:.1%}", f"{trained:,} tokens are trained"
    images = report.images
    if images is not None:
        words = f"images, of {images.tokens:,} tokens ({images.share:.0%}) and {images.patches:,}"
        yield f"{images.images:,}", f"{words} patches"
    if report.utilization is not None:
        yield (
            f"{report.utilization:.2%}",
            f"full: {report.bins:,} bins of {report.capacity:,} tokens",
        )
    prefixes = report.prefixes
    if prefixes is not None and prefixes.is_shared:
        fewer = times_fewer(prefixes.tokens, prefixes.computed)
        yield fewer.removesuffix(" fewer"), "fewer tokens computed, as documents share prefixes"
    padded = report.padded_steps
    beside = f"; padded: {padded:,}" if padded not in (None, report.steps_per_epoch) else ""
    size = f"{report.documents_per_step:,.1f} documents"
    yield f"{report.steps_per_epoch:,}", f"steps an epoch, of {size}{beside}"
    yield f"{int(plan.epoch.tokens.max()):,}", "tokens in the largest micro-batch"
    if plan.epoch.patches is not None:
        yield f"{int(plan.epoch.patches.max()):,}", "patches in the micro-batch with most of them"
    if counts.before.tokens:
        lost = counts.before.tokens - counts.after.tokens
        yield _share(lost, counts.before.tokens, 2), f"{quantity(lost, 'token')} lost"


def _share(part: int, whole: int, digits: int) -> str:
    """Return a percentage; a small one is never written as 0."""
    least = 10.0 ** -(digits + 2)
    if 0 < part < least * whole:
        return f"<{least:.{digits}%}"
    return f"{part / whole:.{digits}%}"


# --- shapes ---------------------------------------------------------------------------------------


def _shapes(plan: RunPlan) -> str:
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


# --- other settings -------------------------------------------------------------------------------


def _max_lengths(plan: RunPlan) -> str:
    if not plan.what_if:
        return ""
    own = plan.run.args.max_length
    packed = any(row.bins is not None for row in plan.what_if)
    head = ["max_length", *(["bins", "filled"] * packed), "documents too long", "tokens lost"]
    head += ["steps an epoch", "documents a step", "peak tokens"]
    rows = [_max_length_row(row, packed) for row in plan.what_if]
    marked = next(i for i, row in enumerate(plan.what_if) if row.max_length == own)
    note = "each row is really planned, from all documents; this run is in bold"
    said = "Peak tokens are those of the largest micro-batch, which decides the memory."
    longest, positions = int(plan.lengths_before().max()), plan.run.max_positions
    if positions is not None and longest > positions:
        said += (
            f" The longest document has {longest:,} tokens, and the config of the model names "
            f"{positions:,} positions."
        )
    if plan.grouped:
        said += " These plans bring no documents with a common prefix together."
    if plan.epoch.patches is not None:
        said += " These plans fill bins by tokens alone, not by patches of images."
    content = table(head, rows, marked=marked), f'<p class="what">{said}</p>'
    return section("If max_length were …", *content, note=note)


def _max_length_row(row: WhatIf, packed: bool) -> list[str]:
    limit = "no limit" if row.max_length is None else f"{row.max_length:,}"
    if row.refused:
        return [limit, *(["–"] * (5 + 2 * packed)), row.refused]
    fill = (
        [f"{row.bins:,}", f"{row.utilization:.2%}"] if packed and row.bins else ["–"] * 2 * packed
    )
    documents = row.counts.before.documents
    lost = row.counts.before.tokens - row.counts.after.tokens
    return [
        limit,
        *fill,
        f"{row.num_cut:,} ({_share(row.num_cut, documents, 1)})" if row.num_cut else "0",
        f"{lost:,} ({_share(lost, row.counts.before.tokens, 1)})" if lost else "0",
        f"{row.steps:,}",
        f"{row.documents_per_step:,.1f}",
        f"{row.largest:,}",
    ]


def _ways(plan: RunPlan) -> str:
    if not plan.ways:
        return ""
    head = ["", "steps an epoch", "documents a step", "tokens computed", "padding"]
    rows = [
        [
            way.name,
            f"{way.steps:,}",
            f"{way.documents_per_step:,.1f}",
            f"{way.computed:,}",
            f"{way.padding:.1%}",
        ]
        for way in plan.ways
    ]
    marked = next(i for i, way in enumerate(plan.ways) if way.is_run)
    names = [way.name + " (this run)" * way.is_run for way in plan.ways]
    drawn = bars(
        (name, way.computed, f"{way.computed:,}")
        for name, way in zip(names, plan.ways, strict=True)
    )
    return section(
        "Padded, packed, or a fixed number of documents a step",
        _beside(table(head, rows, marked=marked), "<h3>Tokens computed</h3>" + drawn),
        note="the same documents in an epoch",
    )


def _sharing(plan: RunPlan) -> str:
    if not plan.sharing:
        return ""
    head = ["prefix_sharing", "steps an epoch", "prefixes a step", "tokens computed", "", "peak"]
    rows = [
        [
            way.name,
            f"{way.steps:,}",
            "–" if way.prefixes_per_step is None else f"{way.prefixes_per_step:,.1f}",
            f"{way.computed:,}",
            times_fewer(way.tokens, way.computed) if way.computed < way.tokens else "",
            f"{way.largest:,}",
        ]
        for way in plan.sharing
    ]
    marked = next((i for i, way in enumerate(plan.sharing) if way.is_run), None)
    drawn = bars((way.name, way.computed, f"{way.computed:,}") for way in plan.sharing)
    return section(
        "Shared prefixes",
        _beside(table(head, rows, marked=marked), "<h3>Tokens computed</h3>" + drawn),
        '<p class="what">Documents that begin alike compute their common tokens once in a row. The '
        "losses and gradients of a step stay those of its documents. With “group”, a step has "
        "documents of fewer different prefixes. Peak tokens are those of the largest micro-batch."
        "</p>",
        note="if the model can share; this run is in bold",
    )


def _beside(left: str, right: str) -> str:
    return f'<div class="beside">{left}<div>{right}</div></div>'


def _ranks(plan: RunPlan) -> str:
    costs, ranks = plan.epoch.costs_by_rank().tolist(), plan.epoch.ranks
    head = ["ranks", "steps an epoch", "documents a step", "time that ranks wait"]
    rows = [
        [f"{row.ranks:,}", f"{row.steps:,}", f"{row.documents_per_step:,.1f}", f"{row.waiting:.2%}"]
        for row in plan.ranks
    ]
    marked = next((i for i, row in enumerate(plan.ranks) if row.ranks == ranks), None)
    content = table(head, rows, marked=marked)
    if ranks > 1:
        drawn = bars(
            (f"rank {rank}", cost, f"{cost / max(costs):.1%}")
            for rank, cost in enumerate(costs[:_MOST_RANKS])
        )
        content = _beside(content, "<h3>Cost of an epoch</h3>" + drawn)
    tower = "" if plan.epoch.patches is None else ", plus the vision tower by the patches of images"
    return section(
        "Balance of ranks",
        content,
        '<p class="what">The cost of a micro-batch is its tokens, plus attention in proportion to '
        f"the squared lengths of its documents{tower}. Ranks wait for the costliest micro-batch of "
        "a moment.</p>",
        note=f"{quantity(ranks, 'rank')} in this run",
    )


# --- losses ---------------------------------------------------------------------------------------


def _losses(plan: RunPlan) -> str:
    counts = plan.report.preparation
    if not counts.before.documents:
        return section("Kept and lost", "<p>The rows are trained as they are.</p>")
    head = ["", "documents", "tokens", "trained", "stop tokens"]
    rows = [["before", *_numbers(counts.before)]]
    rows += [
        [f"{stage.affected:,} {stage.why}", *_numbers(stage.lost, -1)] for stage in counts.stages
    ]
    kept = "trained in an epoch" if plan.report.documents_in_data is None else "kept"
    rows.append([kept, *_numbers(counts.after)])
    notes = str(counts).splitlines()[len(counts.stages) :]
    said = [
        f'<p class="what{" warn" * line.startswith("warning")}">{escape(line)}</p>'
        for line in notes
    ]
    return section("Kept and lost", table(head, rows, marked=len(rows) - 1), *said)


def _numbers(counts: TokenCounts, sign: int = 0) -> list[str]:
    """Return the counts in words: as they are, or as changes of this sign."""
    values = (counts.documents, counts.tokens, counts.trained, counts.stops)
    if not sign:
        return [f"{value:,}" for value in values]
    return [f"{sign * value:+,}".replace("-", "−") if value else "0" for value in values]


# --- rows -----------------------------------------------------------------------------------------


def _rows(plan: RunPlan) -> str:
    names = [("trained", "trained"), ("prompt", "not trained")]
    names += [("free", "free")] * (plan.bins is not None and not plan.grouped)
    swatches = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in names)
    return section(
        "First micro-batches of the epoch",
        f'<p class="swatches">{swatches}</p>',
        strips(plan),
        note="each is one flat row of the model, a color for each document"
        + ", which is drawn whole, also where it shares tokens" * plan.grouped,
    )


# --- provenance -----------------------------------------------------------------------------------


def _provenance(plan: RunPlan, command: str) -> str:
    settings = {"ranks": plan.report.ranks, **settings_of(plan.run.args)}
    ran = f'<pre class="wrap">{escape(command)}</pre>' * bool(command)
    return section(
        "This plan",
        ran,
        columns(
            "<h3>Settings</h3>" + _pairs(settings),
            "<h3>Versions</h3>" + _pairs(installed_versions()),
        ),
        f"<h3>Report</h3><pre>{escape(plan.report)}</pre>",
    )


def _pairs(values: Mapping[str, Any]) -> str:
    shown = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in values.items())
    return f'<dl class="pairs">{shown}</dl>'


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings on which the plan depends, and all others that are not the default.

    Secrets are replaced by "…".
    """
    always = (
        "max_length",
        "packing",
        "packing_strategy",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "seed",
    )
    default = type(args)("unused", use_cpu=True, bf16=False, report_to="none")
    names = [f.name for f in fields(args) if f.name not in ("output_dir", "run_name")]
    given = [n for n in names if getattr(args, n) != getattr(default, n)]
    shown = all_settings(args)
    return {name: shown[name] for name in dict.fromkeys((*always, *given))}
