"""The isolation guard of a run with images: it also probes with the run's own images.

Documents with one image, with several and with none stand behind others, with other images before
them, and first. A backend that computes another attention between the tokens of one image than the
model does (Gemma 3: both ways) differs from the document alone, and fails too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.attention.model_facts import text_config
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_ROW
from trl_packing.isolation.check import CheckResult
from trl_packing.isolation.guard import IsolationGuard, NotIsolated
from trl_packing.isolation.probes import Document, Probe, Row, random_tokens
from trl_packing.vision.documents import WAY_OUT
from trl_packing.vision.images import ImageStore

_MOST_POSITIONS = 64


class ImageGuard(IsolationGuard):
    """An `IsolationGuard` that checks documents with images, too; options as there."""

    def __init__(self, model: nn.Module, store: ImageStore, **options: Any):
        # Padded rows of the text part would not match the images of the whole row.
        super().__init__(model, **options | {"packing_requested": True})
        kind = self.base_model.config.model_type
        opens = getattr(text_config(self.base_model), "use_bidirectional_attention", None)
        opens = kind == "gemma3" or opens in (True, "all", "vision")
        # The tokens of an image see each other in both directions.
        if opens and self._isolation_check == "off":
            raise ValueError(
                f"isolation_check='off' with images on {kind}: only the check finds a backend that "
                "is exact with them; leave isolation_check out"
            )
        self.store = store
        self._with_images: list[dict[str, Any]] = []

    def sample(self, dataset: Any, max_length: int | None) -> list[np.ndarray]:
        """Return representative documents, their image tokens replaced by ordinary ones."""
        documents = super().sample(dataset, max_length)
        if self._isolation_check != "off" and IMAGE_ROW in (dataset.column_names or ()):
            self._with_images = documents_to_check(dataset, self.store)
        draw = random_tokens(self.base_model, np.random.default_rng(0))
        fields = vars(self.base_model.config).items()
        ids = [v for k, v in fields if k.endswith(("token_id", "token_index")) and type(v) is int]
        return [np.where(np.isin(d, ids), draw(len(d)), d) for d in documents]

    def ensure(self, *arguments: Any, **options: Any) -> None:
        """Do what `IsolationGuard` does, and name the way out in its error."""
        try:
            super().ensure(*arguments, **options)
        except NotIsolated as error:
            raise NotIsolated(f"{error}; {WAY_OUT}") from error

    def probes(self, documents: Sequence[np.ndarray], *, thorough: bool) -> list[Probe]:
        """Return probes of text, and of the documents with images."""
        return [*super().probes(documents, thorough=thorough), *image_probes(self._with_images)]

    def _first_exact(
        self, choices: Sequence[AttentionChoice], *others: Any
    ) -> tuple[list[AttentionChoice], CheckResult]:
        if self._with_images:
            # Padded rows hold the tokens of a document in another order than its images.
            choices = [c for c in choices if c.backend not in PADDED] or choices
        return super()._first_exact(choices, *others)


def documents_to_check(dataset: Any, store: ImageStore) -> list[dict[str, Any]]:
    """Return short documents with one image, with several and with none, with their images.

    A data set whose documents have equal numbers of images gives two of them.
    """
    order = np.argsort(ArrowDocuments(dataset, ["input_ids"]).lengths(), kind="stable")
    rows = np.array([-1 if row is None else row for row in dataset[IMAGE_ROW]])[order]
    counts = np.array([len(store.sizes(row)) if row >= 0 else 0 for row in rows.tolist()])
    kinds = [np.flatnonzero(kind) for kind in (counts > 1, counts == 1, counts == 0)]
    most = 1 if len(kinds[0]) and len(kinds[1]) else 2
    chosen = [*kinds[0][:most], *kinds[1][:most]]
    return [
        {
            "input_ids": np.asarray(dataset[int(order[at])]["input_ids"]),
            "images": [store.load(int(rows[at]))] if counts[at] else [],
        }
        for at in chosen + [*kinds[2][:1]] * bool(chosen)
    ]


def image_probes(documents: Sequence[Document]) -> list[Probe]:
    """Return a probe of each document, with its `images`, behind another one."""
    return [_probe(*pair) for pair in zip([*documents[1:], *documents[:1]], documents, strict=True)]


def _probe(before: Document, document: Document) -> Probe:
    from PIL import ImageOps

    at = np.arange(len(document["input_ids"]) - 1)[-_MOST_POSITIONS:]
    negatives = [[ImageOps.invert(i.convert("RGB")) for i in row] for row in before["images"]]
    others, behind = [before, {**before, "images": negatives}], len(before["input_ids"]) + at
    rows = [Row([other, document], behind) for other in others]
    rows += [Row([document, before], at), Row([before, document, before], behind)]
    whole = [
        {
            "input_ids": np.concatenate([other["input_ids"], document["input_ids"]]),
            "images": [*other["images"], *document["images"]],
        }
        for other in others
    ]
    count, before_it = (sum(map(len, d["images"])) for d in (document, before))
    name = f"{count} image(s) after {before_it}"
    return Probe(name, document, at, rows, [Row([one], behind) for one in whole])
