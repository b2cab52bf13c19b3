"""Is document B untouched by document A on this very model? Measured, never assumed.

    alone          [B]           as the model runs it without any packing: the reference
    packed         [A, B]        as it will be trained; also with A of other tokens, other length
    contaminated   [A · B]       the same row as one document: what a leak looks like

    difference  = max |packed − alone|          over what the model says of B
    noise       = spread of B alone over layouts that cannot matter, and over a run in which the
                  output of every module is rounded otherwise: what another kernel, or the order of
                  a sum, may do at this depth and precision
    leak        = max |contaminated − alone|

B is isolated if the difference is within 4 × noise and at most 1 % of the leak. It leaks if the
difference is above the noise. A leak that would not rise above the noise proves nothing: the check
is then inconclusive, unless changing A's tokens leaves B identical to the last bit.

Probes reach as far as the data: some rope variants look at the longest position of the whole batch,
so a short probe passes on a model that a long document contaminates (by 5.0, Phi-3 longrope).
"""

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.collator import PackedCollator
from trl_packing.labels import IGNORE_INDEX

NOISE_FACTOR = 4.0
LEAK_SHARE = 0.01

# Positions of B that are compared: its first ones, where a leak is strongest, and its last ones.
_POSITIONS = 32


@dataclass(frozen=True)
class IsolationReport:
    """The verdict on a model: ``"isolated"``, ``"leaks"`` or ``"inconclusive"``, and its evidence.

    Differences are of logits (with `fused_head`: of log-probabilities and entropies), in the probe
    that decided. True if isolated.
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
            f"{words[self.verdict]}: {self.model}, {self.attention}, {self.mode} mode, "
            f"{self.probe}: max |Δ| {self.difference:.2g} (noise {self.noise:.2g}, a leak would be "
            f"{self.leak:.2g})"
        )


_SHORT = "short documents"

# Fewer tokens than these say little about attention: the first one sees only itself.
_MIN_TOKENS = 17
_SHORT_ROOM = 40


class _Probe(NamedTuple):
    name: str
    before: list[list[np.ndarray]]  # documents to put before B, of two contents and two lengths
    document: np.ndarray  # B
    room: int  # tokens that one document may have: learned positions end somewhere


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
) -> IsolationReport:
    """Return whether packed documents see each other on `model`, and by how much.

    `model` is called as a training step calls it; it may be wrapped (DDP, PEFT) and need not come
    from transformers. `documents` are token ids that the run will train on: probes are then as long
    as the longest and as short as the shortest of them. Without documents, probes cross every
    length constant of the config below `max_length`. `training` is the mode to check, by default
    the model's; `attention` is named in the report. `fused_head` runs packed rows through TRL's
    fused LM head, as `SFTTrainer` trains, and compares log-probabilities and entropies with those
    of the model's own logits. `collator` makes the packed rows; give the one that the run uses.

    The model, its buffers, its mode and all random number generators are left as they were.
    """
    inner = _unwrapped(model)
    with _undisturbed(model, training):
        reports = [
            _judge(
                _run(model, inner, probe, fused_head, collator or PackedCollator()),
                probe.name,
                inner,
                attention,
                model.training,
            )
            for probe in _probes(inner, documents, max_length)
        ]
    order = ("leaks", "inconclusive", "isolated")
    return min(reports, key=lambda r: (order.index(r.verdict), -r.difference))


# --- probes -----------------------------------------------------------------------------------


def _probes(
    model: nn.Module, documents: Sequence[Sequence[int] | np.ndarray], max_length: int
) -> list[_Probe]:
    rng = np.random.default_rng(0)
    draw = _random_tokens(model, rng)
    probes = [_Probe(_SHORT, [[draw(23)], [draw(23)], [draw(11)]], draw(_MIN_TOKENS), _SHORT_ROOM)]
    given = sorted((np.asarray(d, dtype=np.int64) for d in documents), key=len)
    if given and len(given[-1]) > 1:
        longest = given[-1]
        # As short as the data has them: what tells the longest document's row from a short one's
        # shows beside a document on the other side of a threshold.
        least = max(_MIN_TOKENS, len(given[0]))
        other = next((d for d in given if len(d) >= least), longest)[:least]
    else:
        reach = [c for c in length_constants(model) if c < max_length]
        if given or not reach:
            return probes
        longest, other = draw(max(reach) + 7), draw(19)
    size = len(longest)
    # Contaminated, B continues what is before it, which takes room.
    room = max(size, _SHORT_ROOM)
    other, most = other[: room - 13], longest[: room - 13]
    probes.append(_Probe(f"after {size:,} tokens", [[longest], [draw(size)]], other, room))
    probes.append(_Probe(f"of {len(most):,} tokens", [[draw(13)]], most, room))
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
    if any("dynamic" in str(settings.get("rope_type")) for settings in nested):
        # Elsewhere nothing changes there, and learned positions end.
        found.add(getattr(text, "max_position_embeddings", None))
    return sorted(int(c) for c in found if isinstance(c, (int, float)) and c > 0)


_LENGTH_FIELDS = (
    "sliding_window",
    "attention_chunk_size",
    "original_max_position_embeddings",
    "floor_scale",
)


def _random_tokens(model: Any, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    embeddings = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    size = getattr(embeddings, "num_embeddings", None) or next(
        (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), 2
    )
    # An image token without an image is an error in vision-language models.
    config = getattr(model, "config", None)
    named = [v for k, v in vars(config).items() if k.endswith("token_id")] if config else []
    special = [i for v in named for i in (v if isinstance(v, (list, tuple)) else [v])]
    usable = np.setdiff1d(np.arange(size), [i for i in special if isinstance(i, int)])
    usable = usable if len(usable) > 1 else np.arange(size)
    return lambda length: rng.choice(usable, length).astype(np.int64)


# --- measuring --------------------------------------------------------------------------------


class _Measured(NamedTuple):
    alone: list[Tensor]  # as the model runs without packing, in layouts that cannot matter
    packed_alone: Tensor
    packed: list[Tensor]
    contaminated: list[Tensor]


def _run(
    model: nn.Module, inner: nn.Module, probe: _Probe, fused_head: bool, collate: PackedCollator
) -> _Measured:
    """Run every layout of a probe; each result is ``(positions of B, values)`` float32."""
    document = probe.document
    # Counted from the end, where B is: prompt-learning wrappers put tokens in front.
    rows = _compared_positions(len(document)) - len(document)

    def alone(ids: Tensor, **batch: Any) -> Tensor:
        batch |= {"input_ids": ids, "use_cache": False}
        if _requires(inner, "position_ids"):
            batch["position_ids"] = torch.arange(len(document)).expand(ids.shape)
        logits = _logits_at(model, inner, _on(inner, batch), rows)
        return _log_probs_and_entropy(logits, document[rows + 1]) if fused_head else logits

    def packed(*documents: np.ndarray) -> Tensor:
        batch = _on(inner, collate([{"input_ids": d} for d in documents]))
        labels = batch.pop("labels")
        here = rows - (labels.shape[1] - sum(map(len, documents)))  # before a tail of padding
        if not fused_head:
            return _logits_at(model, inner, batch, here)
        chosen = torch.zeros_like(labels, dtype=torch.bool)
        chosen[:, here + 1] = True
        output = model(
            **batch, labels=labels.masked_fill(~chosen, IGNORE_INDEX), fused_lm_head=True
        )
        return torch.stack([output.log_probs, output.entropy], -1)[output.label_mask].float()

    if fused_head:
        rows = rows[rows < -1]  # the last position of B predicts nothing
    ids = torch.from_numpy(document)[None]
    layouts = [alone(ids)]
    with _rounded_otherwise(inner):
        layouts.append(alone(ids))
    if probe.name == _SHORT:
        layouts.append(alone(ids.repeat(2, 1)))
        layouts.append(alone(ids, attention_mask=torch.ones_like(ids)))
    return _Measured(
        alone=layouts,
        packed_alone=packed(document),
        packed=[packed(*before, document) for before in probe.before],
        contaminated=[
            packed(np.concatenate([*before, document])[-probe.room :])
            for before in probe.before[: 2 if probe.name == _SHORT else 1]
        ],
    )


@contextmanager
def _rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Move every output of a module without children up or down by what summing it may round.

    Rounding grows with depth, and where it flips an expert's routing it is as large as a leak: the
    model itself shows how far another order of summation may take it.
    """
    generators: dict[torch.device, torch.Generator] = {}

    def move(module: nn.Module, _inputs: Any, output: Any) -> Any:
        if type(output) is not Tensor or not output.is_floating_point():
            return None
        device = output.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
        up = torch.rand(output.shape, generator=generator, device=device) < 0.5
        # A row of another length is summed in another order: n float32 terms, then one rounding.
        terms = getattr(module, "in_features", 1)
        step = max(torch.finfo(output.dtype).eps / 2, terms**0.5 * torch.finfo(torch.float32).eps)
        return output * (1 - step + 2 * step * up).to(output.dtype)

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.children(), None) is None:
                stack.callback(module.register_forward_hook(move).remove)
        yield


