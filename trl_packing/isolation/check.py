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

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.install import try_backward, use_native_attention
from trl_packing.attention.model_facts import (
    layer_values,
    length_constants,
    native_implementation,
    requires,
    rope_thresholds,
    text_config,
    unwrap_model,
)
from trl_packing.attention.state import all_reduce_max_if_sharded, preserve_state, restore_state
from trl_packing.data.limits import learned_positions
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.loss.next_token import next_token_loss, score_targets
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_tree import build_prefix_tree

NOISE_FACTOR = 4.0
LEAK_SHARE = 0.01

VERDICTS = {
    "isolated": "documents are isolated",
    "leaks": "documents LEAK into each other",
    "inconclusive": "isolation could not be shown",
}

# Parts of a check in which a model may raise an error.
PACKED, ALONE, COLLATOR, NOT_FINITE = "packed row", "document alone", "collator", "not finite"


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
        where = f", first in {self.first_layer}" if self.first_layer else ""
        return (
            f"{VERDICTS[self.verdict]}: {self.model}, {self.attention}, {self.mode} mode, "
            f"{self.probe}: differs by {self.difference:.2g}{where} (rounding allows "
            f"{self.allowed:.2g}, a leak would be {self.leak:.2g})"
        )


@dataclass(frozen=True)
class Refusal:
    """An exception that a model raised against packed documents. It is false, as a leak is.

    Attributes:
        error: type and first line of the exception.
        stage: what was running. Another backend helps only after a packed call of the model.
    """

    error: str
    stage: str = PACKED

    @property
    def verdict(self) -> str:
        """ "refused" or "not finite", beside the verdicts of an `IsolationReport`."""
        return NOT_FINITE if self.stage == NOT_FINITE else "refused"

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.error

    @classmethod
    def from_error(cls, error: Exception) -> "Refusal":
        """Return the refusal that `error` is."""
        first_line, *_ = [*str(error).splitlines(), ""]
        stage = getattr(error, "isolation_stage", PACKED)
        return cls(f"{type(error).__name__}: {first_line}", stage)


CheckResult = IsolationReport | Refusal


def attempt(check: Callable[[], IsolationReport]) -> CheckResult:
    """Return the result of a check: models raise all kinds of errors against a packed batch.

    Raises:
        torch.OutOfMemoryError: the check did not fit into memory, which says nothing about leaks.
    """
    try:
        return check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Refusal.from_error(error)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.isolation_stage = name  # type: ignore[attr-defined]
        raise


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
    made: "Sequence[Probe]",
    *,
    collator: PackedCollator,
    training: bool | None = None,
    attention: str | None = None,
    fused_head: bool = False,
    gradients: bool = False,
    apart: Sequence[nn.Parameter] | None = None,
) -> IsolationReport:
    """Return the worst report on some probes. The arguments are those of `check_isolation`.

    A kernel of another library that will train also runs one small backward.

    Args:
        apart: parameters whose gradients are compared apart, of all probes; None compares those of
            the worst probe.
    """
    inner = unwrap_model(model)
    implementation = getattr(getattr(inner, "config", None), "_attn_implementation", None)
    backward = try_backward(inner, training=training)
    with backward as faults, preserve_state(model, training):
        reports = []
        for probe in made:
            measured = _measure(model, inner, probe, fused_head, collator)
            report = IsolationReport(
                *_verdict(*measured, torch.finfo(next(inner.parameters()).dtype).eps),
                probe=probe.name,
                model=type(inner).__name__,
                attention=attention or implementation or "its native attention",
                mode="training" if model.training else "evaluation",
            )
            reports.append((report, probe))
        worst_first = ("leaks", "inconclusive", "isolated")
        report, probe = min(
            reports, key=lambda pair: (worst_first.index(pair[0].verdict), -pair[0].difference)
        )
        leaks = report.verdict == "leaks"
        # Ranks of a sharded model wait for each other in every forward: all search, or none.
        if all_reduce_max_if_sharded(int(leaks), model):
            layer = _first_leaking_layer(model, inner, probe, collator)
            report = replace(report, first_layer=layer if leaks else "")
        if gradients:
            compared, others = ([probe], ()) if apart is None else (made, apart)
            errors = [_gradient_difference(model, inner, p, collator, others) for p in compared]
            report = replace(report, gradient_difference=max(errors))
    if report and faults:
        raise RuntimeError(faults[0])
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
        batch = _ordinary_batch(inner, torch.from_numpy(document)[None])

        def native(rounded: bool) -> Tensor:
            logits = _logits_at(model, inner, batch, np.arange(-len(document), -1))
            return _score_logits(logits, document[1:], rounded)

        expected, moved = _two_roundings(inner, native)
        if not bool(expected.isfinite().all()):
            return True  # nothing to compare: the check says so
        noise = _largest_difference(moved, expected)
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
    return _largest_difference(fused, expected) <= NOISE_FACTOR * max(noise, resolution)


