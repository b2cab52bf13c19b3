"""Is document B untouched by document A on this very model? Measured, never assumed.

    alone          [B]           as the model runs it without any packing: the reference
    packed         [A, B]        as it will be trained; also with A of other tokens, other length
    contaminated   [A · B]       the same row as one document: what a leak looks like

    difference  = max |packed − alone|          over the logits of B
    noise       = spread of B alone over layouts that cannot matter; a packed row of B alone is one
                  of them, but counts for no more than 1 % of a leak: a packed kernel that computes
                  something else must not pass for rounding
    leak        = max |contaminated − alone|

B is isolated if the difference is within 4 × noise and at most 1 % of the leak. It leaks if the
difference is above the noise. A leak that would not rise above the noise proves nothing: the check
is then inconclusive, unless changing A's tokens leaves B identical to the last bit.

Probes reach as far as the data: some rope variants look at the longest position of the whole batch,
so a short probe passes on a model that a long document contaminates (by 5.0, Phi-3 longrope).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.collator import PackedCollator

NOISE_FACTOR = 4.0
LEAK_SHARE = 0.01

# Positions of B that are compared: its first ones, where a leak is strongest, and its last ones.
_POSITIONS = 32


@dataclass(frozen=True)
class IsolationReport:
    """The verdict on a model: ``"isolated"``, ``"leaks"`` or ``"inconclusive"``, and its evidence.

    Differences are of logits, in the probe that decided. True if isolated.
    """

    verdict: str
    difference: float
    noise: float
    leak: float
    probe: str
    model: str
    attention: str
    mode: str

    def __bool__(self) -> bool:
        return self.verdict == "isolated"

    def __str__(self) -> str:
        words = {
            "isolated": "documents are isolated",
            "leaks": "documents LEAK into each other",
            "inconclusive": "isolation could not be shown",
        }
        return (
            f"{words[self.verdict]}: {self.model}, {self.attention}, {self.mode} mode, {self.probe}: "
            f"max |Δlogit| {self.difference:.2g} (noise {self.noise:.2g}, a leak would be "
            f"{self.leak:.2g})"
        )


class _Probe(NamedTuple):
    name: str
    before: list[np.ndarray]  # documents to put before B, of two contents and two lengths
    document: np.ndarray  # B


@torch.no_grad()
def check_isolation(
    model: nn.Module,
    documents: Sequence[Sequence[int] | np.ndarray] = (),
    *,
    training: bool | None = None,
    max_length: int = 1024,
    attention: str | None = None,
) -> IsolationReport:
    """Return whether packed documents see each other on `model`, and by how much.

    `model` is called as a training step calls it; it may be wrapped (DDP, PEFT) and need not come
    from transformers. `documents` are token ids that the run will train on: probes are then as long
    as the longest of them. Without documents, probes cross every length constant of the config below
    `max_length`. `training` is the mode to check, by default the model's; `attention` is named in
    the report.

    The model, its buffers, its mode and all random number generators are left as they were.
    """
    inner = _unwrapped(model)
    with _undisturbed(model, inner, training):
        reports = [
            _judge(_run(model, inner, probe), probe.name, inner, attention, model.training)
            for probe in _probes(inner, documents, max_length)
        ]
    order = ("leaks", "inconclusive", "isolated")
    return min(reports, key=lambda r: (order.index(r.verdict), -r.difference))


# --- probes --------------------------------------------------------------------------------------


def _probes(
    model: nn.Module, documents: Sequence[Sequence[int] | np.ndarray], max_length: int
) -> list[_Probe]:
    rng = np.random.default_rng(0)
    draw = _random_tokens(model, rng)
    probes = [_Probe("short documents", [draw(23), draw(23), draw(11)], draw(17))]
    given = sorted((np.asarray(d, dtype=np.int64) for d in documents if len(d)), key=len)
    if given:
        longest, other = given[-1], given[len(given) // 2]
    else:
        reach = [c for c in length_constants(model) if c < max_length]
        if not reach:
            return probes
        longest, other = draw(max(reach) + 7), draw(19)
    probes.append(_Probe(f"after {len(longest):,} tokens", [longest, draw(len(longest))], other))
    probes.append(_Probe(f"of {len(longest):,} tokens", [draw(13)], longest))
    return probes


def length_constants(model: nn.Module) -> list[int]:
    """Return the lengths at which the config makes a model behave differently, ascending."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {getattr(text, name, None) for name in _LENGTH_FIELDS}
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    found |= {settings.get("original_max_position_embeddings") for settings in nested}
    return sorted(int(c) for c in found if isinstance(c, (int, float)) and c > 0)


_LENGTH_FIELDS = (
    "sliding_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
    "floor_scale",
    "max_position_embeddings",
)


def _random_tokens(model: nn.Module, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(embeddings, "num_embeddings", None) or next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2
    )
    # An image token without an image is an error in vision-language models.
    config = getattr(model, "config", None)
    special = {v for k, v in vars(config).items() if k.endswith("token_id")} if config else set()
    usable = np.setdiff1d(np.arange(size), [i for i in special if isinstance(i, int)])
    usable = usable if len(usable) > 1 else np.arange(size)
    return lambda length: rng.choice(usable, length).astype(np.int64)


