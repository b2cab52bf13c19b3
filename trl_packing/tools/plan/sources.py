"""The sources of a plan as HTML: what an epoch draws of each, and how even its steps are."""

import numpy as np

from trl_packing.pages.page import bars, section, table
from trl_packing.tools.plan.run_plan import RunPlan
from trl_packing.training.source_shares import times

_MOST_BARS = 24


def sources_section(plan: RunPlan) -> str:
    """Return the table of sources; nothing where they are not known, or only one is drawn once."""
    sources = plan.report.sources
    if plan.mixture is None or (len(sources) < 2 and plan.mixture.draw is None):
        return ""
    shares = shares_of_steps(plan)
    head = ["source", "documents", "times an epoch", "drawn", "tokens", "trained", "of a step"]
    rows = [
        [
            source.name,
            f"{source.documents:,}",
            times(source.epochs),
            f"{source.drawn:,}",
            f"{source.tokens:,}",
            f"{source.trained:,}",
            f"{share.mean():.1%} ± {share.std():.1%}",
        ]
        for source, share in zip(sources, shares.T, strict=True)
    ]
    total = max(sum(source.tokens for source in sources), 1)
    drawn = bars(
        (source.name, source.tokens, f"{source.tokens / total:.1%}")
        for source in sources[:_MOST_BARS]
    )
    said = (
        '<p class="what">The last column is the share of a full step\'s tokens: its mean over the '
        "steps of the epoch, and its standard deviation.</p>"
    )
    return section(
        "Sources",
        table(head, rows),
        f"<h3>Tokens of the epoch</h3>{drawn}",
        said,
        note="what the first epoch draws",
    )


def shares_of_steps(plan: RunPlan) -> np.ndarray:
    """Return the share of each source in the tokens of every full step, ``(steps, sources)``."""
    assert plan.mixture is not None
    epoch, lengths, ids = plan.epoch, plan.documents.lengths(), plan.mixture.sources.ids
    number = len(plan.report.sources)
    drawn = np.concatenate(epoch.members)
    step = np.repeat(np.arange(len(epoch.members)) // epoch.slots, epoch.documents)
    tokens = np.bincount(step * number + ids[drawn], lengths[drawn], epoch.steps * number)
    tokens = tokens.reshape(-1, number)
    full = len(epoch.members) // epoch.slots
    tokens = tokens[: max(full, 1)]  # the last step may be smaller
    return tokens / tokens.sum(1, keepdims=True)
