"""The page of a plan: `trl-packing plan … --html plan.html`.

RunPlan  →  cards, histograms, other settings, losses, rows, documents  →  one HTML file
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.data.counts import TokenCounts, quantity
from trl_packing.data.fitting import fit, pieces_of
from trl_packing.data.printable import escape_text
from trl_packing.documents.labels import IGNORE_INDEX, document_labels
from trl_packing.tools.plan.charts import histogram
from trl_packing.tools.plan.plan import RunPlan, Variant
from trl_packing.tools.preview.preview import token_documents
from trl_packing.tools.preview.show import token_texts
from trl_packing.training.page import (
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
from trl_packing.training.prefix_sharing import times_fewer
from trl_packing.training.report import times
from trl_packing.training.run_recorder import all_settings, installed_versions
from trl_packing.vision.documents import images_of

_MOST_BARS = 24  # of sources
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
    documents = f'<div class="documents">{"".join(_examples(plan))}</div>'
    sections = [
        cards(_cards(plan)),
        _sources(plan),
        _shapes(plan),
        _max_lengths(plan),
        _ways(plan),
        _sharing(plan),
        _ranks(plan),
        _losses(plan),
        _rows(plan),
        section("Documents", documents, note="trained tokens are marked green"),
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
        yield _percentage(lost, counts.before.tokens, 2), f"{quantity(lost, 'token')} lost"


# --- sources and shapes ---------------------------------------------------------------------------


def _sources(plan: RunPlan) -> str:
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


def _shapes(plan: RunPlan) -> str:
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
        _figure("Documents in a step", epoch.by_step(epoch.documents), "documents", "steps"),
        _figure("Tokens in a step", epoch.by_step(epoch.tokens), "tokens", "steps"),
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

_STEPS: dict[str, Callable[[Variant], str]] = {
    "steps an epoch": lambda v: f"{v.steps:,}",
    "documents a step": lambda v: f"{v.documents_per_step:,.1f}",
}


def _variants(
    variants: Sequence[Variant],
    first: tuple[str, Callable[[Variant], str]],
    shown: Mapping[str, Callable[[Variant], str]],
    is_run: Callable[[Variant], bool] = lambda v: v.is_run,
) -> str:
    """Return a table with a row for each variant, that of the run in bold."""
    rows = [
        [first[1](v), *(["–"] * (len(shown) - 1) + [v.refused])]
        if v.refused
        else [first[1](v), *(write(v) for write in shown.values())]
        for v in variants
    ]
    marked = next((i for i, v in enumerate(variants) if is_run(v)), None)
    return table([first[0], *shown], rows, marked=marked)


def _computed(variants: Sequence[Variant], left: str, said: str = "") -> str:
    """Return a table beside bars of the tokens computed."""
    drawn = bars((v.name + said * v.is_run, v.computed, f"{v.computed:,}") for v in variants)
    return _beside(left, f"<h3>Tokens computed</h3>{drawn}")


def _beside(left: str, right: str) -> str:
    return f'<div class="beside">{left}<div>{right}</div></div>'


def _max_lengths(plan: RunPlan) -> str:
    """Return a plan of the same documents for each of several max_length."""
    if not plan.what_if:
        return ""
    of_bins: dict[str, Callable[[Variant], str]] = {
        "bins": lambda v: f"{v.bins:,}" if v.bins else "–",
        "filled": lambda v: f"{v.utilization:.2%}" if v.utilization is not None else "–",
    }
    shown = {
        **(of_bins if any(v.bins is not None for v in plan.what_if) else {}),
        "documents too long": lambda v: _share(v.num_cut, v.counts.before.documents),
        "tokens lost": lambda v: _share(
            v.counts.before.tokens - v.counts.after.tokens, v.counts.before.tokens
        ),
        **_STEPS,
        "peak tokens": lambda v: f"{v.largest:,}",
    }
    said = "Peak tokens are those of the largest micro-batch, which decides the memory."
    longest, positions = (
        int(plan.lengths_before().max()),
        plan.run.number_of_model("max_position_embeddings"),
    )
    if positions is not None and longest > positions:
        said += (
            f" The longest document has {longest:,} tokens, and the config of the model names "
            f"{positions:,} positions."
        )
    if plan.grouped:
        said += " These plans bring no documents with a common prefix together."
    if plan.epoch.patches is not None:
        said += " These plans fill bins by tokens alone, not by patches of images."
    own = plan.run.args.max_length
    limit = "max_length", lambda v: f"{v.max_length:,}" if v.max_length else "no limit"
    return section(
        "If max_length were …",
        _variants(plan.what_if, limit, shown, lambda v: v.max_length == own),
        f'<p class="what">{said}</p>',
        note="each row is really planned, from all documents; this run is in bold",
    )


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({_percentage(part, whole, 1)})" if part else "0"


def _ways(plan: RunPlan) -> str:
    """Return the run beside padded rows, packed rows and fixed numbers of documents a step."""
    if not plan.ways:
        return ""
    shown = {
        **_STEPS,
        "tokens computed": lambda v: f"{v.computed:,}",
        "padding": lambda v: f"{v.padding:.1%}",
    }
    return section(
        "Padded, packed, or a fixed number of documents a step",
        _computed(plan.ways, _variants(plan.ways, ("", lambda v: v.name), shown), " (this run)"),
        note="the same documents in an epoch",
    )


def _sharing(plan: RunPlan) -> str:
    """Return the plans with each `prefix_sharing`."""
    if not plan.sharing:
        return ""
    tokens = plan.sharing[0].tokens
    shown = {
        "steps an epoch": _STEPS["steps an epoch"],
        "prefixes a step": lambda v: (
            "–" if v.prefixes_per_step is None else f"{v.prefixes_per_step:,.1f}"
        ),
        "tokens computed": lambda v: f"{v.computed:,}",
        "": lambda v: times_fewer(tokens, v.computed) if v.computed < tokens else "",
        "peak": lambda v: f"{v.largest:,}",
    }
    return section(
        "Shared prefixes",
        _computed(
            plan.sharing, _variants(plan.sharing, ("prefix_sharing", lambda v: v.name), shown)
        ),
        '<p class="what">Documents that begin alike compute their common tokens once in a row. The '
        "losses and gradients of a step stay those of its documents. With “group”, a step has "
        "documents of fewer different prefixes. Peak tokens are those of the largest micro-batch."
        "</p>",
        note="if the model can share; this run is in bold",
    )


def _ranks(plan: RunPlan) -> str:
    """Return the plans for other numbers of ranks, and the costs of the ranks of this run."""
    costs, ranks = plan.epoch.costs_by_rank().tolist(), plan.epoch.ranks
    shown = {**_STEPS, "time that ranks wait": lambda v: f"{v.waiting:.2%}"}
    content = _variants(
        plan.ranks, ("ranks", lambda v: f"{v.ranks:,}"), shown, lambda v: v.ranks == ranks
    )
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
        _strips(plan),
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


def _percentage(part: int, whole: int, digits: int) -> str:
    """Return a percentage; a small one is never written as 0."""
    least = 10.0 ** -(digits + 2)
    if 0 < part < least * whole:
        return f"<{least:.{digits}%}"
    return f"{part / whole:.{digits}%}"


# --- documents ------------------------------------------------------------------------------------

# Tokens shown around each end of a long document, and around each place where it changes.
_AROUND = 90

# Pieces of HTML in all strips: more of them would be thinner than a pixel.
_MOST_PARTS = 4000
_MOST_STRIPS = 12

# Kinds of tokens, and the HTML elements that mark them.
_PROMPT, _TRAINED, _LOST = 0, 1, 2
_ELEMENTS = {_PROMPT: "span", _TRAINED: "mark", _LOST: "del"}


def _examples(plan: RunPlan) -> Iterator[str]:
    """Yield the longest and the shortest document of the plan, and some of those that are cut."""
    lengths = plan.documents.lengths()
    for name, row in (("Longest", int(lengths.argmax())), ("Shortest", int(lengths.argmin()))):
        document = plan.documents[row]
        yield _document(f"{name}: document {row:,}", document, _kinds(document), plan)
    if plan.whole is None:
        return
    # The longest and the shortest document that is too long, and one between.
    documents, overflow = token_documents(plan.whole.documents), plan.whole.overflow
    lengths, pieces = documents.lengths(), pieces_of(documents, overflow)
    is_cut = np.ones(len(lengths), bool)
    is_cut[pieces.rows[pieces.sizes == lengths[pieces.rows]]] = False
    cut = np.flatnonzero(is_cut)
    if not len(cut):
        return
    trained, _ = fit(documents, overflow)
    order = cut[np.argsort(-lengths[cut], kind="stable")]
    for row in order[sorted({0, len(order) // 2, len(order) - 1})]:
        document, mine = documents[int(row)], trained.where(trained.rows == row)
        kinds = np.full(lengths[row], _LOST)
        for start, stop in zip(mine.starts, mine.stops, strict=True):
            labels = document["labels"][start:stop]
            kinds[start:stop] = _kinds({"input_ids": labels, "labels": labels})
        words = [f"{quantity(int((kinds == _LOST).sum()), 'token')} lost"]
        words += [f"kept in {len(mine.rows):,} pieces"] * (len(mine.rows) > 1)
        name = f"Too long: document {row:,} before the cut"
        yield _document(name, document, kinds, plan, mine.starts[1:].tolist(), words)


def _kinds(document: Mapping[str, Any]) -> np.ndarray:
    """Return the kind of each token; the first token of a document is never a target."""
    labels = document_labels(document, np.asarray(document["input_ids"]))
    kinds = np.where(labels == IGNORE_INDEX, _PROMPT, _TRAINED)
    kinds[:1] = _PROMPT
    return kinds


def _document(
    name: str,
    document: Mapping[str, np.ndarray],
    kinds: np.ndarray,
    plan: RunPlan,
    pieces: Sequence[int] = (),
    words: Sequence[str] = (),
) -> str:
    trained = int((kinds == _TRAINED).sum())
    ids, images = document["input_ids"], images_of(document)
    words = [*([quantity(len(images), "image")] * bool(images)), *words]
    note = ", ".join([quantity(len(ids), "token"), f"{trained:,} trained", *words])
    shown = np.ones(len(ids), bool)  # of an image, only its first token
    for image in images:
        shown[image.start + 1 : image.stop] = False
    places = np.cumsum(shown) - 1
    sizes = {int(places[image.start]): image.stop - image.start for image in images}
    cuts = places[list(pieces)].tolist()
    tokenizer = plan.run.preparation.eos.tokenizer
    text = "".join(_text(ids[shown], kinds[shown], tokenizer, cuts, sizes))
    return (
        f'<div class="document of{trained % 6}"><h3>{escape(name)} '
        f'<span class="note">{escape(note)}</span></h3>'
        f'<pre class="wrap">{text}</pre></div>'
    )


def _text(
    ids: np.ndarray,
    kinds: np.ndarray,
    tokenizer: Any,
    pieces: Sequence[int],
    images: Mapping[int, int],
) -> Iterator[str]:
    shown = 0
    for start, stop in _windows(kinds, pieces):
        if start > shown:
            yield f"<u> … {start - shown:,} tokens … </u>"
        shown = stop
        texts = token_texts(ids[start:stop].tolist(), tokenizer)
        for place, size in images.items():
            if start <= place < stop:
                texts[place - start] = f"[image, {quantity(size, 'token')}]"
        changes = np.flatnonzero(np.diff(kinds[start:stop])) + 1
        cuts = [at - start for at in pieces if start < at < stop]
        edges = sorted({0, *changes.tolist(), *cuts, stop - start})
        for first, last in pairwise(edges):
            if first in cuts:
                yield "<u> ✂ </u>"
            element = _ELEMENTS[int(kinds[start + first])]
            text = escape(escape_text("".join(texts[first:last])))
            yield f"<{element}>{text}</{element}>"


def _windows(kinds: np.ndarray, pieces: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts of a document to show: its ends, and where the kind of token changes."""
    size = len(kinds)
    changes = np.flatnonzero(np.diff(kinds)) + 1
    places = sorted({0, size, *changes[:3].tolist(), *changes[-3:].tolist(), *pieces[:3]})
    windows: list[tuple[int, int]] = []
    for place in places:
        start, stop = max(place - _AROUND, 0), min(place + _AROUND, size)
        if windows and start <= windows[-1][1] + _AROUND:
            windows[-1] = (windows[-1][0], stop)
        else:
            windows.append((start, stop))
    return windows


