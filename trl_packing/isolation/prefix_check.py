"""Measures on a model whether documents that share a prefix in a row stay apart.

    alone          [P B]                    without packing: the reference
    shared         [P A · B · C]            a row in which A, B and C follow the same prefix P; also
                                            with other tokens in A and C
    contaminated   [P A B]                  one document: the effect of siblings that see each other

The verdict follows from the outputs for B as in `check.py`. A branch that does not see its prefix
differs from the document alone, and so does a state that runs along the row (Mamba), because
siblings cannot go on from the same state.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.isolation.check import IsolationReport, severity, verdict_of
from trl_packing.isolation.locate import probe_gradient_difference
from trl_packing.isolation.measure import (
    Measurement,
    ordinary_batch,
    outputs_alone,
    outputs_in_row,
    two_roundings,
)
from trl_packing.isolation.probes import Probe, longest_alone, random_tokens
from trl_packing.models.introspection import unwrap_model
from trl_packing.models.state import preserve_state
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_tree import build_prefix_tree

# The check compares so many of the first positions of a branch, and of the last ones.
_POSITIONS = 32


class Family(NamedTuple):
    """A document B, and siblings that share its prefix.

    Attributes:
        name: as the report calls it.
        prefix: token ids ``(P,)`` of all of them.
        branch: token ids of B behind the prefix.
        siblings: branches of the other documents, for each row of the check.
    """

    name: str
    prefix: np.ndarray
    branch: np.ndarray
    siblings: list[list[np.ndarray]]

    @property
    def document(self) -> np.ndarray:
        """Token ids of B."""
        return np.concatenate([self.prefix, self.branch])

    def with_prefix(self, siblings: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return token ids of other documents, by their branches."""
        return [np.concatenate([self.prefix, branch]) for branch in siblings]

    def as_probe(self) -> Probe:
        """Return B, and the documents that share its prefix in the first row."""
        return Probe(self.name, [self.with_prefix(self.siblings[0])], self.document, 0)


@torch.no_grad()
def check_prefixes(
    model: nn.Module,
    documents: Sequence[np.ndarray] = (),
    *,
    collator: PackedCollator,
    training: bool | None = None,
    attention: str | None = None,
    fused_head: bool = False,
    gradients: bool = False,
) -> IsolationReport:
    """Return whether documents with a shared prefix affect each other on `model`.

    Args:
        model: called as a training step calls it; packed calls run by the installed backend.
        documents: token ids ``(T,)`` of documents of the run; the longest is cut into a prefix and
            a branch.
        collator: makes the rows; prefixes are shared whatever it says.
        training: the mode to check, by default the model's.
        attention: the name of the attention in the report.
        fused_head: score rows through TRL's fused LM head.
        gradients: also compare the gradients of B's loss, shared and alone.

    Raises:
        Exception: any error that the model raises against a row with shared prefixes.
    """
    inner, collate = unwrap_model(model), collator.replaced(shares_prefixes=True)
    with preserve_state(model, training):
        families = _families(inner, documents)
        reports = [
            verdict_of(
                _measure(model, inner, family, fused_head, collate),
                family.name,
                inner,
                attention,
                model.training,
            )
            for family in families
        ]
        report = min(reports, key=severity)
        if gradients:
            probe = families[reports.index(report)].as_probe()
            error = probe_gradient_difference(model, inner, probe, collate)
            report = replace(report, gradient_difference=error)
    return report


def _families(model: nn.Module, documents: Sequence[np.ndarray]) -> list[Family]:
    draw = random_tokens(model, np.random.default_rng(0))
    families = [
        Family(
            "short documents that share a prefix",
            draw(29),
            draw(17),
            [[draw(11), draw(5)], [draw(11), draw(5)], [draw(23)]],
        )
    ]
    longest = max((np.asarray(d, np.int64) for d in documents), key=len, default=np.zeros(0))
    longest = longest[: longest_alone(model)]
    half = len(longest) // 2
    if half > 40:
        siblings = [[draw(half // 2)], [draw(half // 2)]]
        name = f"documents that share {half:,} tokens"
        families.append(Family(name, longest[:half], longest[half:], siblings))
    return families


def _measure(
    model: nn.Module, inner: Any, family: Family, fused_head: bool, collate: PackedCollator
) -> Measurement:
    document = family.document
    # Positions that predict the tokens of the branch behind its first. Windows that reach across
    # the fork end soon behind it.
    at = np.arange(len(family.prefix), len(document) - 1)
    at = np.unique(np.concatenate([at[:_POSITIONS], at[-_POSITIONS:]]))

    def alone(rounded: bool) -> Tensor:
        batch = ordinary_batch(inner, torch.from_numpy(document)[None])
        targets = document[at + 1] if fused_head else None
        return outputs_alone(model, inner, batch, at - len(document), targets, rounded)

    def shared(siblings: Sequence[np.ndarray]) -> Tensor:
        whole = [document, *family.with_prefix(siblings)]
        rows = build_prefix_tree(whole).targets[at + 1] - 1
        row = [{"input_ids": ids} for ids in whole]
        return outputs_in_row(model, inner, row, rows, fused_head, collate)

    def contaminated(siblings: Sequence[np.ndarray]) -> Tensor:
        ids = np.concatenate([family.prefix, *siblings, family.branch])
        rows = at + len(ids) - len(document)
        apart = collate.replaced(shares_prefixes=False)
        return outputs_in_row(model, inner, [{"input_ids": ids}], rows, fused_head, apart)

    return Measurement(
        alone=two_roundings(inner, alone),
        packed=[shared(siblings) for siblings in family.siblings],
        contaminated=[contaminated(siblings) for siblings in family.siblings[:2]],
    )
