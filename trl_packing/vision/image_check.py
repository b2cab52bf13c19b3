"""Measures on a model whether the images of a document affect the next one in a packed row.

    alone          [B]           without packing: ids, pixels, the model's own positions
    packed         [A, B]        as in training; also with other images in A, and B first
    contaminated   [A · B]       the same row as one document: the effect of a full leak

B is a document of the run with its images, A another one; either may have none. The verdict follows
from the outputs for B as in `isolation/check.py`. A backend that computes another attention between
the tokens of one image than the model does (Gemma 3: both ways) differs from the document alone,
and fails too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from trl_packing.attention.model_facts import unwrap_model
from trl_packing.isolation.check import Document, IsolationReport, Probe, Row, check_probes
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.blank_images import parameters_of_images

_MOST_POSITIONS = 64


def check_images(
    model: nn.Module,
    documents: Sequence[Document],
    *,
    collator: PackedCollator,
    **options: Any,
) -> IsolationReport:
    """Return whether documents with images affect each other on `model`.

    Args:
        model: called as a training step calls it; packed calls run by the installed backend.
        documents: with `input_ids` and decoded `images` (`batch.IMAGES`), of which some may have
            none; at least one.
        collator: makes the rows.
        options: of `check_probes`. With `gradients`, those of the tower with its projector and
            those of the text model are compared apart.

    Raises:
        Exception: any error that the model raises against a row with images.
    """
    return check_probes(
        model,
        image_probes(documents),
        collator=collator,
        apart=list(parameters_of_images(unwrap_model(model))),
        **options,
    )


def image_probes(documents: Sequence[Document]) -> list[Probe]:
    """Return a probe of each document, behind another one."""
    return [_probe(*pair) for pair in zip([*documents[1:], *documents[:1]], documents, strict=True)]


def _probe(before: Document, document: Document) -> Probe:
    size, at = len(document["input_ids"]), np.arange(len(document["input_ids"]) - 1)
    at, others = at[-_MOST_POSITIONS:], [before, _with_other_images(before)]
    rows = [[others[0], document], [others[1], document]]
    rows += [[document, before], [before, document, before]]

    def place(row: list[Document]) -> Row:
        first = [*map(id, row)].index(id(document))
        return Row(row, sum(len(d["input_ids"]) for d in row[:first]) + at)

    def one(other: Document) -> Row:
        ids = np.concatenate([other["input_ids"], document["input_ids"]])
        images = [*other["images"], *document["images"]]
        return Row([{"input_ids": ids, "images": images}], len(ids) - size + at)

    name = f"{_count(document)} image(s) after {_count(before)}"
    return Probe(name, document, at, [place(row) for row in rows], [one(x) for x in others])


def _with_other_images(document: Document) -> Document:
    """Return `document` with noise of the same sizes as images."""
    from PIL import Image as PillowImage

    rng = np.random.default_rng(0)
    images = [
        [PillowImage.fromarray(rng.integers(0, 256, (*i.size[::-1], 3), np.uint8)) for i in row]
        for row in document["images"]
    ]
    return {**document, "images": images}


def _count(document: Document) -> int:
    return sum(map(len, document["images"]))
