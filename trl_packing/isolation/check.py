"""Measures on a model whether a document A affects the document B behind it in a packed row.

    alone          [B]        without packing: the reference
    packed         [A, B]     as in training; also with other tokens and another length of A
    contaminated   [A · B]    the end of A and the start of B as one document: a full leak
    difference     max |packed − alone|, over the outputs for B
    noise          the same between layouts of B alone, and modules that round differently; of the
                   first probe, and of those that do not pass by it
    leak           max |contaminated − alone|
    share          the part of the leak in the difference, as a projection: rounding points in all
                   directions, a leak towards contamination, which shows it in bf16, too

B leaks if the difference is above 4 × noise. Below, B is isolated if the difference is at most 1 %
of the leak, or the share at most 1 % (or what rounding has by chance), or if B stays identical to
the last bit when A's tokens change. Otherwise the check is inconclusive. What bf16 weights do
not show to leak is measured once more, on a copy of them in float32.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

from trl_packing.attention.calls import Call
from trl_packing.attention.install import try_backward, use_native_attention
from trl_packing.attention.model_facts import current_implementation, requires, unwrap_model
from trl_packing.attention.ranks import is_alone, is_sharded
from trl_packing.attention.sequence_parallel import gather_row, share_of_rank
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.isolation.preserve import preserve_state, restore_state
from trl_packing.isolation.probes import (
    MIN_TOKENS,
    SHORT,
    Document,
    Probe,
    Row,
    prefix_probes,
    probes,
    random_tokens,
)
from trl_packing.loss.next_token import next_token_loss, score_targets
from trl_packing.packing.collator import PackedCollator

NOISE_FACTOR = 4.0
LEAK_SHARE = 0.01
_EPS = torch.finfo(torch.float32).eps
_COPY_BYTES = 4 * 2**30  # of weights in float32

VERDICTS = {  # from the best
    "isolated": "documents are isolated",
    "inconclusive": "isolation could not be shown",
    "leaks": "documents LEAK into each other",
}

NOT_FINITE = "not finite"  # the verdict on a model that no backend can train


@dataclass(frozen=True)
class IsolationReport:
    """The verdict on a model, and its evidence. It is true if documents are isolated.

    Differences are the largest of logits; with `fused_head`, of log-probabilities and entropies.
    """

    verdict: str  # "isolated", "leaks" or "inconclusive"
    difference: float  # between packed and alone, in the probe that decided
    noise: float  # by rounding
    leak: float  # by contamination
    probe: str  # the documents that decided
    model: str  # its class
    attention: str
    mode: str  # "training" or "evaluation"
    gradient_difference: float | None = None  # relative to the largest gradient
    has_images: bool = False  # in the probe that decided
    in_float32: bool = False  # measured again, on a copy of weights that round more
    whatever_others: bool = False  # B differs, but not by the tokens of A: positions, masks, ties

    def __bool__(self) -> bool:
        return self.verdict == "isolated"

    @property
    def allowed(self) -> float:
        """The largest difference that is put down to rounding; a larger one is a leak."""
        return NOISE_FACTOR * self.noise

    @property
    def is_blunt(self) -> bool:
        """Whether rounding is too near to a leak for the difference alone to tell them apart."""
        return self.verdict != "leaks" and self.difference > LEAK_SHARE * self.leak

    @property
    def words(self) -> str:
        """The verdict in words."""
        if self.whatever_others:
            return "documents DIFFER in a packed row, whatever the others contain"
        limits = ", as far as rounding lets it show" if self.is_blunt else ""
        return VERDICTS[self.verdict] + limits

    @property
    def numbers(self) -> str:
        """What decided, in words."""
        precision = " (in float32)" if self.in_float32 else ""
        return (
            f"differs by {brief(self.difference)}, rounding allows {brief(self.allowed)}, a leak "
            f"would be {brief(self.leak)}{precision}"
        )

    def __str__(self) -> str:
        where = f"{self.model}, {self.attention}, {self.mode} mode, {self.probe}"
        return f"{self.words}: {where}: {self.numbers}"


def brief(number: float) -> str:
    """Return a number of any size in a few characters.

    Example:
        >>> brief(0.0), brief(0.00068), brief(0.25), brief(20.3)
        ('0', '7e-4', '0.25', '20')
    """
    if number and abs(number) < 0.01:
        return f"{number:.0e}".replace("e-0", "e-")
    return f"{number:.2g}" if abs(number) < 100 else f"{number:,.0f}"


class Refusal(ValueError):
    """What a model or a collator raised, in a line: "refused" or "not finite". It is false."""

    def __init__(self, error: str, verdict: str = "refused"):
        super().__init__(error)
        self.verdict = verdict

    def __bool__(self) -> bool:
        return False


CheckResult = IsolationReport | Refusal


def attempt(check: Callable[..., IsolationReport], *arguments: Any, **options: Any) -> CheckResult:
    """Return the result of a check; running out of memory says nothing about leaks, and raises."""
    try:
        return check(*arguments, **options)
    except torch.OutOfMemoryError:
        raise
    except Refusal as error:
        return Refusal(str(error), error.verdict)  # without the tensors of its frames
    except Exception as error:  # models raise all kinds of errors against a packed batch
        return Refusal(_in_a_line(error))


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def _without_packing(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise Refusal(f"{what}: {_in_a_line(error)}") from error


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
) -> IsolationReport:
    """Return whether packed documents affect each other on `model`, and by how much.

    The model, its buffers, its mode and all random number generators are left as they were. A leak
    is a verdict and raises nothing.

    Args:
        model: called as a training step calls it. It may be wrapped (DDP, PEFT), and need not come
            from transformers.
        documents: token ids ``(T,)`` of the run. Probes are as long as the longest and as short as
            the shortest of them.
        training: the mode to check, by default the model's.
        max_length: in tokens. Without documents, probes cross every length constant of the config
            below it.
        attention: the name of the attention in the report.
        fused_head: run packed rows through TRL's fused LM head, and compare log-probabilities and
            entropies with those of the model's logits.
        collator: makes the packed rows; give the one that the run uses.
        gradients: also compare the gradients of B's loss, by one more forward and backward of each.

    Raises:
        Exception: any error that the model raises against a packed batch.
    """
    collator = collator or PackedCollator()
    made = probes(unwrap_model(model), documents, max_length)
    return check_probes(model, made, collator, training, attention, fused_head, gradients)


def check_prefixes(
    model: nn.Module, documents: Sequence[np.ndarray], collator: PackedCollator, **options: Any
) -> IsolationReport:
    """Return whether documents with a shared prefix affect each other; see `check_isolation`."""
    made = prefix_probes(unwrap_model(model), documents)
    return check_probes(model, made, collator.replaced(shares_prefixes=True), **options)


@torch.no_grad()
def check_probes(
    model: nn.Module,
    made: Sequence[Probe],
    collator: PackedCollator,
    training: bool | None = None,
    attention: str | None = None,
    fused_head: bool = False,
    gradients: bool = False,
) -> IsolationReport:
    """Return the worst report on some probes; arguments as of `check_isolation`."""
    inner = unwrap_model(model)
    attention = attention or current_implementation(inner) or "its native attention"

    def worst(called: Any, eps: float) -> tuple[IsolationReport, Probe]:
        reports = []
        runs = _Runs(called, inner, fused_head, made, collator)
        known = 0.0  # noise of probes before
        for probe in made:
            rounds = not is_alone() or not known  # ranks run equally many forwards
            layouts, packed, contaminated = runs.measure(probe, rounds)
            found = _verdict(layouts, packed, contaminated, eps, known)
            if found[0] != "isolated" and not rounds:
                layouts.append(runs.rounded(probe))
                found = _verdict(layouts, packed, contaminated, eps)
            verdict, difference, noise, leak = found
            known = max(known, noise)
            report = IsolationReport(
                verdict,
                difference,
                noise,
                leak,
                probe=probe.name,
                model=type(inner).__name__,
                attention=attention,
                mode="training" if model.training else "evaluation",
                has_images="images" in probe.document,
                whatever_others=verdict == "leaks" and _ignores_tokens(packed, contaminated),
            )
            badness = [*VERDICTS].index(verdict), report.whatever_others, difference
            reports.append((badness, report, probe))
        _, report, probe = max(reports, key=lambda found: found[0])
        return report, probe

    eps = torch.finfo(next(inner.parameters()).dtype).eps
    with try_backward(inner, training=training) as faults, preserve_state(model, training):
        report, probe = worst(model, eps)
        # Ranks that share a row must run as many forwards as each other.
        is_blunt = report.verdict != "leaks" and report.difference and eps > _EPS
        copied = 4 * sum(parameter.numel() for parameter in inner.parameters())
        may_copy = copied <= _COPY_BYTES and not is_sharded(inner)
        if is_blunt and collator.share[1] == 1 and may_copy:
            with suppress(Exception):  # kernels of half precision refuse it
                report, probe = worst(_in_float32(model), _EPS)
                report = replace(report, in_float32=True)
        if gradients:
            error = _gradient_difference(model, inner, probe, collator)
            report = replace(report, gradient_difference=error)
    if report and faults:
        raise RuntimeError(faults[0])
    return report


def _in_float32(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls `model` with its weights and buffers in float32."""
    # DDP would wait for ranks that need no second measurement.
    called = model.module if isinstance(model, DistributedDataParallel) else model
    held = (*called.named_parameters(), *called.named_buffers())
    copies = {name: tensor.float() for name, tensor in held if tensor.is_floating_point()}
    return lambda **batch: functional_call(called, copies, (), batch)


