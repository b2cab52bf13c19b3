"""One optimizer step of a tiny model on documents with common prefixes, in rows that share them.

    P ─┬─ Q ─┬─ a a a         the reference: each document alone through the untouched model
       │     ├─ b b           shared: `PackedSFTTrainer` with prefix_sharing="bin"
       │     └─ c c c c
       └─ d d d d d

A model that cannot share trains the same documents apart, and says why. Both must be exact.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from architectures.tiny_step import Part, judge_one_row
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
    trainer, found = judge_one_row(model, shared_documents(), prefix_sharing="bin", **options)
    if trainer is None:
        return replace(found, reason=f"refused: {found.reason}")
    counted = trainer._meter.so_far()
    assert counted is not None, "the run was not counted"
    is_apart = found.outcome == "exact" and not counted["shared"]
    outcome = "apart" if is_apart else found.outcome
    return replace(found, outcome=outcome, reason=trainer._before_training.sharing.reason() or "")