# --- measuring -----------------------------------------------------------------------------------


class _Measured(NamedTuple):
    alone: list[Tensor]  # as the model runs without packing, in layouts that cannot matter
    packed_alone: Tensor
    packed: list[Tensor]
    contaminated: list[Tensor]


def _run(model: nn.Module, inner: nn.Module, probe: _Probe) -> _Measured:
    """Run every layout of a probe; each result is B's logits ``(positions, vocabulary)`` float32."""
    document, collate = probe.document, PackedCollator()
    device = next(inner.parameters()).device
    chosen = _compared_positions(len(document))

    def logits(batch: dict[str, Any]) -> Tensor:
        # Positions count from the end: prompt-learning wrappers put tokens in front.
        total = batch.pop("_total", len(document))
        rows = [p - total for p in (chosen + total - len(document)).tolist()]
        batch.pop("labels", None)
        moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        return _logits_at(model, inner, moved, rows)

    def packed(documents: list[np.ndarray]) -> Tensor:
        batch = collate([{"input_ids": d} for d in documents])
        return logits(batch | {"_total": sum(map(len, documents))})

    ids = torch.from_numpy(document)[None]
    alone = [{"input_ids": ids, "use_cache": False}]
    if probe.name == "short documents":
        alone.append({"input_ids": ids.repeat(2, 1), "use_cache": False})
        alone.append(alone[0] | {"attention_mask": torch.ones_like(ids)})
    return _Measured(
        alone=[logits(dict(batch)) for batch in alone],
        packed_alone=packed([document]),
        packed=[packed([before, document]) for before in probe.before],
        contaminated=[packed([np.concatenate([b, document])]) for b in probe.before[:2]],
    )


def _compared_positions(length: int) -> np.ndarray:
    positions = np.arange(length)
    if length <= 2 * _POSITIONS:
        return positions
    return np.concatenate([positions[:_POSITIONS], positions[-_POSITIONS:]])


def _logits_at(
    model: nn.Module, inner: nn.Module, batch: dict[str, Any], rows: list[int]
) -> Tensor:
    """Return the first row's logits at positions `rows` (negative), computing no others."""
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
            stack.callback(head.register_forward_pre_hook(keep).remove)
        output = model(**batch)
    logits = output if torch.is_tensor(output) else getattr(output, "logits", None)
    logits = output[0] if logits is None else logits
    return (logits if kept else logits[:, rows])[0].float()


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
    of_kernel = min(_distance(measured.packed_alone, alone), LEAK_SHARE * leak)
    noise = max(resolution, of_kernel, *(_distance(x, alone) for x in measured.alone))
    difference = max(_distance(x, alone) for x in (measured.packed_alone, *measured.packed))
    same_bits = (
        len(measured.contaminated) > 1
        and torch.equal(measured.packed[0], measured.packed[1])
        and not torch.equal(measured.contaminated[0], measured.contaminated[1])
    )
    if not difference <= NOISE_FACTOR * noise:  # also if it is not a number
        verdict = "leaks"
    elif difference <= LEAK_SHARE * leak or same_bits:
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


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# --- leaving no trace ----------------------------------------------------------------------------


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, torch.compile and PEFT."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and not hasattr(model, "config"):
            inner = getattr(model, "module", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None:
            return model
        model = inner


@contextmanager
def _undisturbed(
    model: nn.Module, inner: nn.Module, training: bool | None
) -> Iterator[None]:
    """Set the mode, turn every random thing off, and put all state back in the end."""
    modes = [(module, module.training) for module in model.modules()]
    if training is not None:
        model.train(training)
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(_state_restored(model))
        stack.enter_context(_without_autocast(inner))
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, float) and _sets_chance(module, name):
                    setattr(module, name, 0.0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            for module, mode in modes:
                module.training = mode


def _sets_chance(module: nn.Module, attribute: str) -> bool:
    """Whether a float attribute says how much chance takes part (dropout, jitter, NEFTune)."""
    if attribute == "p":
        return "Drop" in type(module).__name__
    return any(word in attribute for word in ("drop", "jitter", "neftune_noise_alpha"))


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers (rope frequencies, statistics) and plain attributes of all modules."""
    simple = (int, float, bool, str, type(None))
    saved = [
        (
            module,
            {k: v for k, v in vars(module).items() if isinstance(v, simple)},
            {k: None if b is None else b.clone() for k, b in module._buffers.items()},
            dict(module._buffers),
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, values, buffers in saved:
            vars(module).update(attributes)
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffer.copy_(values[name])
                module._buffers[name] = buffer


@contextmanager
def _without_autocast(inner: nn.Module) -> Iterator[None]:
    """Run a float32 model in float32: a leak then stands far above the noise.

    accelerate puts autocast into `forward` and keeps the original. FlashAttention needs half
    precision, so its models are left as they are.
    """
    original = getattr(inner, "_original_forward", None)
    implementation = getattr(getattr(inner, "config", None), "_attn_implementation", None) or ""
    if original is None or "flash" in implementation or "varlen" in implementation:
        yield
        return
    wrapped = inner.forward
    inner.forward = original  # type: ignore[method-assign]
    try:
        yield
    finally:
        inner.forward = wrapped  # type: ignore[method-assign]
