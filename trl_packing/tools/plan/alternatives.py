"""Other settings beside those of a plan, as HTML tables in which the run is bold.

max_length    bins, losses and steps for other limits
ways          padded, packed, or a fixed number of documents a step
sharing       off, in bins, or in groups of documents with a common prefix
ranks         steps, and the time that ranks wait for each other
"""

from trl_packing.data.counts import quantity
from trl_packing.pages.page import bars, section, table
from trl_packing.tools.plan.run_plan import RunPlan
from trl_packing.tools.plan.what_if import WhatIf
from trl_packing.training.prefix_savings import times_fewer

_MOST_RANKS = 64  # with a bar of their own


def max_lengths_section(plan: RunPlan) -> str:
    """Return a plan of the same documents for each of several max_length."""
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
        f"{row.num_cut:,} ({percentage(row.num_cut, documents, 1)})" if row.num_cut else "0",
        f"{lost:,} ({percentage(lost, row.counts.before.tokens, 1)})" if lost else "0",
        f"{row.steps:,}",
        f"{row.documents_per_step:,.1f}",
        f"{row.largest:,}",
    ]


def ways_section(plan: RunPlan) -> str:
    """Return the run beside padded rows, packed rows and fixed numbers of documents a step."""
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


def sharing_section(plan: RunPlan) -> str:
    """Return the plans with each `prefix_sharing`."""
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


def ranks_section(plan: RunPlan) -> str:
    """Return the plans for other numbers of ranks, and the costs of the ranks of this run."""
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


def percentage(part: int, whole: int, digits: int) -> str:
    """Return a percentage; a small one is never written as 0."""
    least = 10.0 ** -(digits + 2)
    if 0 < part < least * whole:
        return f"<{least:.{digits}%}"
    return f"{part / whole:.{digits}%}"
