"""The images of one run: its image files, its documents, what their images cost, their check.

rows of the user       row 0: images of 8 and 24 patches      row 1: none
documents, image_ids   [0 1 1 0 2 2 2 0]                      [0 0 0]
patches                32                                     0

The isolation check also probes with the run's own images: documents with one image, with several
and with none stand behind others, with other images before them, and first. A backend that computes
another attention between the tokens of one image than the model does (Gemma 3: both ways) differs
from the document alone, and fails too.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from torch import nn
from transformers import ProcessorMixin
from trl import SFTTrainer

from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.attention.model_facts import config_of, text_config
from trl_packing.data.rules import Rules
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS, IMAGE_ROW
from trl_packing.isolation.check import CheckResult
from trl_packing.isolation.guard import IsolationGuard, NotIsolated
from trl_packing.isolation.probes import Document, Probe, Row, random_tokens
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.sampler import ImageLoads
from trl_packing.vision.batch import ImageBatches, StillTower, hide_boundaries, ranks_wait_for_tower
from trl_packing.vision.documents import WAY_OUT, check_settings, documents_with_images
from trl_packing.vision.images import ImageStore
from trl_packing.vision.sizes import patch_size_of
from trl_packing.vision.support import (
    check_no_other_media,
    has_images,
    holds_conversations,
    why_not_packed,
)

_MOST_POSITIONS = 64  # of a probe


class RunImages:
    """Prepares data sets with images, and makes the tensors of their micro-batches."""

    def __init__(self) -> None:
        self.packs = False  # whether the training set has images that are packed
        self.store = ImageStore()
        self._loads: dict[int, tuple[int, int]] = {}  # images and patches of rows
        self._patch_size = 0
        self._takes_texts = False
        self._tower: StillTower | None = None

    def why_not_packed(
        self, model: Any, train: Any, evaluated: Any, args: Any, scores: Any = None
    ) -> str | None:
        """Return why a training set with images takes TRL's path, or None if it is packed.

        `model` may be a name, `train` and `evaluated` a dictionary of sets; `scores` is the user's
        `compute_metrics`. Raises ValueError for videos or audio.
        """
        sets: list[tuple[str, Any]] = []
        for name, given in (("train", train), ("eval", evaluated)):
            sets += given.items() if isinstance(given, dict) else [(name, given)]
        for name, dataset in sets:
            if isinstance(dataset, Dataset):
                check_no_other_media(dataset, name)
        with_images = [dataset for _, dataset in sets if has_images(dataset)]
        reason = why_not_packed(model, with_images, args, scores)
        if reason is None:
            self.packs = True
            self._takes_texts = isinstance(train, dict)
            self._patch_size = patch_size_of(config_of(model, args))
        return reason

    def loads(self, documents: ArrowDocuments) -> ImageLoads | None:
        """Return images, image tokens and patches of documents; None if they have none."""
        if not self.packs or IMAGE_IDS not in documents.columns:
            return None
        stored = documents.dataset.data.column(IMAGE_ROW).to_numpy()
        rows = documents.in_order(stored)
        of_rows = [self._loads.get(row, (0, 0)) for row in rows.tolist()]  # NaN: of no images
        images, patches = np.array(of_rows, np.int64).reshape(-1, 2).T
        tokens = documents.counts_where(IMAGE_IDS, lambda ids: ids > 0)
        return ImageLoads(images, tokens, patches)

    def take(self, dataset: Any, name: str) -> Any:
        """Return `dataset` with numbers in place of its images, which TRL would refuse to pack.

        In a dictionary, conversations without images become rows that have none, so that settings
        apply to both.
        """
        if isinstance(dataset, dict):
            return {key: self.take(value, key) for key, value in dataset.items()}
        if not (self.packs and isinstance(dataset, Dataset)):
            return dataset
        is_taken = has_images(dataset) or (self._takes_texts and holds_conversations(dataset))
        return self.store.take(dataset, name) if is_taken else dataset

    def without_files(self) -> "RunImages":
        """Return the images of the same run before any of its data sets was taken."""
        made = copy.copy(self)
        made.store = ImageStore()
        made._loads = {}
        return made

    def guard(self, model: Any, **options: Any) -> IsolationGuard:
        """Return the guard of the run; options as for `IsolationGuard`."""
        if not self.packs:
            return IsolationGuard(model, **options)
        return ImageGuard(model, self.store, **options)

    def add_to(self, collator: PackedCollator, trainer: SFTTrainer) -> PackedCollator:
        """Return `collator`, with the tensors of images in its rows if the run has images."""
        if not self.packs:
            return collator
        waits = ranks_wait_for_tower(trainer)
        hide_boundaries(trainer.model)
        if waits and not trainer.is_deepspeed_enabled:
            self._tower = StillTower()
            trainer.add_callback(self._tower)
        made = ImageBatches(self.store, trainer.processing_class, trainer.model, fills_rows=waits)
        return collator.replaced(images=made)

    def measure(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Note whether any rank has images in the micro-batches of a step."""
        if self._tower is not None:
            self._tower.measure(batches)

    def tokenize(self, dataset: Any, rules: Rules, name: str) -> Any:
        """Return the documents of a data set with images; any other data set as it is.

        Raises ValueError naming a row that has faults.
        """
        if isinstance(rules.processing_class, ProcessorMixin):
            check_no_other_media(dataset, name)
        if not isinstance(dataset, Dataset):
            return dataset
        dataset = self.take(dataset, name)
        if IMAGE_ROW not in dataset.column_names or "input_ids" in dataset.column_names:
            return dataset
        check_settings(dataset, rules, name)
        documents, loads = documents_with_images(dataset, rules, self.store, self._patch_size, name)
        self._loads.update(zip(dataset[IMAGE_ROW], loads, strict=True))
        return documents


