"""The page of a plan: `trl-packing plan … --html plan.html`.

RunPlan  →  cards, histograms, other settings, losses, rows, documents  →  one HTML file
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from trl_packing.data.counts import TokenCounts, quantity
from trl_packing.pages.page import (
    HtmlPage,
    asset,
    cards,
    columns,
    escape,
    page,
    section,
    table,
)
from trl_packing.tools.plan.alternatives import (
    max_lengths_section,
    percentage,
    ranks_section,
    sharing_section,
    ways_section,
)
from trl_packing.tools.plan.documents import example_documents, strips
from trl_packing.tools.plan.run_plan import RunPlan
from trl_packing.tools.plan.shapes import shapes_section
from trl_packing.tools.plan.sources import sources_section
from trl_packing.training.prefix_savings import times_fewer
from trl_packing.training.run_settings import all_settings, installed_versions


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
        shapes_section(plan),
        max_lengths_section(plan),
        ways_section(plan),
        sharing_section(plan),
        ranks_section(plan),
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
        yield percentage(lost, counts.before.tokens, 2), f"{quantity(lost, 'token')} lost"


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
