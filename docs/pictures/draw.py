"""Draw the pictures of the documentation: `python docs/pictures/draw.py`.

Each picture has a white background, so it is readable in light and dark themes, and on GitHub.
hero.py draws the one of README.md in both themes.
"""

import ast
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from hero import draw_hero

from trl_packing import PackedCollator, document_ids_from_lengths, pack
from trl_packing.attention.padded_rows import group_documents
from trl_packing.packing.prefix_tree import build_prefix_tree

HERE = Path(__file__).parent
WIDTH = 480  # readable on a phone
COLORS = ["#9ecae9", "#ffcf8f", "#b5dba4", "#f3b0b0", "#cdb8e6", "#e6cfa8"]
GRAY = "#d9d9d9"
INK = "#1f2328"


class Picture:
    """Shapes on a white background, as SVG."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height = width, height
        self.parts = [
            f"<title>{title}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" '
            'fill="#ffffff" stroke="#c8c8c8"/>',
        ]

    def box(self, x: float, y: float, w: float, h: float, fill: str, words: str = "") -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" '
            'stroke="#ffffff" stroke-width="1.5"/>'
        )
        if words:
            self.words(x + w / 2, y + h / 2 + 5, words, "middle")

    def words(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False):
        text = text.replace("&", "&amp;").replace("<", "&lt;")
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{text}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, dashed: bool = False) -> None:
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{INK}"{dash}/>'
        )

    def save(self, name: str) -> None:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-size="14" fill="{INK}" '
            'font-family="ui-sans-serif, system-ui, sans-serif" role="img">'
        )
        (HERE / name).write_text("\n".join([head, *self.parts, "</svg>\n"]))


def draw_row() -> None:
    """Draw a row of three documents: the collator's tensors, and the attention mask."""
    documents = [
        {"input_ids": [11, 12, 13], "completion_mask": [0, 1, 1]},
        {"input_ids": [21, 22], "completion_mask": [0, 1]},
        {"input_ids": [31, 32, 33, 34], "completion_mask": [0, 0, 1, 1]},
    ]
    batch = PackedCollator()(documents)
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    ids = document_ids_from_lengths(lengths).tolist()
    cell, left = 38, 116
    picture = Picture(WIDTH, 486, "A packed row of three documents")
    rows = [
        ("input_ids", batch["input_ids"][0].tolist()),
        ("labels", batch["labels"][0].tolist()),
        ("position_ids", batch["position_ids"][0].tolist()),
        ("seq_idx", batch["seq_idx"][0].tolist()),
    ]
    for r, (name, values) in enumerate(rows):
        y = 30 + r * 46
        picture.words(left - 12, y + 25, name, "end", bold=True)
        for t, value in enumerate(values):
            ignored = name == "labels" and value == -100
            fill = GRAY if ignored else COLORS[ids[t]]
            picture.box(left + t * cell, y, cell, 38, fill, "−100" if ignored else str(value))
    y = 30 + 4 * 46
    picture.words(left - 12, y + 25, "cu_seq_lens", "end", bold=True)
    for boundary in batch["cu_seq_lens_q"].tolist():
        x = left + boundary * cell
        picture.line(x, 24, x, y + 8, dashed=True)
        picture.words(x, y + 25, str(boundary), "middle")
    picture.words(24, y + 62, "No attention_mask, no cache: boundaries separate documents.")
    side, x0, y0 = 18, left, y + 92
    picture.words(left - 12, y0 + 16, "attention", "end", bold=True)
    total = len(ids)
    for query in range(total):
        for key in range(total):
            sees = key <= query and ids[key] == ids[query]
            fill = COLORS[ids[query]] if sees else "#f2f2f2"
            picture.box(x0 + key * side, y0 + query * side, side, side, fill)
    picture.words(x0 + total * side + 14, y0 + total * side - 4, "query ↓  key →")
    picture.save("row.svg")


def draw_plan() -> None:
    """Draw twelve documents, padded in three batches, and packed."""
    lengths = [11, 6, 7, 4, 8, 4, 3, 4, 3, 3, 5, 3]  # axolotl's multipack page, 256 tokens a unit
    capacity, batch, cell = 16, 4, 27
    plan = pack(lengths, capacity)
    padded = sum(
        max(lengths[i : i + batch]) * len(lengths[i : i + batch])
        for i in range(0, len(lengths), batch)
    )
    picture = Picture(WIDTH, 620, "Padded batches and a packing plan of the same documents")

    def color(document: int) -> str:
        return COLORS[document % len(COLORS)]

    def name(document: int) -> str:
        return f"{chr(65 + document)} {lengths[document]}"

    share = sum(lengths) / padded
    picture.words(24, 34, f"padded: 3 batches, {padded} cells, {share:.0%} filled", bold=True)
    y = 48.0
    for start in range(0, len(lengths), batch):
        longest = max(lengths[start : start + batch])
        for document in range(start, start + batch):
            length = lengths[document]
            picture.box(24, y, length * cell, 22, color(document), name(document))
            if length < longest:
                picture.box(24 + length * cell, y, (longest - length) * cell, 22, GRAY)
            y += 24
        y += 10
    words = f"packed: {len(plan)} bins of {capacity}, {plan.utilization:.0%} filled"
    picture.words(24, y + 24, words, bold=True)
    y += 38
    for documents in plan:
        x = 24.0
        for document in documents.tolist():
            width = lengths[document] * cell
            picture.box(x, y, width, 22, color(document), name(document))
            x += width
        end = 24 + capacity * cell
        if x < end:
            picture.box(x, y, end - x, 22, GRAY)
        y += 28
    for line in (
        "Best fit: from the longest document to the shortest, each into",
        "the fullest bin with room. Every epoch swaps documents of",
        "equal length, and exchanges documents between bins.",
    ):
        y += 22
        picture.words(24, y, line)
    picture.save("plan.svg")


