"""One optimizer step of a tiny model on documents with common prefixes, in rows that share them.

    P ─┬─ Q ─┬─ a a a         the reference: each document alone through the untouched model
       │     ├─ b b           shared: `PackedSFTTrainer` with prefix_sharing="bin"
       │     └─ c c c c
       └─ d d d d d

A model that cannot share trains the same documents apart, and says why. Both must be exact.
"""

import copy
import tempfile
from typing import Any

import numpy as np
import torch

from architectures.tiny_step import (
    Documents,
    Part,
    StepResult,
    one_at_a_time,
    rounding_tolerance,
    train_step,
)
from trl_packing.documents.labels import IGNORE_INDEX

# Tokens of P and Q: windows, chunks and blocks of tiny models (8 to 32) are shorter than both
# together. Two documents fit into the fewest positions that one of these models has learned (128).
_PREFIXES = (29, 13)
_ANSWERS = (3, 8, 17)
_OTHERS = (4, 27)


def shared_documents() -> list[dict[str, list[int]]]:
    """Return documents of random tokens that fork at two depths; their prompts are not trained."""
    rng = np.random.default_rng(0)

    def draw(length: int) -> list[int]:
        return list(map(int, rng.integers(10, 110, length)))

    first, second = map(draw, _PREFIXES)
    prompts = [first + second] * len(_ANSWERS) + [first] * len(_OTHERS)
    answers = [draw(length) for length in (*_ANSWERS, *_OTHERS)]
    return [
        {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + answer}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def judge_sharing(model: Any, **options: Any) -> Part:
    """Train one step of documents that share prefixes, and compare it with each of them alone.

    Args:
        model: is not changed.
        options: options of `PackedSFTConfig`.
    """
    documents = shared_documents()
    reference = one_at_a_time(model, documents)
    tolerance = rounding_tolerance(model, documents, reference)
    try:
        step, shares, reason = _step(model, documents, options)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as refusal:
        first_line, *_ = str(refusal).splitlines()
        return Part("refused", tolerance=tolerance, reason=f"refused: {first_line}")
    error = max(step.distance_of_step(reference))
    if not error <= tolerance:
        return Part("differs", error, tolerance, reason)
    return Part("exact" if shares else "apart", error, tolerance, reason)


def _step(
    model: Any, documents: Documents, options: dict[str, Any]
) -> tuple[StepResult, bool, str]:
    """Return the step, whether it computed fewer tokens than the documents have, and why not."""
    one_micro_batch = {
        "per_device_train_batch_size": len(documents),
        "gradient_accumulation_steps": 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer, loss, gradients = train_step(
            copy.deepcopy(model),
            documents,
            folder,
            **{"prefix_sharing": "bin", **one_micro_batch, **options},
        )
    counted = trainer._meter.so_far()
    assert counted is not None, "the run was not counted"
    step = StepResult(torch.empty(0), loss, gradients)
    return step, counted["shared"] > 0, trainer._isolation.sharing.reason or ""
