"""One optimizer step of a tiny model, computed in three ways.

reference   each document alone through the untouched model; the losses are summed and divided
            by the number of trained tokens in the step
packed      the same documents in one optimizer step of `PackedSFTTrainer`
by TRL      the same row as TRL's collator packs it, through the untouched model. TRL trusts
            every model to keep documents apart, so this is the negative control: the check
            must report a difference where a model leaks.
"""

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from harness import Run, as_batch, run
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from trl_packing.attention.model_facts import requires
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.check import NOISE_FACTOR, round_differently
from trl_packing.loss.next_token import score_targets
from trl_packing.packing.collator import PackedCollator

# Tokens of each document: on both sides of every length constant of the tiny models (8 to 32).
LENGTHS = (47, 5, 23, 38, 12, 60, 3, 29)
MAX_LENGTH = 80

LEAST_TOLERANCE = 1e-5
MOST_TOLERANCE = 1e-3
_TRL_TOLERANCE = 1e-3  # of log-probabilities

#: What a trainer raises where it refuses a model or its documents.
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)

Documents = Sequence[dict[str, Any]]


class StepResult(NamedTuple):
    """The results of one optimizer step."""

    logits: Tensor  # all tokens of all documents, in data-set order, ``(T, vocabulary)`` float32
    loss: float
    gradients: dict[str, Tensor]  # by the name of the parameter

    def distance(self, other: "StepResult") -> tuple[float, float, float]:
        """Return the largest relative differences of logits, loss and gradients."""
        logits = float((self.logits - other.logits).abs().max() / other.logits.abs().max())
        return logits, *self.distance_of_step(other)

    def distance_of_step(
        self, other: "StepResult", parts: Iterable[Iterable[str]] = ()
    ) -> tuple[float, float]:
        """Return the relative differences of the loss and of gradients, within each of `parts`."""
        if missing := self.gradients.keys() ^ other.gradients.keys():
            raise RuntimeError(f"only one of two runs has gradients of {sorted(missing)[:3]}")
        errors = []
        for names in parts or [other.gradients]:
            pairs = [(self.gradients[n], other.gradients[n]) for n in names if n in other.gradients]
            size = max((float(right.abs().max()) for _, right in pairs), default=0.0)
            if not size:
                raise RuntimeError("no gradient reaches a part of the model")
            errors += [float((left - right).abs().max()) / size for left, right in pairs]
        return abs(self.loss - other.loss) / abs(other.loss), max(errors)


@dataclass(frozen=True)
class Part:
    """The result of one more step: with shared prefixes, or with images.

    Attributes:
        outcome: ``"exact"``, ``"differs"`` (silently, which must not happen), ``"apart"`` (the run
            does not share, and is exact), ``"trl"`` (the run takes TRL's path), ``"refused"``
            (nothing is trained), ``"not built"``, or ``""`` (not measured).
        error: the largest relative error of loss and gradients.
        tolerance: the largest error that rounding explains.
        reason: why the run does not share, is not packed, is refused, or is not built.
        backend: the attention backend that was used.
    """

    outcome: str = ""
    error: float = math.nan
    tolerance: float = math.nan
    reason: str = ""
    backend: str = ""


NOT_MEASURED = Part()


def tiny_documents(lengths: Sequence[int] = LENGTHS) -> list[dict[str, list[int]]]:
    """Return documents of random tokens; the first third of each is an untrained prompt."""
    rng = np.random.default_rng(0)
    made = []
    for length in lengths:
        ids = rng.integers(10, 110, length).tolist()
        prompt = length // 3
        made.append({"input_ids": ids, "labels": [IGNORE_INDEX] * prompt + ids[prompt:]})
    return made


# --- the reference --------------------------------------------------------------------------------


def one_at_a_time(
    model: Any, documents: Documents, collate: Callable[[Any], dict[str, Tensor]] = as_batch
) -> StepResult:
    """Return the step of the untouched model, each document alone in a fresh copy.

    `collate` makes a batch with labels of a document.
    """
    batches = [dict(collate(document)) for document in documents]
    num_trained = sum(int((batch["labels"][:, 1:] != IGNORE_INDEX).sum()) for batch in batches)
    logits = []
    loss = 0.0
    gradients: dict[str, Any] = {}
    for batch in batches:
        # One copy for each document: some ropes remember the longest document they have seen.
        alone = copy.deepcopy(model).train()
        labels = batch.pop("labels")[0, 1:]
        if not requires(alone, "position_ids"):
            batch.pop("position_ids", None)
        output = alone(**batch, use_cache=False).logits[0]
        nll = F.cross_entropy(output[:-1].float(), labels, reduction="sum") / num_trained
        nll.backward()
        logits.append(output.detach().float())
        loss += nll.item()
        for name, parameter in alone.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad.float()
    return StepResult(torch.cat(logits), loss, gradients)