def draw_step() -> None:
    """Draw one optimizer step of two ranks and two accumulated micro-batches."""
    bins = {  # documents of each micro-batch: tokens, trained tokens
        (0, 0): [(9, 4), (5, 3), (2, 1)],
        (0, 1): [(8, 5), (8, 2)],
        (1, 0): [(12, 6), (4, 2)],
        (1, 1): [(7, 3), (6, 4), (3, 2)],
    }
    cell = 22
    picture = Picture(WIDTH, 380, "An optimizer step: two ranks, two accumulated micro-batches")
    shade = 0
    for turn in range(2):
        top = 20 + turn * 122
        picture.words(24, top + 14, f"micro-batch {turn + 1}", bold=True)
        for rank in range(2):
            y, x = top + 26 + rank * 42, 90.0
            picture.words(76, y + 22, f"rank {rank}", "end")
            for tokens, trained in bins[turn, rank]:
                fill = COLORS[shade % len(COLORS)]
                picture.box(x, y, tokens * cell, 34, fill, f"{trained}/{tokens}")
                x += tokens * cell
                shade += 1
    documents = [d for group in bins.values() for d in group]
    trained = sum(n for _, n in documents)
    picture.words(24, 278, "Boxes are documents: trained tokens / tokens.")
    picture.words(24, 298, "Micro-batches that run together cost about the same.")
    words = f"loss = sum over all {len(documents)} documents ÷ {trained} trained tokens"
    picture.words(24, 328, words, bold=True)
    picture.words(24, 358, "1 rank × 4, 2 × 2 and 4 × 1: the same steps, the same loss.")
    picture.save("step.svg")


def draw_tree() -> None:
    """Draw three documents with common prefixes: apart, as a tree, as a row, and its attention."""
    documents = ["SSSQQaaa", "SSSQQbb", "SSSRRc"]
    colors = dict(zip("SQRabc", [GRAY, COLORS[0], COLORS[5], *COLORS[1:4]], strict=True))
    ids = [np.array([ord(letter) for letter in text]) for text in documents]
    tree = build_prefix_tree(ids)
    row = [chr(token) for token in tree.as_row(np.concatenate(ids))]
    total, apart = len(row), sum(map(len, documents))
    weights = tree.sum_targets(np.ones(apart)).astype(int).tolist()
    left, cell = 104, 24
    picture = Picture(WIDTH, 714, "Three documents that share prefixes, as a row")

    def cells(y: float, values: list[str], letters: list[str], first: int = 0) -> None:
        for t, (value, letter) in enumerate(zip(values, letters, strict=True), first):
            picture.box(left + t * cell, y, cell, 24, colors[letter], value)

    def name(y: float, text: str) -> None:
        picture.words(left - 12, y + 17, text, "end", bold=True)

    picture.words(24, 34, f"documents apart: {apart} tokens", bold=True)
    for d, text in enumerate(documents):
        name(46 + d * 28, "ABC"[d])
        cells(46 + d * 28, list(text), list(text))
    picture.words(24, 158, f"as a tree: {total} tokens, shared ones once", bold=True)
    runs = [(int(a), int(b)) for a, b in pairwise(tree.starts)]
    for lane, (document, depth, (start, stop)) in enumerate(
        zip(tree.order.tolist(), tree.depths.tolist(), runs, strict=True)
    ):
        y, fork = 170 + lane * 28, left + depth * cell
        name(y, "ABC"[document])
        cells(y, row[start:stop], row[start:stop], depth)
        if depth:
            picture.line(fork, 194, fork, y + 24)
    picture.words(24, 282, "as a row: branches behind each other", bold=True)
    cells(294, row, row)
    for y, text, values in (
        (324, "positions", tree.position_ids.tolist()),
        (354, "weights", weights),
    ):
        name(y, text)
        cells(y, [str(value) for value in values], row)
    for boundary in tree.cu_seqlens.tolist():
        picture.line(left + boundary * cell, 290, left + boundary * cell, 382, dashed=True)
    side, y0 = 19, 410
    name(y0 - 2, "attention")
    for segment, (start, stop) in enumerate(pairwise(tree.cu_seqlens.tolist())):
        keys = tree.key_index[tree.cu_seqlens_k[segment] : tree.cu_seqlens_k[segment + 1]].tolist()
        for query in range(start, stop):
            for key in range(total):
                sees = key in keys[: len(keys) - (stop - query) + 1]
                fill = colors[row[query]] if sees else "#f2f2f2"
                picture.box(left + key * side, y0 + query * side, side, side, fill)
    picture.words(left + total * side - 4, y0 + 20, "query ↓  key →", "end")
    picture.save("tree.svg")


