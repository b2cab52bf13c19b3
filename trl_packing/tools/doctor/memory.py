"""Judges the memory of a run against the device: what fits, and with which settings.

states + activations without gradient checkpointing  ≤ device    turn it off: a step computes less
states + activations with it                         ≤ device    it is needed
neither                                                          training would fail: ways out
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch

from trl_packing.models.flops import NotCountable, model_flops
from trl_packing.tools.doctor.findings import Finding, Section
from trl_packing.tools.doctor.machine import Device
from trl_packing.tools.doctor.step_memory import (
    NotSimulated,
    StateMemory,
    StepMemory,
    meta_model,
    state_memory,
    step_memory,
)

# The part of a GPU that a step can use: the rest is CUDA's context, and fragmentation.
_USABLE = 0.92


@dataclass(frozen=True)
class RunMemory:
    """Memory of a run on one device.

    Attributes:
        model: class of the model.
        states: parameters, gradients and optimizer.
        without: a step without gradient checkpointing; None if it cannot be computed.
        with_checkpointing: a step with it.
        recomputed: share of the operations of a step that gradient checkpointing adds, of the
            whole step.
        fitting_tokens: tokens of a micro-batch that fit without it; None if it cannot be computed.
        patches: bytes that 1,000 patches of images add with gradient checkpointing; None without a
            vision tower.
        unknown: why activations cannot be computed; empty if they can.
    """

    model: str
    states: StateMemory
    without: StepMemory | None
    with_checkpointing: StepMemory | None
    recomputed: float
    fitting_tokens: int | None
    patches: int | None = None
    unknown: str = ""

    def facts(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def run_memory(
    config: Any, args: Any, device: Device, *, lora: Any = None, dtype: Any = None
) -> RunMemory:
    """Return the memory of a run.

    Args:
        config: of the model.
        args: the settings of the run.
        device: its memory decides how many tokens fit.
        lora: a `LoraConfig`, or None.
        dtype: of the weights.
    """
    model = meta_model(config, dtype=dtype, lora=lora)
    optimizer = str(getattr(args.optim, "value", args.optim))
    states = state_memory(model, optimizer)
    autocast = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    if autocast == torch.float16 and device.kind == "cpu":
        autocast = None
    options: dict[str, Any] = {
        "autocast": autocast,
        "optimizer": optimizer,
        "accumulates": args.gradient_accumulation_steps > 1,
    }
    tokens = tokens_of(args)
    without = kept = None
    unknown, fitting = "", None
    try:
        without = step_memory(model, tokens, gradient_checkpointing=False, **options)
        kept = step_memory(model, tokens, gradient_checkpointing=True, **options)
        half = step_memory(model, max(tokens // 2, 1), gradient_checkpointing=False, **options)
        fitting = _fitting_tokens(half, without, device)
    except NotSimulated as error:
        unknown = str(error)
    return RunMemory(
        model=type(model.get_base_model() if lora else model).__name__,
        states=states,
        without=without,
        with_checkpointing=kept,
        recomputed=recomputed_share(model),
        fitting_tokens=fitting,
        patches=_bytes_of_patches(config, 2 if autocast else (dtype or torch.float32).itemsize),
        unknown=unknown,
    )


def _bytes_of_patches(config: Any, itemsize: int) -> int | None:
    """Return the bytes of 1,000 patches in the inputs of all layers of the vision tower."""
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return None
    width = getattr(vision, "embed_dim", None) or getattr(vision, "hidden_size", None)
    return 1000 * (width or 0) * getattr(vision, "num_hidden_layers", 0) * itemsize or None


def tokens_of(args: Any) -> int:
    """Return the most tokens of a micro-batch: its bins, or its documents, times max_length."""
    return args.per_device_train_batch_size * (args.max_length or 1024)


def recomputed_share(model: Any) -> float:
    """Return the share of a step that recomputes layers, in operations, under checkpointing.

    A forward costs 1, its backward 2: with all weights trained a quarter of a step is recomputed,
    with few of them (LoRA) a third.
    """
    frozen = copy.deepcopy(model)
    for parameter in frozen.parameters():
        parameter.requires_grad = False
    try:
        forward, step = model_flops(frozen).per_token, model_flops(model).per_token
    except NotCountable:
        return 0.25
    return forward / (step + forward)


def _fitting_tokens(half: StepMemory, whole: StepMemory, device: Device) -> int | None:
    """Return the tokens at which a step without checkpointing fills the device."""
    room, slope = usable(device), (whole.peak - half.peak) / max(whole.tokens - half.tokens, 1)
    if room is None or slope <= 0:
        return None
    return max(int(whole.tokens + (room - whole.peak) / slope), 0)


def usable(device: Device) -> int | None:
    """Return the bytes that a step can use; None if the memory of the device is not known."""
    if device.total_bytes is None:
        return None
    # A CPU shares its memory with everything that runs now.
    if device.kind == "cpu":
        return device.free_bytes
    return int(_USABLE * device.total_bytes)


# --- findings -------------------------------------------------------------------------------------


def memory_section(memory: RunMemory, args: Any, devices: tuple[Device, ...]) -> Section:
    """Return the arithmetic and its consequences."""
    states, without, kept = memory.states, memory.without, memory.with_checkpointing
    findings = _states(states, str(getattr(args.optim, "value", args.optim)))
    if without is None or kept is None:
        findings.append(Finding("note", "activations", f"not counted: {memory.unknown}"))
        findings += _states_fit(states, devices)
    else:
        for name, step in (("without", without), ("with", kept)):
            text = f"{_gb(step.peak - states.total)}, so {_gb(step.peak)} at most, {name} gradient"
            findings.append(Finding("ok", "activations", f"{text} checkpointing"))
        findings.append(_verdict(memory, without, kept, args, devices))
    if memory.patches:
        each = f"1,000 patches of images keep at least {_gb(memory.patches)}"
        text = f"not counted: {each} with gradient checkpointing (docs/images.md)"
        findings.append(Finding("note", "images", text))
    tokens = f"{tokens_of(args):,} tokens a micro-batch"
    return Section("Memory", tuple(findings), f"{memory.model}, {tokens}, one device, computed")


def _states(states: StateMemory, optimizer: str) -> list[Finding]:
    some = states.num_trained < states.num_parameters
    trained = f"{states.num_trained / 1e6:,.1f} M" if some else "all"
    weights = f"{states.num_parameters / 1e6:,.1f} M, {trained} trained"
    found = [
        Finding("ok", "parameters", f"{_gb(states.parameters)} ({weights})"),
        Finding("ok", "gradients", _gb(states.gradients)),
    ]
    if states.optimizer is None:
        text = f"not counted: the states of optim={optimizer!r} are not known here"
        return [*found, Finding("note", "optimizer", text)]
    return [*found, Finding("ok", "optimizer", f"{_gb(states.optimizer)} ({optimizer})")]


_WAYS_OUT = (
    "train an adapter (--use_peft), shard the model over more devices "
    "(recipes/accelerate/fsdp2.yaml), or take a smaller model"
)


def _states_fit(states: StateMemory, devices: tuple[Device, ...]) -> list[Finding]:
    """Return a failure if what does not depend on the micro-batch fits nowhere."""
    room = usable(devices[0])
    if room is None or states.total <= room * len(devices):
        return []
    text = f"{_gb(states.total)} do not fit into {_gb(room * len(devices))}; {_WAYS_OUT}"
    return [Finding("fail", "memory", text)]


def _verdict(
    memory: RunMemory, without: StepMemory, kept: StepMemory, args: Any, devices: tuple[Device, ...]
) -> Finding:
    """Return which step fits, and the settings that follow."""
    room, total = usable(devices[0]), memory.states.total
    if room is None:
        return Finding("note", "fits", "the memory of the device is not known")
    here, is_on = (
        f"the {_gb(room)} that this {devices[0].kind} can use",
        args.gradient_checkpointing,
    )
    fits = ""
    if memory.fitting_tokens:
        fits = f"; up to {memory.fitting_tokens:,} tokens a micro-batch fit without it"
    if without.peak <= room and is_on:
        text = (
            f"gradient checkpointing is not needed within {here}: set --gradient_checkpointing "
            f"False. TRL turns it on, and {memory.recomputed:.0%} of a step's operations are then "
            f"recomputation{fits}"
        )
        return Finding("note", "advice", text)
    if without.peak <= room:
        return Finding("ok", "fits", f"into {here}, without gradient checkpointing{fits}")
    if kept.peak <= room and is_on:
        return Finding("ok", "fits", f"into {here}; gradient checkpointing is needed{fits}")
    if kept.peak <= room:
        text = f"{_gb(without.peak)} do not fit into {here}; set --gradient_checkpointing True"
        return Finding("fail", "memory", text + fits)
    each = total // len(devices) + kept.peak - total
    if len(devices) > 1 and each <= room:
        text = (
            f"one device can use {_gb(room)}: shard the model over all {len(devices)} "
            f"(recipes/accelerate/fsdp2.yaml), about {_gb(each)} each, with gradient checkpointing"
        )
        return Finding("note", "advice", text)
    smaller = "set a smaller --per_device_train_batch_size or --max_length, " * (total < room)
    text = f"{_gb(kept.peak)} do not fit into {here}, even with gradient checkpointing; "
    return Finding("fail", "memory", f"{text}{smaller}{_WAYS_OUT}")


def _gb(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 1e9:,.2f} GB"
