"""Measures on a model whether a document A affects the document B behind it in a packed row.

    alone          [B]           without packing: the reference
    packed         [A, B]        as in training; also with other tokens and another length of A
    contaminated   [A · B]       the same row as one document: the effect of a full leak

    difference  = max |packed − alone|          over the outputs for B
    noise       = the largest difference of B alone between layouts that must not make a difference,
                  and a run in which the output of every module is rounded differently: the effect
                  of another kernel, or another order of a sum, at this depth and precision
    leak        = max |contaminated − alone|
    share       = <packed − alone, contaminated − alone> / |contaminated − alone|²: the part of the
                  leak in the difference. Rounding errors point in all directions, a leak points
                  towards contamination. In bf16, the share shows a leak that the largest difference
                  hides in noise.

B leaks if the difference is above 4 × noise. Below, B is isolated if the difference is at most 1 %
of the leak, or if the share is at most 1 % (or the share that rounding has by chance), or if B
stays identical to the last bit when A's tokens change. Otherwise the check is inconclusive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.model_facts import unwrap_model
from trl_packing.attention.sharding import all_reduce_max_if_sharded
from trl_packing.attention.state import preserve_state
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.locate import first_leaking_layer, gradient_difference
from trl_packing.isolation.measure import (
    NOISE_FACTOR,
    Measurement,
    Stage,
    largest_difference,
    logits_at,
    measure,
    ordinary_batch,
    score_logits,
    two_roundings,
)
from trl_packing.isolation.probes import MIN_TOKENS, Probe, prefix_probes, probes, random_tokens
from trl_packing.packing.collator import PackedCollator

LEAK_SHARE = 0.01


def stage_from_error(error: Exception) -> Stage:
    """Return the stage of a check in which `error` was raised."""
    notes = getattr(error, "__notes__", [])
    return next(
        (s for s in Stage if s.value and f"isolation check: {s.value}" in notes), Stage.PACKED
    )


@dataclass(frozen=True)
class IsolationReport:
    """The verdict on a model: ``"isolated"``, ``"leaks"`` or ``"inconclusive"``, and its evidence.

    Attributes:
        verdict: one of these three. The report is true if it is "isolated".
        difference: the largest difference between packed and alone, of logits (with `fused_head`,
            of log-probabilities and entropies), in the probe that decided.
        noise: the largest difference that rounding makes.
        leak: the largest difference that contamination makes.
        probe: the documents that decided.
        model: the class of the model.
        attention: its attention.
        mode: "training" or "evaluation".
        first_layer: the first layer that shows the leak, if there is one.
        gradient_difference: the largest difference of the loss's gradients, relative to the largest
            gradient, if requested.
    """

    verdict: str
    difference: float
    noise: float
    leak: float
    probe: str
    model: str
    attention: str
    mode: str
    first_layer: str = ""
    gradient_difference: float | None = None

    def __bool__(self) -> bool:
        return self.verdict == "isolated"

    @property
    def allowed(self) -> float:
        """The largest difference that is put down to rounding; a larger one is a leak."""
        return NOISE_FACTOR * self.noise

    def __str__(self) -> str:
        words = {
            "isolated": "documents are isolated",
            "leaks": "documents LEAK into each other",
            "inconclusive": "isolation could not be shown",
        }
        where = f", first in {self.first_layer}" if self.first_layer else ""
        return (
            f"{words[self.verdict]}: {self.model}, {self.attention}, {self.mode} mode, "
            f"{self.probe}: differs by {self.difference:.2g}{where} (rounding allows "
            f"{self.allowed:.2g}, a leak would be {self.leak:.2g})"
        )


@torch.no_grad()
def check_isolation(
    model: nn.Module,
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    training: bool | None = None,
    max_length: int = 1024,
    attention: str | None = None,
    fused_head: bool = False,
    collator: PackedCollator | None = None,
    gradients: bool = False,
    thorough: bool = False,
) -> IsolationReport:
    """Return whether packed documents affect each other on `model`, and by how much.

    The model, its buffers, its mode and all random number generators are left as they were. A leak
    is a verdict and raises nothing.

    Args:
        model: called as a training step calls it. It may be wrapped (DDP, PEFT), and need not come
            from transformers.
        documents: token ids ``(T,)`` of documents that the run will train on. Probes are then as
            long as the longest and as short as the shortest of them.
        training: the mode to check, by default the model's.
        max_length: in tokens. Without documents, probes cross every length constant of the config
            below it.
        attention: the name of the attention in the report.
        fused_head: run packed rows through TRL's fused LM head, as `SFTTrainer` trains, and compare
            log-probabilities and entropies with those of the model's logits.
        collator: makes the packed rows; give the one that the run uses.
        gradients: also compare the gradients of B's loss, packed and alone, which takes one more
            forward and backward of each.
        thorough: add probes for backends that pad rows.

    Raises:
        Exception: any error that the model raises against a packed batch.
    """
    inner = unwrap_model(model)
    return check_probes(
        model,
        probes(inner, documents, max_length, thorough),
        training=training,
        attention=attention,
        fused_head=fused_head,
        collator=collator or PackedCollator(),
        gradients=gradients,
    )


def check_prefixes(
    model: nn.Module,
    documents: Sequence[np.ndarray] = (),
    *,
    collator: PackedCollator,
    **options: Any,
) -> IsolationReport:
    """Return whether documents with a shared prefix affect each other on `model`.

    It finds a kernel that reads the keys of a sibling, and a state that runs along the row (Mamba),
    because siblings cannot go on from the same state. Arguments and errors are those of
    `check_isolation`; `collator` shares prefixes whatever it says.
    """
    made = prefix_probes(unwrap_model(model), documents)
    return check_probes(model, made, collator=collator.replaced(shares_prefixes=True), **options)


@torch.no_grad()
def check_probes(
    model: nn.Module,
    made: Sequence[Probe],
    *,
    collator: PackedCollator,
    training: bool | None = None,
    attention: str | None = None,
    fused_head: bool = False,
    gradients: bool = False,
    apart: Sequence[nn.Parameter] | None = None,
) -> IsolationReport:
    """Return the worst report on some probes. The arguments are those of `check_isolation`.

    Args:
        apart: parameters whose gradients are compared apart, of all probes; None compares those of
            the worst probe.
    """
    inner = unwrap_model(model)
    with preserve_state(model, training):
        reports = []
        for probe in made:
            measured = measure(model, inner, probe, fused_head, collator)
            report = verdict_of(measured, probe.name, inner, attention, model.training)
            reports.append((report, probe))
        report, probe = min(reports, key=lambda pair: severity(pair[0]))
        leaks = report.verdict == "leaks"
        # Ranks of a sharded model wait for each other in every forward: all search, or none.
        if all_reduce_max_if_sharded(int(leaks), model):
            layer = first_leaking_layer(model, inner, probe, collator)
            report = replace(report, first_layer=layer if leaks else "")
        if gradients:
            compared, others = ([probe], ()) if apart is None else (made, apart)
            errors = [gradient_difference(model, inner, p, collator, others) for p in compared]
            report = replace(report, gradient_difference=max(errors))
    return report


@torch.no_grad()
def check_fused_head(model: nn.Module) -> bool:
    """Return whether TRL's fused LM head gives the log-probabilities of the model's logits.

    It multiplies hidden states by the output embeddings. A model whose head does more than that
    (BERT's transform, RecurrentGemma's soft-cap) would train on another loss, unpacked too.
    """
    inner = unwrap_model(model)
    document = random_tokens(inner, np.random.default_rng(0))(MIN_TOKENS)
    with preserve_state(model, training=True):
        batch = ordinary_batch(inner, torch.from_numpy(document)[None])

        def native(rounded: bool) -> Tensor:
            logits = logits_at(model, inner, batch, np.arange(-len(document), -1))
            return score_logits(logits, document[1:], rounded)

        expected, moved = two_roundings(inner, native)
        if not bool(expected.isfinite().all()):
            return True  # nothing to compare: the check says so
        noise = largest_difference(moved, expected)
        labels = batch["input_ids"].clone()
        labels[:, 0] = IGNORE_INDEX  # prompt tuning would predict it from a virtual token
        try:
            output = model(**batch, labels=labels, fused_lm_head=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # no backbone (llama4), no number of experts (dbrx), ...
            return False
        fused = torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()
    resolution = torch.finfo(next(inner.parameters()).dtype).eps * float(expected.abs().max())
    return largest_difference(fused, expected) <= NOISE_FACTOR * max(noise, resolution)


def severity(report: IsolationReport) -> tuple[int, float]:
    """Return a key by which the worst of several reports sorts first."""
    return ("leaks", "inconclusive", "isolated").index(report.verdict), -report.difference


def verdict_of(
    measured: Measurement,
    name: str,
    model: nn.Module,
    attention: str | None,
    training: bool,
) -> IsolationReport:
    """Return the verdict on a probe, from the numbers of this module's docstring."""
    alone = measured.alone[0]
    resolution = torch.finfo(next(model.parameters()).dtype).eps * float(alone.abs().max())
    leak = max(largest_difference(x, alone) for x in measured.contaminated)
    noise = max(resolution, *(largest_difference(x, alone) for x in measured.alone))
    difference = max(largest_difference(x, alone) for x in measured.packed)
    same_bits = (
        len(measured.contaminated) > 1
        and torch.equal(measured.packed[0], measured.packed[1])
        and not torch.equal(measured.contaminated[0], measured.contaminated[1])
    )
    rounding = max((x - alone for x in measured.alone), key=lambda d: float(d.norm()))
    shares_are_small = all(
        _share(x - alone, c - alone) <= max(LEAK_SHARE, 2 * _chance_share(rounding, c - alone))
        for x, c in zip(measured.packed, measured.contaminated, strict=False)
    )
    if not difference <= NOISE_FACTOR * noise:  # true for NaN as well
        verdict = "leaks"
    elif difference <= LEAK_SHARE * leak or shares_are_small or same_bits:
        verdict = "isolated"
    else:
        verdict = "inconclusive"
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    return IsolationReport(
        verdict=verdict,
        difference=difference,
        noise=noise,
        leak=leak,
        probe=name,
        model=type(model).__name__,
        attention=attention or implementation or "its native attention",
        mode="training" if training else "evaluation",
    )


def _share(difference: Tensor, leak: Tensor) -> float:
    """Return the part of `leak` in `difference`, by projection; 1 for the whole leak."""
    length = float((leak * leak).sum())
    return abs(float((difference * leak).sum())) / length if length else 1.0


def _chance_share(rounding: Tensor, leak: Tensor) -> float:
    """Return the share that a rounding error of random direction has by chance."""
    length = float(leak.norm()) * len(leak) ** 0.5
    return float(rounding.norm()) / length if length else 0.0