class ImageGuard(IsolationGuard):
    """An `IsolationGuard` that checks documents with images, too; options as there."""

    def __init__(self, model: nn.Module, store: ImageStore, **options: Any):
        # Padded rows of the text part would not match the images of the whole row.
        super().__init__(model, **options | {"packing_requested": True})
        kind = self.base_model.config.model_type
        opens = getattr(text_config(self.base_model), "use_bidirectional_attention", None)
        opens = kind == "gemma3" or opens in (True, "all", "vision")
        # The tokens of an image see each other in both directions.
        if opens and not self.checks:
            raise ValueError(
                f"isolation_check='off' with images on {kind}: only the check finds a backend that "
                "is exact with them; leave isolation_check out"
            )
        self.store = store
        self._with_images: list[Document] = []

    def sample(self, dataset: Any, max_length: int | None) -> list[np.ndarray]:
        """Return representative documents, their image tokens replaced by ordinary ones."""
        documents = super().sample(dataset, max_length)
        if self.checks and IMAGE_ROW in (dataset.column_names or ()):
            self._with_images = documents_to_check(dataset, self.store)
        draw = random_tokens(self.base_model)
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


def documents_to_check(dataset: Any, store: ImageStore) -> list[Document]:
    """Return short documents with one image, with several and with none, with their images.

    A data set whose documents have equal numbers of images gives two of them.
    """
    order = np.argsort(ArrowDocuments(dataset, ["input_ids"]).lengths(), kind="stable")
    rows = np.array([-1 if row is None else row for row in dataset[IMAGE_ROW]])[order]
    counts = np.array([len(store.sizes(row)) if row >= 0 else 0 for row in rows.tolist()])
    several = np.flatnonzero(counts > 1)
    single = np.flatnonzero(counts == 1)
    most = 1 if len(several) and len(single) else 2
    chosen = [*several[:most], *single[:most]]
    if chosen:
        chosen += [*np.flatnonzero(counts == 0)[:1]]
    found: list[Document] = []
    for at in chosen:
        images = [store.load(int(rows[at]))] if counts[at] else []
        ids = np.asarray(dataset[int(order[at])]["input_ids"])
        found.append({"input_ids": ids, "images": images})
    return found


def image_probes(documents: Sequence[Document]) -> list[Probe]:
    """Return a probe of each document, with its `images`, behind another one."""
    from PIL import ImageOps

    made = []
    for before, document in zip([*documents[1:], *documents[:1]], documents, strict=True):
        negatives = []
        for row in before["images"]:
            negatives.append([ImageOps.invert(image.convert("RGB")) for image in row])
        at = np.arange(len(document["input_ids"]) - 1)[-_MOST_POSITIONS:]
        behind = len(before["input_ids"]) + at
        ids = np.concatenate([before["input_ids"], document["input_ids"]])
        rows = []
        whole = []
        for images in (before["images"], negatives):
            rows.append(Row([{**before, "images": images}, document], behind))
            joined = {"input_ids": ids, "images": [*images, *document["images"]]}
            whole.append(Row([joined], behind))
        rows += [Row([document, before], at), Row([before, document, before], behind)]
        count, before_it = (sum(map(len, d["images"])) for d in (document, before))
        name = f"{count} image(s) after {before_it}"
        made.append(Probe(name, document, at, rows, whole))
    return made
