"""The gate before the first step: nothing is computed on documents that see each other.

It holds how the documents of a run are kept apart (`attention`), checks it on the wrapped model
with the run's own documents, and takes a slower exact way where the check fails.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_packing.attention.backends import AttentionChoice, resolve_attention
from trl_packing.attention.install import install_attention
from trl_packing.config import PackingOptions
from trl_packing.data.model_limits import NO_LIMITS, ModelLimits, limits_of
from trl_packing.data.stream import NOTHING_TO_TRAIN, check_lengths
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.isolation.check import check_fused_head
from trl_packing.isolation.fallback import Found, install_first, install_first_exact, with_fallbacks
from trl_packing.isolation.messages import why_not_exact
from trl_packing.loss.lm_head import use_native_head
from trl_packing.models.introspection import length_constants, unwrap_peft
from trl_packing.models.sharding import all_reduce_max, announce_head
from trl_packing.packing.collator import PackedCollator

logger = get_logger(__name__)


class IsolationGuard:
    """Keep packed documents apart on `model`, or refuse to go on.

    `attention` is the attention in use. `packing_requested` says whether packed or padding-free
    rows were requested. Existing TRL code that did not request them keeps running where no backend
    is exact: on padded rows.
    """

    def __init__(
        self,
        model: Any,
        options: PackingOptions,
        *,
        packing_requested: bool,
        device: torch.device,
        dtype: torch.dtype | None,
    ):
        self.model = model
        self.options = options
        self.packing_requested = packing_requested
        choice = resolve_attention(self.base_model, options.attention, device=device, dtype=dtype)
        ways = with_fallbacks(choice) if options.attention == "auto" else [choice]
        # The way in use, and those to take where it is not exact.
        self._ways = install_first(model, ways)
        self.attention = self._ways[0]
        self.limits = limits_of(self.base_model)
        # The shortest and the longest document, by mode (training or not).
        self._checked: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._checked_rows_of: PackedCollator | None = None
        self._head_is_checked = False

    @property
    def base_model(self) -> Any:
        """The transformers model inside PEFT's."""
        return unwrap_peft(self.model)

    def check_head(self, wrapped: Any) -> None:
        """Score the model's own logits where TRL's fused LM head computes something else."""
        announce_head(self.base_model)
        if self._head_is_checked:
            return
        # All ranks or none: the two heads do not gather the same parameters in the same order.
        misses = int(not check_fused_head(wrapped))
        if all_reduce_max(misses, next(self.model.parameters()).device):
            logger.warning(
                f"TRL's fused LM head computes another loss than {type(self.base_model).__name__},"
                " whose head is more than a matrix: training on the model's own logits"
            )
            use_native_head(self.base_model)
        self._head_is_checked = True

    def ensure(
        self,
        wrapped: Any,
        dataset: Any,
        collator: PackedCollator,
        *,
        training: bool,
        max_length: int | None,
    ) -> None:
        """Check `wrapped` once per mode, on the longest documents; take a slower way if it fails.

        A check that raises is not remembered: the next call checks again.

        Raises RuntimeError, under ``isolation_check="error"``, if `attention` was named and leaks,
        or if no way is exact.
        """
        if self.options.isolation_check == "off":
            return
        if collator != self._checked_rows_of:
            # Another collator's rows were checked, if any: the user may have set one since.
            self._checked, self._checked_rows_of = {True: [], False: []}, copy.copy(collator)
        documents = probe_documents(dataset, self.model, max_length, self.limits)
        lengths = min(map(len, documents)), max(map(len, documents))
        if _covered(lengths, self._checked[training]):
            return
        search = partial(
            install_first_exact,
            self.model,
            wrapped=wrapped,
            training=training,
            max_length=0,
            fused_head=True,
            collator=collator,
        )
        # What depends on length is known of the way in use; what depends on the mode is not.
        is_known = _covered(lengths, self._checked[not training])
        way, found = search(self._ways[:1]) if is_known else search(self._ways, documents)
        if is_known and not found:
            way, found = search(self._ways, documents)
        if found:
            logger.info(str(found))
        else:
            way = self._accept(way, found)
        if way.backend != self.attention.backend:
            logger.warning(f"{type(self.base_model).__name__} runs by {way}")
            # Earlier checks, of either mode, were made on the way that is gone.
            self._checked = {True: [], False: []}
        self._use(way)
        # After the verdict: what raised above is checked again by the next `train` or `evaluate`.
        self._checked[training].append(lengths)

    def _use(self, way: AttentionChoice) -> None:
        tried = [known.backend for known in self._ways]
        after = self._ways[tried.index(way.backend) + 1 :] if way.backend in tried else []
        self.attention, self._ways = way, [way, *after]

    def _accept(self, way: AttentionChoice, found: Found) -> AttentionChoice:
        """Return the way to go on by although none is exact. Raises RuntimeError if none may be."""
        named = self.options.attention != "auto"
        fails = found.verdict in ("leaks", "refused")
        if fails and not self.packing_requested and not named:
            logger.warning(f"{found}: rows are padded, as in TRL")
            padded = AttentionChoice("padded", None, "nothing is exact on this model", way.native)
            install_attention(self.model, padded)
            return padded
        message = why_not_exact(self.base_model, way, found, named=named)
        cannot_run = found.verdict == "refused"
        if cannot_run or (fails and self.options.isolation_check == "error"):
            raise RuntimeError(message)
        logger.warning(message)
        return way


