"""Measures on a model whether the images of a document affect the next one in a packed row.

    alone          [B]           without packing: ids, pixels, the model's own positions
    packed         [A, B]        as in training; also with other images in A, and B first
    contaminated   [A · B]       the same row as one document: the effect of a full leak

B is a document of the run with its images, A another one; either may have none. The verdict follows
from the outputs for B as in `isolation/check.py`. A backend that computes another attention between
the tokens of one image than the model does (Gemma 3: both ways) differs from the document alone,
and fails too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.isolation.check import IsolationReport, severity, verdict_of
from trl_packing.isolation.locate import gradient_difference, masked_before
from trl_packing.isolation.measure import (
    Measurement,
    collate_packed,
    ordinary_batch,
    outputs_alone,
    outputs_in_row,
    two_roundings,
)
from trl_packing.models.introspection import unwrap_model
from trl_packing.models.state import preserve_state
from trl_packing.packing.collator import PackedCollator
from trl_packing.vision.blank_images import parameters_of_images

Document = Mapping[str, Any]  # `input_ids`, and `images` of each row of the user in it

_MOST_POSITIONS = 64


@torch.no_grad()
def check_images(
    model: nn.Module,
    documents: Sequence[Document],
    *,
    collator: PackedCollator,
    training: bool | None = None,
    attention: str | None = None,
    fused_head: bool = False,
    gradients: bool = False,
) -> IsolationReport:
    """Return whether documents with images affect each other on `model`.

    Args:
        model: called as a training step calls it; packed calls run by the installed backend.
        documents: with `input_ids` and decoded `images` (`batch.IMAGES`), of which some may have
            none; at least one.
        collator: makes the rows.
        training: the mode to check, by default the model's.
        attention: the name of the attention in the report.
        fused_head: score rows through TRL's fused LM head.
        gradients: also compare the gradients of the loss of each document, packed and alone: of the
            tower with its projector, and of the text model, apart.

    Raises:
        Exception: any error that the model raises against a row with images.
    """
    inner, difference = unwrap_model(model), None
    pairs = list(zip([*documents[1:], documents[0]], documents, strict=True))
    with preserve_state(model, training):
        reports = [
            verdict_of(
                _measure(model, inner, before, document, fused_head, collator),
                f"{_count(document)} image(s) after {_count(before)}",
                inner,
                attention,
                model.training,
            )
            for before, document in pairs
        ]
        if gradients:
            difference = max(_gradients_apart(model, inner, *pair, collator) for pair in pairs)
    return replace(min(reports, key=severity), gradient_difference=difference)


def _gradients_apart(
    model: nn.Module, inner: Any, before: Document, document: Document, collate: PackedCollator
) -> float:
    """Return the largest relative difference of the gradients of `document`, packed and alone."""
    alone = _ordinary(inner, np.asarray(document["input_ids"], np.int64), document, collate)
    row = collate_packed(inner, collate, masked_before([before, document]))
    return gradient_difference(model, inner, alone, row, parameters_of_images(inner))


def _measure(
    model: nn.Module,
    inner: Any,
    before: Document,
    document: Document,
    fused_head: bool,
    collate: PackedCollator,
) -> Measurement:
    ids = np.asarray(document["input_ids"], np.int64)
    size = len(ids)
    at = np.arange(size - 1)[-_MOST_POSITIONS:]
    others = [before, _with_other_images(before)]

    def alone(rounded: bool) -> Tensor:
        batch = _ordinary(inner, ids, document, collate)
        targets = ids[at + 1] if fused_head else None
        return outputs_alone(model, inner, batch, at - size, targets, rounded)

    def packed(*row: Document) -> Tensor:
        where = sum(len(d["input_ids"]) for d in row[: [*map(id, row)].index(id(document))])
        return outputs_in_row(model, inner, row, where + at, fused_head, collate)

    def contaminated(other: Document) -> Tensor:
        one = {
            "input_ids": np.concatenate([other["input_ids"], ids]),
            "images": [*other["images"], *document["images"]],
        }
        where = len(other["input_ids"])
        return outputs_in_row(model, inner, [one], where + at, fused_head, collate)

    return Measurement(
        alone=two_roundings(inner, alone),
        packed=[
            *(packed(other, document) for other in others),
            packed(document, before),
            packed(before, document, before),
        ],
        contaminated=[contaminated(other) for other in others],
    )


def _ordinary(inner: Any, ids: np.ndarray, document: Document, collate: Any) -> dict[str, Any]:
    """Return the batch of one document without packing: the model makes its positions itself."""
    made = collate.images.tensors([document], [ids])
    made.pop("position_ids", None)
    return ordinary_batch(
        inner, torch.from_numpy(ids)[None], attention_mask=torch.ones(1, len(ids)).long(), **made
    )


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