@torch.no_grad()
def check_fused_head(model: nn.Module) -> bool:
    """Return whether TRL's fused LM head gives the log-probabilities of the model's logits.

    A head that does more than a matrix product would train on another loss, unpacked too. So would
    one that still computes the same, but trains more than a weight and a bias (Dory's).
    """
    inner: Any = unwrap_model(model)
    head = inner.get_output_embeddings()
    read = {id(getattr(head, name, None)) for name in ("weight", "bias")}
    if head is None or any(p.requires_grad and id(p) not in read for p in head.parameters()):
        return False
    ids = random_tokens(inner)(MIN_TOKENS)
    with preserve_state(model, training=True):
        batch = _alone_batch(inner, None, {"input_ids": ids})

        def native(rounded: bool) -> Tensor:
            logits = _logits_at(model, inner, batch, np.arange(-len(ids), -1))
            return _score_logits(logits, ids[1:], rounded)

        expected = native(rounded=False)
        with round_differently(inner):
            moved = native(rounded=True)
        if not bool(expected.isfinite().all()):
            return True  # nothing to compare: the check says so
        labels = batch["input_ids"].clone()
        labels[:, 0] = IGNORE_INDEX  # prompt tuning would predict it from a virtual token
        try:
            fused = _fused_scores(model, batch, labels)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # no backbone (llama4), no number of experts (dbrx), ...
            return False
    resolution = torch.finfo(next(inner.parameters()).dtype).eps * float(expected.abs().max())
    noise = max(_furthest([moved], expected), resolution)
    return _furthest([fused], expected) <= NOISE_FACTOR * noise


