"""The isolation guard of a run with images: it also probes with the run's own images.

    text probes     as in any run; image tokens are replaced by ordinary ones
    image probes    documents with one image, with several and with none: [A, B] also with other
                    images in A, and with B first

A backend must pass both. One that computes another attention between the tokens of one image than
the model does (Gemma 3: both ways) differs from the document alone, and fails too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.attention.model_facts import text_config
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS, IMAGE_ROW
from trl_packing.isolation.check import CheckResult
from trl_packing.isolation.guard import IsolationGuard, NotIsolated
from trl_packing.isolation.probes import Document, Probe, Row, random_tokens
from trl_packing.vision.documents import WAY_OUT, images_of
from trl_packing.vision.images import ImageStore

_MOST_POSITIONS = 64
_SEARCHED = 1_000  # shortest documents with images, among which those of the check are found


class ImageGuard(IsolationGuard):
    """An `IsolationGuard` that checks documents with images, too; options as there."""

    def __init__(self, model: nn.Module, store: ImageStore, **options: Any):
        # Padded rows of the text part would not match the images of the whole row.
        super().__init__(model, **options | {"packing_requested": True})
        if self._isolation_check == "off" and _opens_images(self.base_model):
            raise ValueError(
                f"isolation_check='off' with images on {self.base_model.config.model_type}: only "
                "the check finds a backend that is exact with them; leave isolation_check out"
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
    ) -> tuple[AttentionChoice, CheckResult]:
        if self._with_images:
            # Padded rows hold the tokens of a document in another order than its images.
            choices = [c for c in choices if c.backend not in PADDED] or choices
        return super()._first_exact(choices, *others)


def _opens_images(model: Any) -> bool:
    """Return whether the tokens of an image see each other in both directions."""
    opens = getattr(text_config(model), "use_bidirectional_attention", None)
    return model.config.model_type == "gemma3" or opens in (True, "all", "vision")


def documents_to_check(dataset: Any, store: ImageStore) -> list[dict[str, Any]]:
    """Return short documents with one image, with several and with none, with their images.

    A data set whose documents have equal numbers of images gives two of them.
    """
    documents = ArrowDocuments(dataset, ["input_ids", IMAGE_IDS])
    order = np.argsort(documents.lengths(), kind="stable")
    has_images = np.zeros(len(order), bool)
    has_images[documents.rows_where(IMAGE_IDS, lambda ids: ids > 0)] = True
    short, without = order[has_images[order]][:_SEARCHED], order[~has_images[order]]
    several = np.array([len(images_of(documents[n])) > 1 for n in short.tolist()], bool)
    kinds = [short[several], short[~several]]
    most = 1 if all(map(len, kinds)) else 2
    chosen = np.concatenate([numbers[:most] for numbers in kinds])
    numbers = [*chosen, *without[:1]] if len(chosen) else []
    return [_with_pixels(dataset, int(number), store) for number in numbers]


def _with_pixels(dataset: Any, number: int, store: ImageStore) -> dict[str, Any]:
    row = dataset[number]
    images = np.unique(row[IMAGE_IDS])
    images = images[images > 0] - 1
    loaded = [store.load(int(row[IMAGE_ROW]), images)] if len(images) else []
    return {"input_ids": np.asarray(row["input_ids"]), "images": loaded}


def image_probes(documents: Sequence[Document]) -> list[Probe]:
    """Return a probe of each document, with its `images`, behind another one."""
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

    count, others_count = (sum(map(len, d["images"])) for d in (document, before))
    name = f"{count} image(s) after {others_count}"
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