# --- the forwards that are compared: alone, packed and contaminated -------------------------------


def _measure(
    model: nn.Module, inner: nn.Module, probe: "Probe", fused_head: bool, collate: PackedCollator
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Run a probe; return the results for B alone, packed and contaminated.

    Results are ``(positions of B, values)`` float32: logits, or log-probabilities and entropies if
    packed rows are scored through TRL's fused LM head.
    """
    ids = np.asarray(probe.document["input_ids"], np.int64)
    # The last position of B predicts nothing.
    kept = probe.at < len(ids) - 1 if fused_head else np.ones(len(probe.at), bool)
    at = probe.at[kept]

    def alone(rounded: bool = False, rows: int = 1, **others: Any) -> Tensor:
        batch = _alone_batch(inner, collate, probe.document, rows, **others)
        # Some ropes remember the longest document they have seen.
        with _stage(ALONE), restore_state(inner), use_native_attention(inner):
            outputs = _logits_at(model, inner, batch, at - len(ids))
        if fused_head:
            outputs = _score_logits(outputs, ids[at + 1], rounded)
        with _stage(NOT_FINITE):
            if not bool(outputs.isfinite().all()):
                raise ValueError(
                    f"the logits of {type(inner).__name__} are not finite (NaN or infinity) for a "
                    "document alone, unpacked: it cannot be trained; check its weights, and the "
                    "dtype it is loaded in"
                )
        return outputs

    def in_row(row: Row) -> Tensor:
        with restore_state(inner):
            batch = _collate(inner, collate, row.documents)
            labels = batch.pop("labels")
            # From the end: prompt tuning prepends tokens, and padding may follow the documents.
            here = row.at[kept] - labels.shape[1]
            if not fused_head:
                return _logits_at(model, inner, batch, here)
            chosen = torch.full_like(labels, IGNORE_INDEX)
            chosen[:, here + 1] = labels[:, here + 1]
            output = model(**batch, labels=chosen, fused_lm_head=True)
            return torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()

    layouts = _two_roundings(inner, alone)
    if probe.name == SHORT:
        mask = torch.ones(1, len(ids), dtype=torch.int64)
        layouts += [alone(rows=2), alone(attention_mask=mask)]
    packed = [in_row(row) for row in probe.packed]
    return layouts, packed, [in_row(row) for row in probe.contaminated]


def _verdict(
    layouts: list[Tensor], packed: list[Tensor], contaminated: list[Tensor], eps: float
) -> tuple[str, float, float, float]:
    """Return verdict, difference, noise and leak, as in this module's docstring.

    Args:
        layouts: results for B alone, then others that must not make a difference.
        packed: results in packed rows.
        contaminated: results in the first of these rows, as one document.
        eps: of the dtype of the model.
    """
    alone = layouts[0]
    resolution = eps * float(alone.abs().max())
    leak = max(_largest_difference(x, alone) for x in contaminated)
    noise = max(resolution, *(_largest_difference(x, alone) for x in layouts))
    difference = max(_largest_difference(x, alone) for x in packed)
    same_bits = (
        len(contaminated) > 1
        and torch.equal(packed[0], packed[1])
        and not torch.equal(contaminated[0], contaminated[1])
    )
    rounding = max(float((x - alone).norm()) for x in layouts)

    def share_is_small(moved: Tensor, leaked: Tensor) -> bool:
        length = float((leaked * leaked).sum())
        share = abs(float((moved * leaked).sum())) / length if length else 1.0
        # Rounding errors of a random direction have this share by chance.
        chance = rounding / (length * len(leaked)) ** 0.5 if length else 0.0
        return share <= max(LEAK_SHARE, 2 * chance)

    shares_are_small = all(
        share_is_small(x - alone, c - alone) for x, c in zip(packed, contaminated, strict=False)
    )
    if not difference <= NOISE_FACTOR * noise:  # true for NaN as well
        verdict = "leaks"
    elif difference <= LEAK_SHARE * leak or shares_are_small or same_bits:
        verdict = "isolated"
    else:
        verdict = "inconclusive"
    return verdict, difference, noise, leak


@contextmanager
def round_differently(model: nn.Module) -> Iterator[None]:
    """Move the outputs of modules without children up or down by a possible rounding error.

    Rounding errors grow with depth, and one that changes an expert's routing is as large as a leak.
    The model itself shows how large a difference another order of summation can make.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or not output.is_floating_point():
            return None
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        up = torch.rand(output.shape, generator=generator, device=device) < 0.5
        # Rows of another length are summed in another order: n float32 terms, then one rounding.
        terms = getattr(module, "in_features", 1)
        step = max(torch.finfo(output.dtype).eps / 2, terms**0.5 * torch.finfo(torch.float32).eps)
        return output * (1 - step + 2 * step * up).to(output.dtype)

    leaves = (m for m in model.modules() if next(m.children(), None) is None)
    with _hooks(leaves, nn.Module.register_forward_hook, move):
        yield


def _two_roundings(model: nn.Module, run: Callable[[bool], Any]) -> list[Any]:
    """Return `run(False)`, and `run(True)` while the outputs of modules are rounded differently.

    Args:
        model: as in `round_differently`.
        run: takes whether it rounds its own scores differently, too (`_score_logits`).
    """
    plain = run(False)
    with round_differently(model):
        return [plain, run(True)]


def _ordinary_batch(model: nn.Module, ids: Tensor, **others: Any) -> dict[str, Any]:
    """Return a batch without packing: rows of `ids`, one document each."""
    batch = {"input_ids": ids, "use_cache": False, **others}
    if requires(model, "position_ids"):
        batch["position_ids"] = torch.arange(ids.shape[1]).expand(ids.shape)
    return _on(model, batch)


def _alone_batch(
    model: nn.Module, collate: Any, document: "Document", rows: int = 1, **others: Any
) -> dict[str, Any]:
    """Return the batch of a document without packing; with images, positions are the model's."""
    ids = np.asarray(document["input_ids"], np.int64)
    if "images" in document:
        others |= collate.images.tensors([document], [ids])
        others.pop("position_ids", None)
        others["attention_mask"] = torch.ones(1, len(ids), dtype=torch.int64)
    return _ordinary_batch(model, torch.from_numpy(ids)[None].repeat(rows, 1), **others)


def _collate(
    model: nn.Module, collate: PackedCollator, documents: "Sequence[Document]"
) -> dict[str, Any]:
    """Return a packed row of `documents` with its labels, on the device of `model`."""
    with _stage(COLLATOR):
        batch = collate([dict(document) for document in documents])
    for name in (TOKEN_WEIGHTS, TARGET_COUNTS):  # the loss reads them, the model does not
        batch.pop(name, None)
    return _on(model, for_kernels(batch))


def _on(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _score_logits(logits: Tensor, targets: np.ndarray, rounded: bool) -> Tensor:
    """Return log-probability and entropy at each position, ``(N, 2)``.

    Args:
        logits: ``(N, vocabulary)`` float32.
        targets: token ids ``(N,)`` int64.
        rounded: move the results up or down, as if their sums over the vocabulary, of one float32
            term for each token, had run in another order. In a shallow model with a large
            vocabulary, no other rounding is as large.
    """
    log_probs, entropy, _ = score_targets(logits, torch.from_numpy(targets).to(logits.device))
    scores = torch.stack([log_probs, entropy], -1)
    if not rounded:
        return scores
    step = logits.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    up = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return scores + step * torch.where(up, 1.0, -1.0).to(scores.device)


def _logits_at(model: nn.Module, inner: Any, batch: dict[str, Any], rows: np.ndarray) -> Tensor:
    """Return the first row's logits at positions `rows`, ``(len(rows), vocabulary)`` float32.

    Args:
        model: the model as a training step calls it.
        inner: the model inside its wrappers, whose LM head then scores no other positions.
        batch: the model's inputs.
        rows: negative positions, counted from the end of the row.
    """
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    kept = False

    def keep(_module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        nonlocal kept
        if inputs and torch.is_tensor(inputs[0]) and inputs[0].dim() == 3:
            kept = True
            return (inputs[0][:, rows], *inputs[1:])
        return None

    heads = [head] if isinstance(head, nn.Module) else []
    with _hooks(heads, nn.Module.register_forward_pre_hook, keep):
        output = model(**batch)
    logits = output if torch.is_tensor(output) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return (logits if kept else logits[:, rows])[0].float()


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Return max |a − b|."""
    return float((a - b).abs().max())


# --- details of a leak ----------------------------------------------------------------------------


def _first_leaking_layer(
    model: nn.Module, inner: nn.Module, probe: "Probe", collate: PackedCollator
) -> str:
    """Return the name of the first layer whose output for B differs beyond rounding, or "".

    It is looked for where B is the last document of a row of text.
    """
    documents = probe.packed[0].documents
    if documents[-1] is not probe.document or "images" in probe.document:
        return ""
    ordinary = _alone_batch(inner, collate, probe.document)
    with use_native_attention(inner):
        alone, rounded = _two_roundings(inner, lambda _: _layer_outputs(model, inner, ordinary))
    batch = _collate(inner, collate, documents)
    size, end = (sum(len(d["input_ids"]) for d in row) for row in (documents[-1:], documents))
    tail = batch.pop("labels").shape[1] - end
    packed = _layer_outputs(model, inner, batch)
    for name, expected in alone.items():
        found = packed.get(name)
        if found is None or found.shape[1] < end:
            continue  # the layer does not see the row as a whole
        # Counted from the end: prompt tuning prepends virtual tokens.
        at = found.shape[1] - tail - size
        difference = _largest_difference(found[:, at : at + size], expected[:, -size:])
        if not difference <= NOISE_FACTOR * max(_largest_difference(rounded[name], expected), 1e-6):
            return name
    return ""


def _layer_outputs(model: nn.Module, inner: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the output of each of the model's layers, ``(rows, T, hidden)`` float32, by name."""
    outputs: dict[str, Tensor] = {}
    stacks = [(n, m) for n, m in inner.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    names = {layer: f"{name}.{i}" for name, layers in stacks[:1] for i, layer in enumerate(layers)}

    def keep(layer: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_tensor(hidden) and hidden.dim() == 3:
            outputs[names[layer]] = hidden.float()

    with _hooks(names, nn.Module.register_forward_hook, keep), restore_state(inner):
        model(**batch)
    return outputs


@contextmanager
def _hooks(modules: Iterable[nn.Module], register: Callable[..., Any], hook: Any) -> Iterator[None]:
    """Register `hook` on modules inside the block."""
    with ExitStack() as stack:
        for module in modules:
            stack.callback(register(module, hook).remove)
        yield


def _gradient_difference(
    model: nn.Module,
    inner: nn.Module,
    probe: "Probe",
    collate: PackedCollator,
    apart: Iterable[nn.Parameter] = (),
) -> float:
    """Return the largest difference of the gradients of B's loss, packed and alone.

    It is relative to the largest gradient.

    Args:
        model: the model as a training step calls it.
        inner: the model inside its wrappers.
        probe: its first row is packed, in which B alone is trained.
        collate: makes the row.
        apart: parameters that are compared relative to the largest gradient among them.
    """
    alone = _alone_batch(inner, collate, probe.document)
    row = [
        d if d is probe.document else {**d, "labels": np.full_like(d["input_ids"], IGNORE_INDEX)}
        for d in probe.packed[0].documents
    ]
    packed = _collate(inner, collate, row)
    with use_native_attention(inner):
        expected = _loss_gradients(model, inner, alone, alone["input_ids"])
    found = _loss_gradients(model, inner, packed, packed.pop("labels"))
    ids = set(map(id, apart))
    sizes, errors = ([0.0], [0.0]), ([0.0], [0.0])  # of the others, and of those apart
    for name, parameter in inner.named_parameters():
        side, zero = id(parameter) in ids, parameter.new_zeros(())
        gradient = expected.get(name, zero)
        sizes[side].append(float(gradient.abs().max()))
        errors[side].append(_largest_difference(gradient, found.get(name, zero)))
    # np.max, unlike max, keeps a difference that is no number.
    return max(float(np.max(e)) / (max(n) or 1.0) for e, n in zip(errors, sizes, strict=True))


@torch.enable_grad()
def _loss_gradients(
    model: nn.Module, inner: nn.Module, batch: dict[str, Any], labels: Tensor
) -> dict[str, Tensor]:
    """Return the gradients of the loss by parameter; those that it does not reach are left out."""
    trained = {name: p for name, p in inner.named_parameters() if p.requires_grad}
    with restore_state(inner):
        output = model(**batch)
        logits = output if torch.is_tensor(output) else output.logits
        loss = next_token_loss(logits, labels)
        # Inside the block, whose end writes buffers that the backward may read.
        found = torch.autograd.grad(loss, [*trained.values()], allow_unused=True)
    return {name: g for name, g in zip(trained, found, strict=True) if g is not None}


# --- probes: a document B, and packed rows that hold it -------------------------------------------


# Probes are as long as the data. Some rope variants depend on the longest position of the batch,
# so a short probe passes on a model that a long document contaminates (by 5.0, Phi-3 longrope).

SHORT = "short documents"

# Shorter documents show little of attention: the first token attends only to itself.
MIN_TOKENS = 17
_ROOM = 40  # tokens of the longest document in a short probe
_EAGER_BYTES = 4 * 2**30  # for the attention scores of a document alone


# The check compares this many of the first positions of B, where a leak is strongest, and of the
# last ones.
_POSITIONS = 32

Document = Mapping[str, Any]  # `input_ids` ``(T,)`` int64, and `images` in a run with images


class Row(NamedTuple):
    """A packed row, and the positions in it that are compared, ``(P,)``."""

    documents: Sequence[Document]
    at: np.ndarray


class Probe(NamedTuple):
    """A document B, and rows in which its outputs must be those of B alone.

    Attributes:
        name: what the report calls it.
        document: B.
        at: positions of B that are compared, ``(P,)``.
        packed: rows that hold B as one of their documents.
        contaminated: the first of these rows as one document: the effect of a full leak.
    """

    name: str
    document: Document
    at: np.ndarray
    packed: list[Row]
    contaminated: list[Row]


def probes(
    model: nn.Module,
    documents: Sequence[Sequence[int] | np.ndarray],
    max_length: int,
    thorough: bool = False,
) -> list[Probe]:
    """Return the probes for a run on `documents`.

    Args:
        model: the model to probe.
        documents: token ids ``(T,)`` of documents of the run. Without them, probes cross every
            length constant of the model below `max_length`.
        max_length: in tokens.
        thorough: add documents of similar length beside each other, which padded rows put into one
            forward. Sparse attention that selects keys by an index fails there, on some contents.
    """
    rng = np.random.default_rng(0)
    draw, positions = random_tokens(model, rng), learned_positions(model) or max_length + _ROOM
    few, most_room = min(MIN_TOKENS, positions // 2), min(_ROOM, positions)
    # Twice 23 tokens, to show what depends on content alone; 19, which share a padded forward with
    # B; and as many tokens as B, which share a forward of equal lengths.
    before = [[draw(23)], [draw(23)], [draw(11)], [draw(19), draw(5)], [draw(few)], []]
    made = [_behind(SHORT, before, draw(few), most_room)]
    given = sorted((np.asarray(d, dtype=np.int64) for d in documents), key=len)
    if given and len(given[-1]) > 1:
        longest = given[-1]
        # As short as the data's shortest document: a model that treats rows with the longest
        # document differently shows it on a document at the other side of a threshold.
        least = max(few, len(given[0]))
        other = next((d for d in given if len(d) >= least), longest)[:least]
    else:
        reach = [c for c in length_constants(model) if c < max_length]
        if given or not reach:
            return made
        # Beyond a threshold of rope there must be room for two different lengths.
        beyond = max(reach) // 4 + 23 if max(reach) in rope_thresholds(model) else 7
        longest, other = draw(max(reach) + beyond), draw(19)
    size = len(longest)
    # In the contaminated layout, B continues the document before it and needs room.
    room = max(size, most_room)
    alone = min(max(room - 13, room // 2), longest_alone(model))
    other, most = other[:alone], longest[:alone]
    made.append(_behind(f"after {size:,} tokens", [[longest]], other, room))
    # Two long documents may share a padded forward, and the frequencies of dynamic NTK.
    shorter = most if len(most) < 2 * MIN_TOKENS else most[: len(most) * 9 // 10]
    before = [[draw(len(most)), draw(13)]]
    made.append(_behind(f"of {len(shorter):,} tokens", before, shorter, room))
    if thorough:
        made += [*_alike(draw, len(most), room), *_alike(draw, MIN_TOKENS * 2, room)]
    return made


def _behind(name: str, before: list[list[np.ndarray]], ids: np.ndarray, room: int) -> Probe:
    """Return a probe of a document behind others.

    Args:
        name: of the probe.
        before: token ids of the documents before it, in each row.
        ids: its own.
        room: most tokens of a contaminated row, within the positions that the model has learned.
    """
    document, at = {"input_ids": ids}, _at_both_ends(np.arange(len(ids)))
    rows = [[*({"input_ids": x} for x in others), document] for others in before]
    whole = [np.concatenate([*others, ids])[-room:] for others in before]
    return Probe(
        name,
        document,
        at,
        [Row(row, sum(map(len, x)) + at) for row, x in zip(rows, before, strict=True)],
        [Row([{"input_ids": x}], len(x) - len(ids) + at) for x in whole[: 1 + (name == SHORT)]],
    )


def _at_both_ends(positions: np.ndarray) -> np.ndarray:
    return np.unique(np.concatenate([positions[:_POSITIONS], positions[-_POSITIONS:]]))


def prefix_probes(model: nn.Module, documents: Sequence[np.ndarray]) -> list[Probe]:
    """Return probes of documents that share a prefix, for rows that compute it once.

        alone          [P · B]            without packing: the reference
        shared         [P · B, P · C]     in one row, computed as P, B, C; also with another C
        contaminated   [P · C · B]        as one document

    Args:
        model: reads the tokens.
        documents: of the run; the longest is cut into a prefix and a branch.
    """
    draw = random_tokens(model, np.random.default_rng(0))
    prefix, branch = draw(29), draw(17)
    rows = [[draw(11), draw(5)], [draw(11), draw(5)], [draw(23)]]
    made = [_sharing("short documents that share a prefix", prefix, branch, rows)]
    longest = max((np.asarray(d, np.int64) for d in documents), key=len, default=np.zeros(0))
    longest = longest[: longest_alone(model)]
    half = len(longest) // 2
    if half > 40:
        rows = [[draw(half // 2)], [draw(half // 2)]]
        name = f"documents that share {half:,} tokens"
        made.append(_sharing(name, longest[:half], longest[half:], rows))
    return made


def _sharing(
    name: str, prefix: np.ndarray, branch: np.ndarray, siblings: list[list[np.ndarray]]
) -> Probe:
    ids = np.concatenate([prefix, branch])
    # Positions that predict the tokens of the branch behind its first. Windows that reach across
    # the fork end soon behind it.
    at = _at_both_ends(np.arange(len(prefix), len(ids) - 1))
    document, packed, contaminated = {"input_ids": ids}, [], []
    for branches in siblings:
        others = [np.concatenate([prefix, other]) for other in branches]
        places = build_prefix_tree([ids, *others]).targets[at + 1] - 1
        packed.append(Row([document, *({"input_ids": x} for x in others)], places))
        whole = np.concatenate([prefix, *branches, branch])
        contaminated.append(Row([{"input_ids": whole}], at + len(whole) - len(ids)))
    return Probe(name, document, at, packed, contaminated[:2])


def longest_alone(model: Any) -> int:
    """Return the tokens of the longest document that the model's native attention runs alone.

    Eager attention holds the scores of every head, T × T: gpt-oss would need 79 GiB for 16K tokens,
    which its packed rows do not.
    """
    if native_implementation(model) != "eager":
        return sys.maxsize
    parameter, bound = next(model.parameters()), _EAGER_BYTES
    if parameter.is_cuda:
        bound = min(bound, torch.cuda.mem_get_info(parameter.device)[0] // 2)
    heads = max(layer_values(text_config(model), "num_attention_heads"), default=1)
    cell = parameter.element_size() + 4  # the scores, and their softmax in float32
    return max(_ROOM, int((bound / (heads * cell)) ** 0.5))


def _alike(draw: Callable[[int], np.ndarray], length: int, room: int) -> list[Probe]:
    """Return a probe for each of four documents that fill one padded forward."""
    documents = [draw(max(2, length * percent // 100)) for percent in (100, 88, 84, 80)]
    filler = draw(length // 2)  # a padded forward has at most as many cells as the row has tokens
    made = []
    for document in documents:
        others = [filler, *(other for other in documents if other is not document)]
        name = f"of {len(document):,} tokens among similar ones"
        made.append(_behind(name, [others], document, room))
    return made


def random_tokens(model: Any, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    """Return a function that draws a number of tokens which `model` can read and predict.

    It draws fewer tokens where the model has learned fewer positions.
    """
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(embeddings, "num_embeddings", None) or next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2
    )
    # Vision-language models raise an error for an image token without an image.
    fields = vars(getattr(model, "config", None) or nn.Identity())
    named = [v for k, v in fields.items() if k.endswith(("token_id", "token_index"))]
    special = [i for v in named for i in (v if isinstance(v, (list, tuple)) else [v])]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    # Some tokens can be read but not predicted (mllama's image tokens, cpmant's prompts).
    size = min(size, getattr(head, "out_features", None) or size)
    usable = np.setdiff1d(np.arange(size), [i for i in special if isinstance(i, int)])
    usable = usable if len(usable) > 1 else np.arange(size)
    most = learned_positions(model)
    return lambda length: rng.choice(usable, min(length, most or length)).astype(np.int64)
