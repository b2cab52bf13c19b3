"""Documents and packed rows of a plan as HTML: the text with its trained tokens, and strips.

strip       ▒▒▒▒██████│▒▒███│▒▒▒▒▒▒████   a micro-batch; trained dark, prompt light
document    Question: …  [trained text]  (text that the overflow policy cuts off)
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.documents.labels import IGNORE_INDEX, document_labels
from trl_packing.formatting.printable import escape_text
from trl_packing.pages.page import escape
from trl_packing.tools.plan.plan import CutDocuments, RunPlan
from trl_packing.tools.preview.show import token_texts
from trl_packing.vision.documents import images_of

# Tokens shown around each end of a long document, and around each place where it changes.
_AROUND = 90

# Pieces of HTML in all strips: more of them would be thinner than a pixel.
_MOST_PARTS = 4000
_MOST_STRIPS = 12

# Kinds of tokens, and the HTML elements that mark them.
_PROMPT, _TRAINED, _LOST = 0, 1, 2
_ELEMENTS = {_PROMPT: "span", _TRAINED: "mark", _LOST: "del"}


# --- documents ------------------------------------------------------------------------------------


def example_documents(plan: RunPlan) -> str:
    """Return the longest and the shortest document of the plan, and some of those that are cut."""
    return f'<div class="documents">{"".join(_examples(plan))}</div>'


def _examples(plan: RunPlan) -> Iterator[str]:
    documents = plan.documents
    lengths = documents.lengths()
    for name, row in (("Longest", int(lengths.argmax())), ("Shortest", int(lengths.argmin()))):
        document = documents[row]
        kinds = _kinds(_labels(document))
        yield _document(f"{name}: document {row:,}", document, kinds, plan.tokenizer)
    if plan.cut is not None and len(plan.cut.rows):
        yield from _cut_documents(plan.cut, plan.tokenizer)


def _cut_documents(cut: CutDocuments, tokenizer: Any) -> Iterator[str]:
    """Yield the longest and the shortest document that is too long, and one between."""
    lengths, pieces = cut.documents.lengths(), cut.pieces
    order = cut.rows[np.argsort(-lengths[cut.rows], kind="stable")]
    for at in sorted({0, len(order) // 2, len(order) - 1}):
        row = int(order[at])
        document, mine = cut.documents[row], np.flatnonzero(pieces.rows == row)
        kinds = np.full(lengths[row], _LOST)
        for start, stop in zip(pieces.starts[mine], pieces.stops[mine], strict=True):
            kinds[start:stop] = _kinds(_labels(document)[start:stop])
        name = f"Too long: document {row:,} before the cut"
        words = [f"{quantity(int((kinds == _LOST).sum()), 'token')} lost"]
        words += [f"kept in {len(mine):,} pieces"] * (len(mine) > 1)
        starts = pieces.starts[mine][1:].tolist()
        yield _document(name, document, kinds, tokenizer, starts, words)


def _labels(document: Mapping[str, Any]) -> np.ndarray:
    return document_labels(document, np.asarray(document["input_ids"]))


def _kinds(labels: np.ndarray) -> np.ndarray:
    """Return the kind of each token; the first token of a document is never a target."""
    kinds = np.where(labels == IGNORE_INDEX, _PROMPT, _TRAINED)
    kinds[:1] = _PROMPT
    return kinds


def _document(
    name: str,
    document: Mapping[str, np.ndarray],
    kinds: np.ndarray,
    tokenizer: Any,
    pieces: Sequence[int] = (),
    words: Sequence[str] = (),
) -> str:
    trained = int((kinds == _TRAINED).sum())
    ids, images = document["input_ids"], _image_starts(document)
    words = [*([quantity(len(images), "image")] * bool(images)), *words]
    note = ", ".join([quantity(len(ids), "token"), f"{trained:,} trained", *words])
    shown = np.ones(len(ids), bool)  # of an image, only its first token
    for start, size in images.items():
        shown[start + 1 : start + size] = False
    places = np.cumsum(shown) - 1
    ids, kinds, pieces = ids[shown], kinds[shown], places[list(pieces)].tolist()
    sizes = {int(places[start]): size for start, size in images.items()}
    return (
        f'<div class="document of{trained % 6}"><h3>{escape(name)} '
        f'<span class="note">{escape(note)}</span></h3>'
        f'<pre class="wrap">{"".join(_text(ids, kinds, tokenizer, pieces, sizes))}</pre></div>'
    )


def _image_starts(document: Mapping[str, np.ndarray]) -> dict[int, int]:
    """Return the number of tokens of each image, by its first token in the document."""
    return {image.start: image.stop - image.start for image in images_of(document)}


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


def strips(plan: RunPlan) -> str:
    """Return the first micro-batches of the epoch as strips of equal scale."""
    epoch, parts = plan.epoch, 0
    rows: list[str] = []
    # Not `epoch.tokens`: a strip shows each document whole, also where documents share tokens.
    lengths = plan.documents.lengths()
    shown = [int(lengths[members].sum()) for members in epoch.members[:_MOST_STRIPS]]
    width = max(*shown, _room(plan))
    for at in range(len(shown)):
        strip = _strip(plan, epoch.members[at], width)
        parts += strip.count("<b ") + strip.count("<i ")
        if rows and parts > _MOST_PARTS:
            break
        step, rank = at // epoch.slots + 1, at % epoch.ranks
        name = f"step {step:,}" + f", rank {rank}" * (epoch.ranks > 1)
        rows.append(f"<span>{name}</span>{strip}")
    kind = "strips" if _room(plan) and not plan.grouped else "strips open"
    return f'<div class="{kind}">{"".join(rows)}</div>'


def _room(plan: RunPlan) -> int:
    """Return the tokens that fit into a micro-batch of bins, 0 without bins."""
    args = plan.run.args
    return args.max_length * args.per_device_train_batch_size if plan.bins is not None else 0


def _strip(plan: RunPlan, members: np.ndarray, width: int) -> str:
    parts, start = [], 0
    for nth, row in enumerate(members.tolist()):
        kinds = _kinds(_labels(plan.documents[row]))
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