class _Runs:
    """Runs documents alone and in rows, and returns logits, or scores of the fused head."""

    def __init__(
        self, model: Any, inner: nn.Module, fused_head: bool, made: Sequence[Probe], collate: Any
    ):
        self.model, self.inner, self.fused_head, self.collate = model, inner, fused_head, collate
        self.compared: dict[int, np.ndarray] = {}  # positions of rows, by their documents
        for probe in made:
            for row in (*probe.packed, *probe.contaminated):
                known = self.compared.get(id(row.documents), row.at)
                self.compared[id(row.documents)] = np.union1d(known, row.at)
        self.outputs: dict[int, Tensor] = {}

    def measure(
        self, probe: Probe, rounds: bool
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the outputs of B alone, if it `rounds` in two ways, packed and contaminated."""
        layouts = [self.alone(probe)]
        if rounds:
            layouts.append(self.rounded(probe))
        if probe.name == SHORT:
            mask = torch.ones(2, len(probe.document["input_ids"]), dtype=torch.int64)
            layouts.append(self.alone(probe, rows=2, attention_mask=mask))
        packed = [self.in_row(row) for row in probe.packed]
        return layouts, packed, [self.in_row(row) for row in probe.contaminated]

    def rounded(self, probe: Probe) -> Tensor:
        """Return the outputs of B without packing, while modules round differently."""
        with round_differently(self.inner):
            return self.alone(probe, rounded=True)

    def alone(self, probe: Probe, rounded: bool = False, rows: int = 1, **others: Any) -> Tensor:
        """Return the outputs of B without packing."""
        ids = np.asarray(probe.document["input_ids"], np.int64)
        name = type(self.inner).__name__
        batch = _alone_batch(self.inner, self.collate, probe.document, rows, **others)
        # Some ropes remember the longest document they have seen.
        with (
            _without_packing(f"{name} cannot run a document even alone, unpacked"),
            restore_state(self.inner),
            use_native_attention(self.inner),
        ):
            outputs = _logits_at(self.model, self.inner, batch, probe.at - len(ids))
        if self.fused_head:
            outputs = _score_logits(outputs, ids[probe.at + 1], rounded)
        if not bool(outputs.isfinite().all()):
            raise Refusal(
                f"the logits of {name} are not finite (NaN or infinity) for a document alone, "
                "unpacked; check its weights, and the dtype it is loaded in",
                NOT_FINITE,
            )
        return outputs

    def in_row(self, row: Row) -> Tensor:
        """Return the outputs of B in a row, which runs once for all that is compared in it."""
        key = id(row.documents)
        if key not in self.outputs:
            self.outputs[key] = self._run(row.documents, self.compared[key])
        return self.outputs[key][np.searchsorted(self.compared[key], row.at)]

    def _run(self, documents: Sequence[Document], at: np.ndarray) -> Tensor:
        inner, share = self.inner, self.collate.share
        with restore_state(inner):
            batch = collate_probe(inner, self.collate.replaced(share=(0, 1)), documents)
            labels = batch.pop("labels")
            # From the end: prompt tuning prepends tokens, and padding may follow the documents.
            here = at - labels.shape[1]
            if not self.fused_head:
                return _logits_at(self.model, inner, batch, here)
            chosen = torch.full_like(labels, IGNORE_INDEX)
            chosen[:, here + 1] = labels[:, here + 1]
            return _fused_scores(self.model, batch, chosen, *share)


def _verdict(
    layouts: list[Tensor],
    packed: list[Tensor],
    contaminated: list[Tensor],
    eps: float,
    known: float = 0.0,
) -> tuple[str, float, float, float]:
    """Return verdict, difference, noise and leak; the first of `layouts` is B alone.

    The noise is at least the `known` one.
    """
    alone = layouts[0]
    noise = max(eps * float(alone.abs().max()), _furthest(layouts, alone), known)
    difference = _furthest(packed, alone)
    leak = _furthest(contaminated, alone)
    rounding = max(float((x - alone).norm()) for x in layouts)

    has_share = False  # of a leak
    for row, other in zip(packed, contaminated, strict=False):
        start = alone[: len(other)]
        moved, leaked = row[: len(other)] - start, other - start
        length = float((leaked * leaked).sum())
        # Rounding errors of a random direction have this share by chance.
        chance = rounding / (length * len(leaked)) ** 0.5 if length else 0.0
        share = abs(float((moved * leaked).sum())) / length if length else math.inf
        has_share |= not share <= max(LEAK_SHARE, 2 * chance)
    if not difference <= NOISE_FACTOR * noise:  # true for NaN as well
        verdict = "leaks"
    elif difference <= LEAK_SHARE * leak or not has_share or _ignores_tokens(packed, contaminated):
        verdict = "isolated"
    else:
        verdict = "inconclusive"
    return verdict, difference, noise, leak


def _ignores_tokens(packed: list[Tensor], contaminated: list[Tensor]) -> bool:
    """Whether B is the same to the last bit in two rows whose A has other tokens."""
    others_differ = len(contaminated) > 1 and not torch.equal(*contaminated[:2])
    return others_differ and torch.equal(*packed[:2])


def _furthest(results: Iterable[Tensor], alone: Tensor) -> float:
    """Return the largest |result − alone|, NaN if any is; results may have the first positions."""
    return float(np.max([float((x - alone[: len(x)]).abs().max()) for x in results]))


@contextmanager
def round_differently(model: nn.Module) -> Iterator[None]:
    """Move the outputs of modules without children up or down by a possible rounding error."""
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

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.enter_context(module.register_forward_hook(move))
        yield


def _alone_batch(
    model: nn.Module, collate: Any, document: Document, rows: int = 1, **others: Any
) -> Call:
    """Return the batch of a document without packing; with images, positions are the model's."""
    ids = np.asarray(document["input_ids"], np.int64)
    if "images" in document:
        others |= collate.images.tensors([document], [ids])
        others.pop("position_ids", None)
        others["attention_mask"] = torch.ones(1, len(ids), dtype=torch.int64)
    tensor = torch.from_numpy(ids)[None].repeat(rows, 1)
    batch = {"input_ids": tensor, "use_cache": False, **others}
    if requires(model, "position_ids"):
        batch["position_ids"] = torch.arange(len(ids)).expand(tensor.shape)
    return _on(model, batch)


def collate_probe(model: nn.Module, collate: PackedCollator, documents: Sequence[Document]) -> Call:
    """Return a packed row of `documents` with its labels, on the device of `model`."""
    with _without_packing("the data collator makes no packed row"):
        batch = collate([dict(document) for document in documents])
    for name in (TOKEN_WEIGHTS, TARGET_COUNTS):  # the loss reads them, the model does not
        batch.pop(name, None)
    return _on(model, for_kernels(batch))


def _on(model: nn.Module, batch: Call) -> Call:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _fused_scores(model: Any, batch: Call, labels: Tensor, rank: int = 0, size: int = 1) -> Tensor:
    """Return log-probability and entropy of the trained `labels` by the fused head, ``(N, 2)``.

    The row is divided over `size` ranks, of which this one has the number `rank`.
    """
    batch = batch | {"labels": labels}
    if size > 1:
        batch = share_of_rank(batch, rank, size)
    output = model(**batch, fused_lm_head=True)
    mask = output.label_mask
    scores = torch.stack([output.log_probs, output.entropy, mask.to(output.log_probs)], -1)
    if size > 1:
        scores = gather_row(scores, size)
    return scores[scores[..., 2] > 0][:, :2].float()


def _score_logits(logits: Tensor, targets: np.ndarray, rounded: bool) -> Tensor:
    """Return log-probability and entropy ``(N, 2)``, `rounded` as if summed in another order."""
    log_probs, entropy, _ = score_targets(logits, torch.from_numpy(targets).to(logits.device))
    scores = torch.stack([log_probs, entropy], -1)
    if not rounded:
        return scores
    step = logits.shape[-1] ** 0.5 * torch.finfo(torch.float32).eps
    up = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    return scores + step * torch.where(up, 1.0, -1.0).to(scores.device)


def _logits_at(model: Any, inner: Any, batch: Call, rows: np.ndarray) -> Tensor:
    """Return the first row's logits at `rows`, from the end, ``(len(rows), vocabulary)``."""
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    kept = False

    def keep(_module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        nonlocal kept
        if inputs and torch.is_tensor(inputs[0]) and inputs[0].dim() == 3:
            kept = True
            return (inputs[0][:, rows], *inputs[1:])
        return None

    with ExitStack() as stack:
        if isinstance(head, nn.Module):
            stack.enter_context(head.register_forward_pre_hook(keep))
        logits = _logits_of(model(**batch))
    return (logits if kept else logits[:, rows])[0].float()


def _logits_of(output: Any) -> Tensor:
    return output if torch.is_tensor(output) else getattr(output, "logits", output[0])


def _gradient_difference(
    model: nn.Module, inner: nn.Module, probe: Probe, collate: PackedCollator
) -> float:
    """Return how far gradients of B's loss in the first row are, relative to the largest."""
    row = [
        d if d is probe.document else {**d, "labels": np.full_like(d["input_ids"], IGNORE_INDEX)}
        for d in probe.packed[0].documents
    ]
    alone = _alone_batch(inner, collate, probe.document)
    packed = collate_probe(inner, collate, row)
    with use_native_attention(inner):
        expected = _loss_gradients(model, inner, alone, alone["input_ids"])
    found = _loss_gradients(model, inner, packed, packed.pop("labels"))
    errors = [_furthest([x], y) for x, y in zip(found, expected, strict=True)]
    largest = max((float(gradient.abs().max()) for gradient in expected), default=0.0)
    # np.max, unlike max, keeps a difference that is no number.
    return float(np.max([0.0, *errors])) / (largest or 1.0)


@torch.enable_grad()
def _loss_gradients(
    model: nn.Module, inner: nn.Module, batch: Call, labels: Tensor
) -> Sequence[Tensor]:
    """Return the gradients of the loss; those of parameters that it does not reach are zero."""
    trained = [parameter for parameter in inner.parameters() if parameter.requires_grad]
    with restore_state(inner):
        loss = next_token_loss(_logits_of(model(**batch)), labels)
        # Inside the block, whose end writes buffers that the backward may read.
        return torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
