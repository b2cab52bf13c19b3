"""Is document B untouched by document A on this very model? Measured, never assumed.

    alone          [B]           as the model runs it without any packing: the reference
    packed         [A, B]        as it will be trained; also with A of other tokens, other length
    contaminated   [A · B]       the same row as one document: what a leak looks like

    difference  = max |packed − alone|          over what the model says of B
    noise       = spread of B alone over layouts that cannot matter, and over a run in which the
                  output of every module is rounded otherwise: what another kernel, or the order of
                  a sum, may do at this depth and precision
    leak        = max |contaminated − alone|
    share       = <packed − alone, contaminated − alone> / |contaminated − alone|²: how much of the
                  leak is in the difference. Rounding points anywhere, a leak towards contamination,
                  so this sees in bf16 what the largest difference hides in noise

B leaks if the difference is above 4 × noise. Below, it is isolated if the difference is at most 1 %
of the leak, or the share is (or what rounding has by chance), or if changing A's tokens leaves B
identical to the last bit. Otherwise nothing is shown, and the check is inconclusive.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.measure import (
    NOISE_FACTOR,
    Stage,
    _distance,
    _first_leaking_layer,
    _gradient_difference,
    _log_probs_and_entropy,
    _logits_at,
    _Measured,
    _ordinary_batch,
    _run,
    rounded_otherwise,
)
from trl_packing.isolation.probes import MIN_TOKENS, probes, random_tokens
from trl_packing.models.introspection import unwrap_model
from trl_packing.models.sharding import all_reduce_max_if_sharded
from trl_packing.models.state import preserve_state
from trl_packing.packing.collator import PackedCollator

LEAK_SHARE = 0.01


def stage_from_error(error: Exception) -> Stage:
    """Return at which stage of a check `error` was raised."""
    notes = getattr(error, "__notes__", [])
    return next(
        (s for s in Stage if s.value and f"isolation check: {s.value}" in notes), Stage.PACKED
    )


@dataclass(frozen=True)
class IsolationReport:
    """The verdict on a model: ``"isolated"``, ``"leaks"`` or ``"inconclusive"``, and its evidence.

    verdict: one of these three; the report is True if it is "isolated".
    difference, noise, leak: largest differences of logits (with `fused_head`: of log-probabilities
        and entropies), in the probe that decided: packed, by rounding, by contamination.
    probe: which documents decided.
    model, attention, mode: what was asked, and whether in training or evaluation mode.
    first_layer: where a leak first shows, if there is one.
    gradient_difference: of the loss, relative to the largest gradient, if asked for.
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

    def __str__(self) -> str:
        words = {
            "isolated": "documents are isolated",
            "leaks": "documents LEAK into each other",
            "inconclusive": "isolation could not be shown",
        }
        where = f", first in {self.first_layer}" if self.first_layer else ""
        return (
            f"{words[self.verdict]}: {self.model}, {self.attention}, {self.mode} mode, "
            f"{self.probe}: max |Δ| {self.difference:.2g}{where} (noise {self.noise:.2g}, a leak "
            f"would be {self.leak:.2g})"
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
    """Return whether packed documents see each other on `model`, and by how much.

    model: called as a training step calls it; may be wrapped (DDP, PEFT), and need not come from
        transformers.
    documents: token ids ``(T,)`` each, that the run will train on: probes are then as long as the
        longest and as short as the shortest of them.
    training: the mode to check; by default the model's.
    max_length: without documents, probes cross every length constant of the config below it, in
        tokens.
    attention: what the report calls it.
    fused_head: run packed rows through TRL's fused LM head, as `SFTTrainer` trains, and compare
        log-probabilities and entropies with those of the model's own logits.
    collator: makes the packed rows; give the one that the run uses.
    gradients: compare the gradients of B's loss too, packed against alone: one forward and backward
        more of each.
    thorough: ask with more documents, for ways that pad rows.

    The model, its buffers, its mode and all random number generators are left as they were. What
    the model raises against a packed batch is not caught; a leak is a verdict and raises nothing.
    """
    inner, collate = unwrap_model(model), collator or PackedCollator()
    order = ("leaks", "inconclusive", "isolated")
    with preserve_state(model, training):
        judged = []
        for probe in probes(inner, documents, max_length, thorough):
            measured = _run(model, inner, probe, fused_head, collate)
            judged.append((_judge(measured, probe.name, inner, attention, model.training), probe))
        report, probe = min(judged, key=lambda j: (order.index(j[0].verdict), -j[0].difference))
        leaks = report.verdict == "leaks"
        # Ranks of a sharded model wait for each other in every forward: all look, or none.
        if all_reduce_max_if_sharded(int(leaks), model):
            layer = _first_leaking_layer(model, inner, probe, collate)
            report = replace(report, first_layer=layer if leaks else "")
        if gradients:
            error = _gradient_difference(model, inner, probe, collate)
            report = replace(report, gradient_difference=error)
    return report


@torch.no_grad()
def check_fused_head(model: nn.Module) -> bool:
    """Return whether TRL's fused LM head says of an ordinary row what the model's logits say.

    It multiplies hidden states by the output embeddings. A model that does more than that in its
    head (BERT's transform, RecurrentGemma's soft-cap) would train on other numbers, unpacked too.
    """
    inner = unwrap_model(model)
    document = random_tokens(inner, np.random.default_rng(0))(MIN_TOKENS)
    with preserve_state(model, training=True):
        batch = _ordinary_batch(inner, torch.from_numpy(document)[None])

        def own() -> Tensor:
            logits = _logits_at(model, inner, batch, np.arange(-len(document), -1))
            return _log_probs_and_entropy(logits, document[1:])

        expected = own()
        with rounded_otherwise(inner):
            noise = _distance(own(), expected)
        labels = batch["input_ids"].clone()
        labels[:, 0] = IGNORE_INDEX  # the virtual tokens of prompt tuning would predict it
        try:
            output = model(**batch, labels=labels, fused_lm_head=True)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # no backbone (llama4), no number of experts (dbrx), ...
            return False
        fused = torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()
    resolution = torch.finfo(next(inner.parameters()).dtype).eps * float(expected.abs().max())
    return _distance(fused, expected) <= NOISE_FACTOR * max(noise, resolution)


def _judge(
    measured: _Measured,
    name: str,
    model: nn.Module,
    attention: str | None,
    training: bool,
) -> IsolationReport:
    alone = measured.alone[0]
    resolution = torch.finfo(next(model.parameters()).dtype).eps * float(alone.abs().max())
    leak = max(_distance(x, alone) for x in measured.contaminated)
    noise = max(resolution, *(_distance(x, alone) for x in measured.alone))
    difference = max(_distance(x, alone) for x in measured.packed)
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
    if not difference <= NOISE_FACTOR * noise:  # also if it is not a number
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
        attention=attention or implementation or "its own attention",
        mode="training" if training else "evaluation",
    )


def _share(difference: Tensor, leak: Tensor) -> float:
    """Return the part of `leak` that is in `difference`: its projection, 1 for all of it."""
    length = float((leak * leak).sum())
    return abs(float((difference * leak).sum())) / length if length else 1.0


def _chance_share(rounding: Tensor, leak: Tensor) -> float:
    """Return the share that rounding has by chance: it points anywhere, position by position."""
    length = float(leak.norm()) * len(leak) ** 0.5
    return float(rounding.norm()) / length if length else 0.0