def rounding_tolerance(
    model: Any,
    reference: StepResult,
    again: Callable[[Any], StepResult],
    distance: Callable[[StepResult, StepResult], Sequence[float]] = StepResult.distance,
) -> float:
    """Return the largest relative difference from `reference` that rounding explains.

    It follows from the reference of a model whose modules round differently, by `again`.
    """
    rounded = copy.deepcopy(model)
    with round_differently(rounded):
        noise = NOISE_FACTOR * max(distance(again(rounded), reference))
    return min(max(LEAST_TOLERANCE, noise), MOST_TOLERANCE)


def judge_one_row(
    model: Any,
    documents: Documents | Dataset,
    collate: Callable[[Any], dict[str, Tensor]] = as_batch,
    parts: Iterable[Iterable[str]] = (),
    **options: Any,
) -> tuple[Any, Part]:
    """Compare a step of all documents in one micro-batch with each of them alone.

    Args:
        model: is not changed.
        documents: in one micro-batch.
        collate: of a document alone.
        parts: names of parameters whose gradients are compared apart.
        options: of `harness.run`.

    Returns:
        The trainer (None where the run is refused) and the result.
    """
    reference = one_at_a_time(model, documents, collate)

    def again(rounded: Any) -> StepResult:
        return one_at_a_time(rounded, documents, collate)

    def distance(found: StepResult, expected: StepResult) -> tuple[float, float]:
        return found.distance_of_step(expected, parts)

    tolerance = rounding_tolerance(model, reference, again, distance)
    one_row = {"per_device_train_batch_size": len(documents), "gradient_accumulation_steps": 1}
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = train_step(model, documents, folder, **one_row | options)
        except REFUSALS as refusal:
            first_line, *_ = str(refusal).splitlines() or [type(refusal).__name__]
            return None, Part("refused", tolerance=tolerance, reason=first_line)
    if reason := found.trainer._trl_path:
        return found.trainer, Part("trl", reason=reason)
    error = max(distance(StepResult(torch.empty(0), *found), reference))
    outcome = "exact" if error <= tolerance else "differs"
    choice = found.trainer.attention
    return found.trainer, Part(outcome, error, tolerance, choice.reason, choice.backend)


# --- packed ---------------------------------------------------------------------------------------


def packed_step(
    model: Any, documents: Documents, folder: str, **options: Any
) -> tuple[Any, StepResult]:
    """Return the attention backend and the step of `documents` on a copy of `model`."""
    found = train_step(model, documents, folder, **options)
    batch = PackedCollator()(documents)
    batch.pop("labels")
    with torch.no_grad():
        logits = found.trainer.model.train()(**batch).logits[0].float()
    return found.trainer.attention, StepResult(logits, *found)


def train_step(model: Any, documents: Documents | Dataset, folder: str, **options: Any) -> Run:
    """Return a step of packed micro-batches on a copy of `model`."""
    settings = {"max_length": MAX_LENGTH, "router_aux_loss_coef": None}
    settings |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **options}
    rows = documents if isinstance(documents, Dataset) else list(documents)
    return run(model, rows, folder, **settings)


def packed_by_trl(model: Any, documents: Documents, reference: StepResult) -> str:
    """Compare TRL's padding-free batch and fused head on the untouched model with `reference`.

    Returns:
        ``"exact"``, ``"differs (0.3)"`` with the largest difference of log-probabilities, or
        ``"refuses (ValueError)"``.
    """
    packed = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(list(documents))
    labels = packed["labels"][0, 1:]
    trained = (labels != IGNORE_INDEX).nonzero()[:, 0]
    expected, *_ = score_targets(reference.logits[trained], labels[trained])
    untouched = copy.deepcopy(model).train()
    add_fused_lm_head(untouched)
    try:
        with torch.no_grad():
            output = untouched(**packed, use_cache=False, fused_lm_head=True)
    except Exception as refusal:
        return f"refuses ({type(refusal).__name__})"
    found = output.log_probs[output.label_mask].float()
    difference = float((found - expected).abs().max())
    return "exact" if difference <= _TRL_TOLERANCE else f"differs ({difference:.1g})"