# --- strips ---------------------------------------------------------------------------------------


def _strips(plan: RunPlan) -> str:
    """Return the first micro-batches of the epoch as strips of equal scale."""
    epoch, args, parts, room = plan.epoch, plan.run.args, 0, 0
    if plan.bins is not None:
        room = args.max_length * args.per_device_train_batch_size
    rows: list[str] = []
    # Not `epoch.tokens`: a strip shows each document whole, also where documents share tokens.
    lengths = plan.documents.lengths()
    shown = [int(lengths[members].sum()) for members in epoch.members[:_MOST_STRIPS]]
    for at in range(len(shown)):
        strip = _strip(plan, epoch.members[at], max(*shown, room))
        parts += strip.count("<b ") + strip.count("<i ")
        if rows and parts > _MOST_PARTS:
            break
        step, rank = at // epoch.slots + 1, at % epoch.ranks
        name = f"step {step:,}" + f", rank {rank}" * (epoch.ranks > 1)
        rows.append(f"<span>{name}</span>{strip}")
    kind = "strips" if room and not plan.grouped else "strips open"
    return f'<div class="{kind}">{"".join(rows)}</div>'


def _strip(plan: RunPlan, members: np.ndarray, width: int) -> str:
    parts, start = [], 0
    for nth, row in enumerate(members.tolist()):
        kinds = _kinds(plan.documents[row])
        trained = int((kinds == _TRAINED).sum())
        title = f"document {row:,}: {len(kinds):,} tokens, {trained:,} trained"
        parts.append(_box("i", start, len(kinds), width, f' class="of{nth % 6}" title="{title}"'))
        edges = np.flatnonzero(np.diff(kinds, prepend=_PROMPT, append=_PROMPT)).reshape(-1, 2)
        parts += (
            _box("b", start + a, b - a, width, f' class="of{nth % 6}"') for a, b in edges.tolist()
        )
        start += len(kinds)
    return f'<div class="strip">{"".join(parts)}</div>'


def _box(element: str, start: int, size: int, width: int, attributes: str) -> str:
    left, wide = 100 * start / width, 100 * size / width
    return f'<{element}{attributes} style="left:{left:.3f}%;width:{wide:.3f}%"></{element}>'