def _requires(model: nn.Module, argument: str) -> bool:
    """Whether `model.forward` cannot be called without `argument`."""
    parameter = inspect.signature(model.forward).parameters.get(argument)
    return parameter is not None and parameter.default is parameter.empty


def _on(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    return {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}


def _log_probs_and_entropy(logits: Tensor, targets: np.ndarray) -> Tensor:
    log_probs = logits.log_softmax(-1)
    at_target = log_probs.gather(-1, torch.from_numpy(targets).to(logits.device)[:, None])[:, 0]
    return torch.stack([at_target, -(log_probs.exp() * log_probs).sum(-1)], -1)


def _compared_positions(length: int) -> np.ndarray:
    positions = np.arange(length)
    if length <= 2 * _POSITIONS:
        return positions
    return np.concatenate([positions[:_POSITIONS], positions[-_POSITIONS:]])


def _logits_at(model: nn.Module, inner: Any, batch: dict[str, Any], rows: np.ndarray) -> Tensor:
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
    noise = max(resolution, *(_distance(x, alone) for x in measured.alone))
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


# --- leaving no trace -------------------------------------------------------------------------


def _unwrapped(model: Any) -> nn.Module:
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
def _undisturbed(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Set the mode, turn every random thing off, and put all state back in the end."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        # Probes of many lengths would use up a compiled model's recompilations.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_state_restored(model))
        stack.enter_context(_without_autocast(model))
        if training is not None:
            model.train(training)
        for holder in _state_holders(model):
            for name, value in vars(holder).items():
                if type(value) in (int, float) and _sets_chance(holder, name):
                    vars(holder)[name] = type(value)(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def _state_holders(model: nn.Module) -> list[Any]:
    """Return all modules and their configs: some models read their dropout there (gptj, falcon)."""
    modules = list(model.modules())
    configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
    return [*modules, *(c for c in configs.values() if hasattr(c, "__dict__"))]


def _sets_chance(holder: Any, attribute: str) -> bool:
    """Whether a number says how much chance takes part (dropout, jitter, NEFTune)."""
    if attribute == "p":
        return "Drop" in type(holder).__name__
    return any(word in attribute for word in ("drop", "jitter", "neftune_noise_alpha"))


@contextmanager
def _state_restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers (rope frequencies, statistics), modes and attributes of all modules."""
    attributes = [(holder, dict(vars(holder))) for holder in _state_holders(model)]
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for holder, values in attributes:
            vars(holder).update(values)
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer.copy_(value)


@contextmanager
def _without_autocast(model: nn.Module) -> Iterator[None]:
    """Run a float32 model in float32: a leak then stands far above the noise.

    accelerate puts autocast into `forward` and keeps the original. FlashAttention needs half
    precision, so its models are left as they are.
    """
    config = getattr(_unwrapped(model), "config", None)
    implementation = getattr(config, "_attn_implementation", None) or ""
    if "flash" not in implementation and "varlen" not in implementation:
        for module in model.modules():  # a PEFT or DDP wrapper may be the one
            if "_original_forward" in vars(module):
                vars(module)["forward"] = vars(module)["_original_forward"]
    yield  # `_state_restored` puts `forward` back
