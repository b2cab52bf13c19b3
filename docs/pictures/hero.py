"""Draw the picture at the top of README.md, light and dark: `python docs/pictures/draw.py`.

It shows the demo's first documents, tokenized: padded in batches, packed by `pack`, and the
attention of a packed row. All widths are tokens at one scale.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from trl_packing import pack

HERE = Path(__file__).parent
DEMO = HERE.resolve().parents[1] / "recipes" / "demo"

NUM_DOCUMENTS, BATCH, CAPACITY = 32, 8, 128
WIDTH, HEIGHT = 836, 388
TOKEN, ROW, GAP = 2.7, 8.5, 1.5  # pixels a token; height of a row; space between rows
LEFT, RIGHT, TOP = 4, 462, 46
MASK = 176  # pixels of the attention's square


@dataclass(frozen=True)
class Theme:
    """Colors of text, of padding, and of documents."""

    ink: str
    soft: str
    empty: str
    documents: tuple[str, ...]


LIGHT = ("#2f6fd0", "#c4570e", "#1f8a70", "#9c4a9c", "#b08a00", "#c2384f", "#5f7f1a")
DARK = ("#6ea8fe", "#f0883e", "#4ac6a5", "#d58fd5", "#d6b84a", "#ff7b8c", "#a3c35a")
THEMES = {
    "light": Theme("#1f2328", "#59636e", "#e4e8ec", LIGHT),
    "dark": Theme("#e6edf3", "#9198a1", "#363e4a", DARK),
}


def documents() -> np.ndarray:
    """Return tokens of the prompt and of the completion, with its EOS, of each document."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "tokenizer")
    lines = (DEMO / "data" / "train.jsonl").read_text().splitlines()[:NUM_DOCUMENTS]
    rows = [json.loads(line) for line in lines]
    return np.array(
        [
            (
                len(tokenizer(row["prompt"]).input_ids),
                len(tokenizer(row["completion"]).input_ids) + 1,
            )
            for row in rows
        ]
    )


def picture(theme: Theme) -> str:
    """Return the picture as SVG, on a transparent background."""
    tokens = documents()
    lengths = tokens.sum(1)
    plan = pack(lengths, CAPACITY, seed=42)
    padded = int(lengths.reshape(-1, BATCH).max(1).sum()) * BATCH
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="ui-sans-serif, system-ui, sans-serif" font-size="23" fill="{theme.ink}">',
        "<title>The same documents padded and packed, and the attention of a packed row</title>",
        title(LEFT, "padded", f"{1 - lengths.sum() / padded:.0%} padding", theme),
        title(RIGHT, "packed", "no padding", theme),
    ]
    y = float(TOP)
    for start in range(0, NUM_DOCUMENTS, BATCH):
        longest = lengths[start : start + BATCH].max()
        for document in range(start, start + BATCH):
            parts += row([document], tokens, longest, LEFT, y, theme)
            y += ROW + GAP
        y += 5
    bottom = y - 5 - GAP
    for number, bin_documents in enumerate(plan):
        y = TOP + number * (ROW + GAP)
        parts += row(bin_documents.tolist(), tokens, 0, RIGHT, y, theme)
    y = bottom - MASK
    parts += attention(max(plan, key=len).tolist(), lengths, RIGHT, y, theme)
    x = RIGHT + MASK + 20
    parts += [words(x, y + 18, "No document"), words(x, y + 46, "sees another.")]
    color = theme.documents[0]
    samples = (("prompt", color, 0.4), ("trained", color, 1), ("padding", theme.empty, 1))
    for line, (word, fill, opacity) in enumerate(samples):
        y = bottom - 17 - 29 * (2 - line)
        parts += [box(x, y, 17, fill, opacity, 17), words(x + 27, y + 16, word, theme.soft)]
    return "\n".join([*parts, "</svg>\n"])


def title(x: float, name: str, share: str, theme: Theme) -> str:
    """Return a name in bold with a share behind it."""
    rest = f'<tspan font-weight="400" fill="{theme.soft}" dx="12">{share}</tspan>'
    return f'<text x="{x:g}" y="26" font-weight="600">{name}{rest}</text>'


def row(
    documents: list[int], tokens: np.ndarray, width: int, x: float, y: float, theme: Theme
) -> list[str]:
    """Return a row: prompts light, completions full, then padding up to `width` tokens."""
    parts = []
    start = x
    for document in documents:
        color = theme.documents[document % len(theme.documents)]
        prompt, completion = tokens[document].tolist()
        parts.append(box(x, y, prompt * TOKEN, color, 0.4))
        parts.append(box(x + prompt * TOKEN, y, completion * TOKEN - 1, color, 1))
        x += (prompt + completion) * TOKEN
    free = start + width * TOKEN - x
    return [*parts, box(x, y, free, theme.empty, 1)] if free > 0 else parts


def attention(
    documents: list[int], lengths: np.ndarray, x: float, y: float, theme: Theme
) -> list[str]:
    """Return the square of a row's attention, with a triangle for each document."""
    scale = MASK / CAPACITY
    ends = np.cumsum([0, *lengths[documents]]) * scale
    parts = [box(x, y, MASK, theme.empty, 1, MASK)]
    for document, (start, end) in zip(documents, pairwise(ends.tolist()), strict=True):
        color = theme.documents[document % len(theme.documents)]
        corners = ((start, start), (start, end), (end, end))
        points = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in corners)
        parts.append(f'<polygon points="{points}" fill="{color}"/>')
    return parts


def box(x: float, y: float, width: float, fill: str, opacity: float, height: float = ROW) -> str:
    transparent = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
    return f'<rect {place} fill="{fill}"{transparent}/>'


def words(x: float, y: float, text: str, color: str | None = None) -> str:
    fill = f' fill="{color}"' if color else ""
    return f'<text x="{x:g}" y="{y:g}"{fill}>{text}</text>'


def draw_hero() -> None:
    for name, theme in THEMES.items():
        (HERE / f"hero_{name}.svg").write_text(picture(theme))


if __name__ == "__main__":
    draw_hero()