def _covered(lengths: tuple[int, int], checked: list[tuple[int, int]]) -> bool:
    """Whether documents as short and as long were checked together."""
    return any(least <= lengths[0] and lengths[1] <= most for least, most in checked)


def probe_documents(
    dataset: Any, model: Any, max_length: int | None, limits: ModelLimits = NO_LIMITS
) -> list[np.ndarray]:
    """Return the documents that probe isolation: the shortest, a middling and the longest.

    Raises ValueError for a stream that has none, or has documents beyond the model's `limits`.
    """
    if isinstance(dataset, IterableDataset):
        first = list(islice(dataset, 16))
        if not first:
            raise ValueError(NOTHING_TO_TRAIN)
        for number, document in enumerate(first):
            check_lengths(document, number)
            limits.check_document(document, f"document {number} of the stream")
        found = [
            np.asarray(document["input_ids"])[start : start + length]
            for document in first
            for start, length in _documents_of(document)
        ]
        # What else the stream brings is unknown: it may cross what max_length lets through.
        beyond = [
            constant
            for constant in length_constants(model)
            if max(map(len, found)) <= constant < (max_length or 0)
        ]
        return [*found, np.resize(found[0], beyond[-1] + 1)] if beyond else found
    documents = ArrowDocuments(dataset, ["input_ids"])
    rows, starts, lengths = _places(dataset, documents.lengths())
    order = np.argsort(lengths, kind="stable")
    chosen = sorted({int(order[i]) for i in (0, len(order) // 2, -1)})
    return [
        documents[int(rows[i])]["input_ids"][starts[i] : starts[i] + lengths[i]] for i in chosen
    ]


def _documents_of(row: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield first token and length of each document; a packed row holds several."""
    lengths = row.get(SEQ_LENGTHS)
    lengths = [len(row["input_ids"])] if lengths is None else lengths
    yield from (
        (end - length, length) for length, end in zip(lengths, accumulate(lengths), strict=True)
    )


def _places(dataset: Dataset, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, first token and length of every document; packed rows hold several."""
    if not is_packed(dataset):
        return np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64), lengths
    packed = [row[SEQ_LENGTHS] for row in ArrowDocuments(dataset, [SEQ_LENGTHS])]
    rows = np.repeat(np.arange(len(packed)), [len(row) for row in packed])
    starts = np.concatenate([np.cumsum(row) - row for row in packed])
    return rows, starts, np.concatenate(packed)
