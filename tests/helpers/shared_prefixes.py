"""Documents with common prefixes, and one optimizer step on them, for comparison with `by_hand`.

    S ─┬─ Q ─┬─ answers of all lengths, one of them twice, one that begins another
       │     └─ the question alone
       ├─ R ─── answers, some trained with their question, some with weights of their own
       └─ other documents, which share S or nothing

Prompts are untrained in some documents and trained in others, so the weights of a position differ
from document to document.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from architectures.tiny_models import DOCUMENT_IDS
from harness import Run, run

from trl_packing.documents.host_row import host_row
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.packing import prefix_tree
from trl_packing.training.prefix_sharing import PrefixSharing


def forked_documents(seed: int = 0, *, weighted: bool = False) -> list[dict[str, list[Any]]]:
    """Return 19 documents of 2 to 90 tokens; their windows of 8 are shorter than the prefixes."""
    rng = np.random.default_rng(seed)

    def draw(length: int) -> list[int]:
        return rng.integers(DOCUMENT_IDS.start + 7, DOCUMENT_IDS.stop, length).tolist()

    system, first, second = draw(21), draw(18), draw(27)
    answers = [draw(n) for n in (1, 2, 9, 17, 30)]
    documents = [
        *(_document(system + first, answer) for answer in answers),
        _document(system + first, answers[3]),
        _document(system + first, answers[3] + draw(6)),
        _document(system, first),
        _document(system, first + draw(24)),
        *(_document(system + second, draw(n)) for n in (4, 11, 23)),
        *(_document([], system + second + draw(n)) for n in (5, 13)),
        _document(system, draw(14)),
        _document(system[:17], draw(19)),
        _document([], draw(33)),
        _document(draw(12), draw(8)),
        _document([], draw(2)),
    ]
    if not weighted:
        return documents
    numbers = iter(rng.integers(1, 9, 2000) / 4)
    return [
        document
        | {
            "loss_weights": [float(next(numbers)) for _ in document["input_ids"]],
            "loss_weight": float(next(numbers)),
        }
        for document in documents
    ]


def _document(prompt: list[int], completion: list[int]) -> dict[str, list[int]]:
    labels = [IGNORE_INDEX] * len(prompt) + completion
    return {"input_ids": prompt + completion, "labels": labels}


class Step:
    """The only optimizer step of a run: its loss, gradients, and tokens of all micro-batches."""

    def __init__(self, run: Run) -> None:
        rows = [row for rows in run.batches for row in rows]
        self.trainer = run.trainer
        self.rows = rows
        self.loss = run.losses[0]
        self.gradients = run.gradients
        self.logs = run.trainer.state.log_history[0]
        self.documents = sum(len(row.lengths) for row in rows)
        self.tokens = sum(int(row.lengths.sum()) for row in rows)
        self.computed = sum(row.num_tokens - row.padding for row in rows)

    def __getitem__(self, at: int) -> Any:
        return (self.loss, self.gradients)[at]


def one_shared_step(model: Any, documents: Any, folder: Any, **options: Any) -> Step:
    """Train `documents` in one step of rows that share prefixes; options as of `harness.run`."""
    defaults = {"max_length": 128, "router_aux_loss_coef": None, "prefix_sharing": "bin"}
    return Step(run(model, documents, folder, keep=host_row, **defaults | options))


# --- faults, for negative controls ----------------------------------------------------------------


def spoil_trees(monkeypatch: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Let `change` return fields of each prefix tree that are built otherwise."""
    make = prefix_tree.build_prefix_tree

    def spoiled(*args: Any, **options: Any) -> Any:
        tree = make(*args, **options)
        return replace(tree, **change(tree))

    monkeypatch.setattr(prefix_tree, "build_prefix_tree", spoiled)


def with_keys(keys: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the fields of a tree whose segments have these keys."""
    ends = np.cumsum([0, *map(len, keys)]).astype(np.int32)
    return {"cu_seqlens_k": ends, "key_index": np.concatenate(keys).astype(np.int64)}


def siblings_see_each_other(tree: Any) -> dict[str, np.ndarray]:
    """Return the keys of segments that see all tokens before them."""
    return with_keys([np.arange(end) for end in tree.cu_seqlens[1:]])


def spoil_rows(monkeypatch: Any, change: Callable[[Any], dict[str, Any]]) -> None:
    """Let `change` return values of each batch with shared prefixes that are others."""
    share = prefix_tree.share_prefixes

    def spoiled(*args: Any) -> Any:
        batch, host = share(*args)
        return batch | change(batch), host

    monkeypatch.setattr("trl_packing.packing.collator.share_prefixes", spoiled)


def share_unchecked(monkeypatch: Any) -> None:
    """Let runs share prefixes without a check."""
    monkeypatch.setattr(PrefixSharing, "_failure", lambda *args: None)
