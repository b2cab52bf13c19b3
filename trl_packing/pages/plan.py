"""The page of a plan: `trl-packing plan … --html plan.html`.

RunPlan  →  numbers and words of each section  →  plan.html  →  one HTML file
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_packing.data.counts import times, times_fewer
from trl_packing.data.fitting import fit, pieces_of
from trl_packing.data.printable import escape_hidden
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IGNORE_INDEX, Document, document_labels, token_columns
from trl_packing.pages.histograms import histogram
from trl_packing.pages.page import HtmlPage, PageData, render
from trl_packing.pages.record import (
    ON_ANY_MACHINE,
    all_settings,
    changed_settings,
    installed_versions,
)
from trl_packing.pages.show import image_in_words, token_texts
from trl_packing.vision.documents import images_of

if TYPE_CHECKING:
    from trl_packing.run.what_if import RunPlan

# Settings on which every plan depends.
_SETTINGS = (
    "max_length",
    "packing",
    "packing_strategy",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
)


def plan_page(
    plan: "RunPlan", *, title: str = "Plan", note: str = "", command: str = ""
) -> HtmlPage:
    """Return the text of an HTML file that shows `plan`, made by `command`.

    `plan` is what `plan_run` returns. `note` stands beside the title; "" for the model and
    max_length.
    """
    run = plan.run
    model = run.call.model
    limit = run.args.max_length
    about = [f"max_length {limit:,}" if limit else "no max_length"]
    if model is not None:
        about.insert(0, model if isinstance(model, str) else type(model).__name__)
    if run.is_stream:
        about.append(f"the first {run.num_rows:,} rows of a stream")
    return render(
        "plan.html",
        title=title,
        note=note or " · ".join(about),
        styles=["plan.css"],
        charts=list(_charts(plan)),
        plan=plan,
        times=times,
        times_fewer=times_fewer,
        strips=_strips(plan),
        documents=list(_documents(plan)),
        command=command,
        settings={"ranks": plan.report.ranks, **settings_of(run.args)},
        versions=installed_versions(),
    )


def _charts(plan: "RunPlan") -> Iterator[tuple[str, str, PageData]]:
    """Yield title, note and histogram of documents, bins, steps and micro-batches."""
    epoch = plan.epoch
    bins = plan.bins
    limit = plan.report.capacity
    lengths = plan.lengths_before()
    note = ""
    if limit:
        note = (
            f"the longest has {lengths.max():,}; {int((lengths > limit).sum()):,} of "
            f"{len(lengths):,} are longer than max_length={limit:,}"
        )
    yield (
        "Length of documents",
        note,
        histogram(lengths, label="tokens", counted="documents", cut=limit),
    )
    if not plan.report.bins or plan.report.bins == len(plan.documents):
        yield _chart("Tokens in a micro-batch", epoch.tokens, "tokens", "micro-batches")
    else:
        trained = 100 * plan.documents.num_trained() / np.maximum(plan.documents.lengths(), 1)
        yield _chart("Trained share of documents", trained, " of the tokens", "documents", "%")
    if bins is not None:
        yield _chart("Documents in a bin", np.diff(bins.offsets), "documents", "bins")
        filled = 100 * (bins.tokens / bins.capacity)
        yield _chart("Fill of bins", filled, " of the bin's tokens are real", "bins", "%")
    yield _chart("Documents in a step", epoch.by_step(epoch.documents), "documents", "steps")
    yield _chart("Tokens in a step", epoch.by_step(epoch.tokens), "tokens", "steps")


def _chart(
    title: str, values: np.ndarray, label: str, counted: str, unit: str = ""
) -> tuple[str, str, PageData]:
    mean = float(values.mean())
    note = f"mean {mean:,.{0 if mean >= 1000 else 1}f}{unit}"
    return title, note, histogram(values, label=unit + label, counted=counted)


def settings_of(args: Any) -> dict[str, Any]:
    """Return the settings on which a plan depends, and all others that a user has changed."""
    changed = [name for name in changed_settings(args) if name not in ON_ANY_MACHINE]
    shown = all_settings(args)
    return {name: shown[name] for name in dict.fromkeys((*_SETTINGS, *changed))}


# Pieces of HTML in all strips: more of them would be thinner than a pixel.
_MOST_PARTS = 4000
_MOST_STRIPS = 12

# Kinds of tokens, and the HTML elements that mark them.
_PROMPT, _TRAINED, _LOST = range(3)
_ELEMENTS = ("span", "mark", "del")


def _strips(plan: "RunPlan") -> list[list[Any]]:
    """Return the first micro-batches of the epoch as strips of equal scale."""
    args = plan.run.args
    parts = 0
    strips: list[list[Any]] = []
    # Not `epoch.tokens`: a strip shows each document whole, also where documents share tokens.
    lengths = plan.documents.lengths()
    shown = plan.epoch.members[:_MOST_STRIPS]
    width = max(int(lengths[members].sum()) for members in shown)
    if plan.bins is not None:
        width = max(width, args.max_length * args.per_device_train_batch_size)
    for members in shown:
        boxes = list(_strip(plan, members, width))
        parts += len(boxes)
        if strips and parts > _MOST_PARTS:
            break
        strips.append(boxes)
    return strips


def _strip(
    plan: "RunPlan", members: np.ndarray, width: int
) -> Iterator[tuple[str, int, str, float, float]]:
    """Yield element, color, title, left edge and width (in %) of documents and trained tokens."""
    first = 0
    for nth, row in enumerate(members.tolist()):
        kinds = _kinds(plan.documents[row])
        trained = int((kinds == _TRAINED).sum())
        title = f"document {row:,}: {len(kinds):,} tokens, {trained:,} trained"
        yield "i", nth % 6, title, 100 * first / width, 100 * len(kinds) / width
        edges = np.flatnonzero(np.diff(kinds, prepend=_PROMPT, append=_PROMPT)).reshape(-1, 2)
        for start, stop in edges.tolist():
            yield "b", nth % 6, "", 100 * (first + start) / width, 100 * (stop - start) / width
        first += len(kinds)


# Tokens shown around each end of a long document, and around each place where it changes.
_AROUND = 90


def _documents(plan: "RunPlan") -> Iterator[PageData]:
    """Yield the longest and the shortest document of the plan, and some of those that are cut."""
    lengths = plan.documents.lengths()
    for name, row in (("Longest", int(lengths.argmax())), ("Shortest", int(lengths.argmin()))):
        document = plan.documents[row]
        yield _document(plan, f"{name}: document {row:,}", document, _kinds(document))
    if plan.whole is None:
        return
    # The longest and the shortest document that is too long, and one between.
    whole = plan.whole.documents
    documents = ArrowDocuments(whole, token_columns(whole.column_names))
    overflow = plan.run.rules.overflow
    lengths = documents.lengths()
    pieces = pieces_of(documents, overflow)
    cut = np.setdiff1d(np.arange(len(lengths)), pieces.rows[pieces.sizes == lengths[pieces.rows]])
    if not len(cut):
        return
    trained, _ = fit(documents, overflow)
    order = cut[np.argsort(-lengths[cut], kind="stable")]
    for row in order[sorted({0, len(order) // 2, len(order) - 1})].tolist():
        document = documents[row]
        mine = trained.where(trained.rows == row)
        kinds = np.full(lengths[row], _LOST)
        for start, stop in zip(mine.starts, mine.stops, strict=True):
            labels = document["labels"][start:stop]
            kinds[start:stop] = _kinds({"input_ids": labels, "labels": labels})
        yield _document(
            plan, f"Too long: document {row:,} before the cut", document, kinds, is_cut=True
        )


def _kinds(document: Document) -> np.ndarray:
    """Return the kind of each token; the first token of a document is never a target."""
    labels = document_labels(document, np.asarray(document["input_ids"]))
    kinds = np.where(labels == IGNORE_INDEX, _PROMPT, _TRAINED)
    kinds[:1] = _PROMPT
    return kinds


def _document(
    plan: "RunPlan",
    name: str,
    document: Document,
    kinds: np.ndarray,
    *,
    is_cut: bool = False,
) -> PageData:
    """Return a document as parts of its text, each with the element that marks it."""
    ids = document["input_ids"]
    images = images_of(document)
    parts = []
    shown = 0
    changes = np.flatnonzero(np.diff(kinds)) + 1
    for start, stop in _windows(len(ids), [*changes[:3].tolist(), *changes[-3:].tolist()]):
        if start > shown:
            parts.append(("u", f" … {start - shown:,} tokens … "))
        shown = stop
        texts = token_texts(ids[start:stop].tolist(), plan.run.rules.eos.tokenizer)
        for image in images:  # in words, at its first token
            said = image_in_words(image, None)
            for at in range(max(image.start, start), min(image.stop, stop)):
                texts[at - start] = said if at == image.start else ""
        inside = changes[(changes > start) & (changes < stop)].tolist()
        for first, last in pairwise([start, *inside, stop]):
            text = "".join(texts[first - start : last - start])
            parts.append((_ELEMENTS[kinds[first]], escape_hidden(text)))
    return {
        "name": name,
        "parts": parts,
        "tokens": len(ids),
        "trained": int((kinds == _TRAINED).sum()),
        "lost": int((kinds == _LOST).sum()) if is_cut else None,
        "images": len(images),
    }


def _windows(size: int, places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the parts of a document to show: its ends, and what is around `places`."""
    windows: list[tuple[int, int]] = []
    for place in sorted({0, size, *places}):
        start = max(place - _AROUND, 0)
        stop = min(place + _AROUND, size)
        if windows and start <= windows[-1][1] + _AROUND:
            start, _ = windows.pop()
        windows.append((start, stop))
    return windows
