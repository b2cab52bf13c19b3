"""Compatibility: every architecture that transformers knows, trained packed by the real trainer.

`tiny_step.py` computes one optimizer step of each: the reference, packed by `PackedSFTTrainer`, and
packed by TRL. `shared_step.py` adds a step with shared prefixes, `image_step.py` one with images. A
difference without an error or a warning is *silent*; this module exists to find those. Differences
that rounding explains are allowed (`rounding_tolerance`). `page.py` writes the verdicts as a page.
"""

import contextlib
import io
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from architectures.image_step import judge_images
from architectures.shared_step import judge_sharing
from architectures.tiny_models import NotBuilt, tiny_model
from architectures.tiny_step import (
    NOT_MEASURED,
    REFUSALS,
    Part,
    one_at_a_time,
    packed_by_trl,
    packed_step,
    rounding_tolerance,
    tiny_documents,
)

#: Backends that keep documents in one row. The others run padded rows of the same documents.
ONE_ROW_BACKENDS = ("documents", "varlen", "model", "mask", "by_document")


@dataclass(frozen=True)
class Verdict:
    """The result for one architecture.

    Attributes:
        name: the architecture's model type, or one of `tiny_tables.VARIANTS`.
        outcome: ``"exact"``, ``"differs"`` (silently, which must not happen), ``"refused"`` (with a
            message), ``"not built"`` or ``"error"``.
        backend: the attention backend that was used.
        logits_error: relative to the largest logit; the other errors likewise.
        loss_error: relative to the loss.
        gradient_error: relative to the largest gradient.
        tolerance: the largest error that rounding explains.
        by_trl: the result of TRL's padding-free batch, as `packed_by_trl` returns it.
        seconds: wall time of all of it.
        reason: why it was refused or not built, or why a backend that comes first was not used.
        sharing: the result with shared prefixes.
        images: the result for documents with images.
    """

    name: str
    outcome: str
    backend: str = ""
    logits_error: float = float("nan")
    loss_error: float = float("nan")
    gradient_error: float = float("nan")
    tolerance: float = float("nan")
    by_trl: str = ""
    seconds: float = 0.0
    reason: str = ""
    sharing: Part = NOT_MEASURED
    images: Part = NOT_MEASURED

    @property
    def is_silent_difference(self) -> bool:
        others = (self.sharing.outcome, self.images.outcome)
        return self.outcome in ("differs", "error") or "differs" in others


def judge_architecture(name: str, *, shares: bool = True, **options: Any) -> Verdict:
    """Train one packed step of a tiny model of architecture `name`; compare it with the reference.

    Args:
        name: one of `names()` or `vision_names()` of `tiny_models.py`.
        shares: train a step on documents with common prefixes too.
        options: options of `PackedSFTConfig`. ``isolation_check="off"`` shows what would go wrong
            without the check.
    """
    began = time.perf_counter()
    verdict = _judge_text(name, shares, options)
    images = judge_images(name, **options)
    return replace(verdict, images=images, seconds=time.perf_counter() - began)


def _judge_text(name: str, shares: bool, options: dict[str, Any]) -> Verdict:
    """Return the verdict on text alone; arguments as for `judge_architecture`."""
    try:
        model = tiny_model(name)
        documents = tiny_documents()
        reference = one_at_a_time(model, documents)
    except NotBuilt as problem:
        return Verdict(name, "not built", reason=str(problem))
    except Exception as problem:
        return Verdict(name, "not built", reason=f"runs no document: {problem}".splitlines()[0])
    by_trl = packed_by_trl(model, documents, reference)
    with tempfile.TemporaryDirectory() as folder:
        try:
            choice, packed = packed_step(model, documents, folder, **options)
        except REFUSALS as refusal:
            reason = str(refusal).splitlines()[0]
            return Verdict(name, "refused", reason=reason, by_trl=by_trl)
    errors = packed.distance(reference)
    tolerance = rounding_tolerance(model, reference, lambda m: one_at_a_time(m, documents))
    exact = all(error <= tolerance for error in errors)
    sharing = judge_sharing(model, **options) if shares else NOT_MEASURED
    return Verdict(
        name,
        "exact" if exact else "differs",
        choice.backend,
        *errors,
        tolerance,
        by_trl,
        reason=choice.reason,
        sharing=sharing,
    )


def judge_all(names: Sequence[str], *, processes: int = 2) -> Iterator[Verdict]:
    """Yield the verdict on each architecture, in order, from `processes` worker processes."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_quiet_worker) as pool:
        yield from pool.map(_judge, names)


def _judge(name: str) -> Verdict:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return judge_architecture(name)
    except Exception as error:
        return Verdict(name, "error", reason=f"{type(error).__name__}: {error}"[:300])


def _quiet_worker() -> None:
    from datasets import disable_progress_bars
    from transformers.utils import logging

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity(logging.CRITICAL)
    disable_progress_bars()