def draw_recurrent() -> None:
    """Draw which tokens each part of a recurrent layer sees, in a row of three documents."""
    lengths = [5, 2, 4]
    boundaries = [0, *np.cumsum(lengths).tolist()]
    left, cell = 176, 26
    picture = Picture(WIDTH, 312, "What each part of a recurrent layer sees of a packed row")

    def cells(y: float, document: int, x: float = left, longest: int = 0) -> None:
        for t in range(max(lengths[document], longest)):
            is_real = t < lengths[document]
            fill = COLORS[document] if is_real else GRAY
            picture.box(x + t * cell, y, cell, 26, fill, "abc"[document] if is_real else "·")

    def row(y: float, name: str) -> None:
        picture.words(left - 12, y + 18, name, "end", bold=True)
        for document, start in enumerate(boundaries[:-1]):
            cells(y, document, left + start * cell)

    row(24, "projections")
    picture.words(left, 76, "↓ cut at the boundaries")
    picture.words(left - 12, 106, "recurrent function", "end", bold=True)
    y = 88
    for call, group in enumerate(group_documents(tuple(boundaries), equal_lengths=False), 1):
        longest = max(lengths[document] for document in group)
        for document in group:
            cells(y, document, longest=longest)
            y += 26
        picture.words(left + longest * cell + 10, y - 8, f"call {call}")
        y += 12
    picture.words(left, y + 14, "↓ joined again")
    row(y + 28, "projections, MLP")
    picture.words(24, y + 84, "All else, attention too, runs once on the whole row.")
    picture.words(24, y + 104, "A kernel that takes boundaries gets the whole row, too.")
    picture.save("recurrent.svg")


# Column of each folder; its row follows from the imports.
COLUMNS = {
    "documents": 1,
    "attention": 0,
    "loss": 1,
    "packing": 2,
    "config": 2,
    "data": 2,
    "isolation": 1,
    "plain_trainer": 0,
    "training": 1,
    "trainer": 1,
    "tools": 1,
    "cli": 1,
}


def import_table() -> dict[str, set[str]]:
    """Return folder or module -> those that it imports, from `TABLE` in tests/test_layers.py."""
    tests = HERE.resolve().parents[1] / "tests" / "test_layers.py"
    for node in ast.parse(tests.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TABLE":
            assert node.value is not None
            table = ast.literal_eval(node.value)
            return {name: set(imports.split()) for name, (imports, _) in table.items()}
    raise LookupError(f"{tests} has no TABLE")


def draw_imports(table: dict[str, set[str]] | None = None) -> None:
    """Draw the imports between folders, without those that follow from others."""
    table = table or import_table()

    def reached(name: str) -> set[str]:
        return table[name].union(*(reached(other) for other in table[name]))

    def level(name: str) -> int:
        return 1 + max((level(other) for other in table[name]), default=-1)

    apart = sorted(set(table) - set(COLUMNS))
    top = 50 + 50 * (1 + max(map(level, table)))
    picture = Picture(500, top + 40 * len(apart) + 38, "Imports between folders")

    def corner(name: str) -> tuple[float, float]:
        return 20 + 160 * COLUMNS[name], 24 + 50 * level(name)

    for name in COLUMNS:
        x, y = corner(name)
        implied = set().union(*(reached(other) for other in table[name]))
        for other in sorted((table[name] - implied) & set(COLUMNS)):
            above_x, above_y = corner(other)
            picture.line(x + 70, y, above_x + 70, above_y + 32)
    for name in COLUMNS:
        picture.box(*corner(name), 140, 32, COLORS[level(name) % len(COLORS)], name)
    for y, name in enumerate(apart):
        users = ", ".join(other for other in table if name in table[other]) or "nothing"
        picture.words(20, top + 40 * y, name, bold=True)
        picture.words(20, top + 40 * y + 18, f"imported by {users}")
    words = "A folder imports those that its lines lead up to, and may import those beyond."
    for y, line in enumerate(textwrap.wrap(words, 60)):
        picture.words(20, top + 40 * len(apart) + 6 + 18 * y, line)
    picture.save("imports.svg")


if __name__ == "__main__":
    draw_row()
    draw_plan()
    draw_step()
    draw_tree()
    draw_recurrent()
    draw_imports()
    draw_hero()
