"""Memory and time of one device of a run on M devices, estimated before any is rented.

    the model's layers    run on tensors without data   →  `Model`: bytes kept, operations, heads
    the planned epoch     its largest micro-batch       →  tokens of its documents
    a way to hold a row   on N ranks, or in chunks      →  `on_device`: GB and seconds

Computed in bf16, as FSDP2 and ZeRO-3 do; autocast of float32 weights keeps more. Left out:
temporaries, latency, what FSDP sends, and ranks that wait.
"""

import math
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, AutoModelForCausalLM

from trl_packing.attention.backends import AttentionChoice, divide_rows
from trl_packing.attention.document_sdpa import document_attention
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.model_facts import config_of, loading_options, unwrap_peft
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.run.run import Run
from trl_packing.run.what_if import RunPlan, plan_run

Estimate: TypeAlias = dict[str, Any]  # what a device needs, in GB and seconds, by name

_ATTENTION = "packed_shapes"  # of models that run without data
_TOKENS = 61  # of their row; no weight has a dimension of that size
_TILE = 4 * 4096 * 32768  # bytes of TRL's logits and their gradients (1.16)
_CHUNK = 2048  # tokens in memory, where the run has no chunks

_TEXT = """Estimated for one of {devices} devices and the largest micro-batch; no GPU was used.
model        {name} · {parameters:,} weights, {trained:,} trained
setting      {setting}
micro-batch  {tokens:,} tokens · documents of up to {longest:,}
weights      {weights:,.1f} GB with gradients and AdamW, sharded over {shards} (FSDP2, ZeRO-3)
gathered     {gathered:,.1f} GB: embeddings, head and two layers, in bf16
activations  {activations:,.1f} GB in bf16, gradient_checkpointing={recomputes}
exchange     {exchange:,.1f} GB in a layer: 1/N of the heads of a row, sent and received
logits       {logits:,.1f} GB: a tile, and the head's gradient in float32
traffic      {traffic_of_token:,.0f} bytes a layer and token, {traffic:,.1f} GB a micro-batch in all
compute      {operations:.2e} operations at {tflops:g} TFLOP/s (--speed)

                              memory  micro-batch  GPU time, a million tokens
{table}
Cheapest in {memory:g} GB (--memory): {best}.
{inside:g} GB/s between devices of a node, {between:g} for N > 8 (--speed). Left out:
temporaries, latency, what FSDP sends, what autocast of float32 weights adds."""
_WAY = "{setting:27} {total:6,.0f} GB {seconds:10,.2f} s {cost:12,.0f} s"


@dataclass(frozen=True)
class Model:
    """What a model needs in training.

    Attributes:
        name: its class.
        parameters: the number of its weights.
        trained: how many of them are trained.
        state: bytes of weights, gradients and AdamW's moments.
        gathered: bytes that FSDP2 and ZeRO-3 gather at once, with gradients.
        kept: bytes of a token that autograd keeps in all layers.
        inputs: bytes of a token that all layers get.
        forward: operations of a token in products with weights; `backward` likewise.
        backward: as `forward`.
        head: weights of the head.
        trains_head: whether they are trained.
        recomputes: whether layers run their forward again in the backward.
        layers: heads of queries and keys, their widths, and the window of each.
    """

    name: str
    parameters: int
    trained: int
    state: int
    gathered: int
    kept: float
    inputs: int
    forward: float
    backward: float
    head: int
    trains_head: bool
    recomputes: bool
    layers: list[Any]


@dataclass(frozen=True)
class Machine:
    """M devices: GB of each, TFLOP/s reached, GB/s sent in a node and between nodes."""

    devices: int
    memory: float
    tflops: float
    inside: float
    between: float


def model_of(run: Run) -> Model:
    """Return what the model of `run` needs, of its config alone: no weights are loaded.

    Raises:
        ValueError: it cannot be estimated.
    """
    layers: list[Any] = []
    kept: dict[Any, int] = {}

    def attend(_module, query, key, value, *_, **options):
        heads = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        layers.append((*heads, options.get("sliding_window")))
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        boundaries = torch.zeros(2, dtype=torch.int32)
        return document_attention(query, key, value, boundaries, KernelOptions(1.0))[None], None

    def keep(tensor):
        if _TOKENS in tensor.shape:
            storage = tensor.untyped_storage()
            kept[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    AttentionInterface.register(_ATTENTION, attend)
    model = _without_data(run)
    base = unwrap_peft(model)
    parameters = base.num_parameters()
    trained = base.num_parameters(only_trainable=True)
    # Gradients and moments have the type of their weight.
    state = sum(weight.nbytes * (1 + 3 * weight.requires_grad) for weight in model.parameters())
    head = base.get_output_embeddings()
    size = head.weight.numel()
    table = size * (2 - base.config.tie_word_embeddings)
    model.bfloat16()
    try:
        with (
            FakeTensorMode(allow_non_fake_inputs=True),
            FlopCounterMode(display=False) as counter,
            saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            model.to_empty(device="cpu")
            ids = torch.zeros(1, _TOKENS, dtype=torch.long)
            hidden = base.base_model(ids, use_cache=False).last_hidden_state
            forward = counter.get_total_flops() / _TOKENS
            hidden.sum().backward()
        number = len(layers)
        is_known = number == base.config.get_text_config().num_hidden_layers
        if not is_known or not 0.9 < forward / (parameters - table) / 2 < 1.01:
            raise TypeError("other layers")
    except Exception as error:
        raise ValueError(
            f"{type(base).__name__} cannot be estimated: not every layer has attention and "
            "matrices that all tokens pass (recurrent layers, a mixture of experts); "
            "trl-packing plan plans it without an estimate"
        ) from error
    return Model(
        type(base).__name__,
        parameters,
        trained,
        state,
        gathered=2 * (1 + head.weight.requires_grad) * (table + 2 * (parameters - table) // number),
        kept=sum(kept.values()) / _TOKENS,
        inputs=hidden.nbytes // _TOKENS * (number + 3),  # and the last norm, in float32 and bf16
        forward=forward,
        backward=counter.get_total_flops() / _TOKENS - forward,
        head=size,
        trains_head=head.weight.requires_grad,
        recomputes=run.args.gradient_checkpointing,
        layers=layers,
    )


def _without_data(run: Run) -> Any:
    """Return the model of a run on the meta device, with its adapters."""
    call, args, options = run.call, run.args, run.options
    config = deepcopy(config_of(call.model, args))
    dtype = (args.model_init_kwargs or {}).get("dtype") or getattr(call.model, "dtype", None)
    dtype = config.dtype if dtype == "auto" else dtype
    limit = options.max_tokens_per_micro_batch
    adapter = call.peft_config or getattr(call.model, "active_peft_config", None)
    quantized = call.quantization_config or hasattr(config, "quantization_config")
    problems = {
        "quantization_config (load_in_4bit)": quantized,
        "images": run.images.packs,
        f"prefix_sharing={options.prefix_sharing}": options.prefix_sharing != "off",
        f"max_tokens_per_micro_batch={limit}": limit,
        f"optim={args.optim.value}": not args.optim.value.startswith("adamw_torch"),
        "virtual tokens": getattr(adapter, "is_prompt_learning", False),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(
                f"{problem} cannot be estimated; leave that out, or plan the run without an "
                "estimate (trl-packing plan)"
            )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if "16" in str(dtype) else torch.float32,
            attn_implementation=_ATTENTION,
            trust_remote_code=loading_options(args)["trust_remote_code"],
        )
        kernel = AttentionChoice("documents", None, "")
        divide_rows(model, [kernel], options.sequence_parallel_size)
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, deepcopy(adapter))
    return model.train()


def on_device(
    model: Model, lengths: np.ndarray, trained: int, machine: Machine, ranks: int, chunk: int = 0
) -> Estimate:
    """Return GB, operations and seconds of a device for a micro-batch.

    Args:
        model: whole on the device in chunks, else sharded over all.
        lengths: tokens of its documents, ``(documents,)``.
        trained: its trained tokens.
        machine: the devices.
        ranks: of a row, N.
        chunk: max_tokens_in_memory; 0 for all.
    """
    tokens, number = int(lengths.sum()), len(model.layers)
    share = tokens / ranks
    extra = past = attended = sent = exchange = 0.0
    for queries, keys, key_width, value_width, window in model.layers:
        width = key_width + value_width
        seen = np.minimum(lengths, window or lengths)
        attended += queries * width * float(((2 * lengths - seen) * seen).sum())  # causal: half
        past += 6 * keys * width  # in bf16, with gradients in float32
        if ranks > 1:
            repeated = math.lcm(keys, ranks)  # fewer keys than ranks
            extra += 2 * ((repeated - keys) * width + queries * value_width)
            sent += 2 * (queries + repeated) * width * (ranks - 1) / ranks
            exchange = max(exchange, 4 * (queries + repeated) * width * share)
    again = float(model.recomputes)
    kept = (model.kept + extra) * share
    setting, shards = f"sequence_parallel_size={ranks}", machine.devices
    if chunk:
        setting, shards = f"max_tokens_in_memory={chunk}", 1
        longer = lengths[lengths > chunk]
        again = float((longer - chunk).sum()) / tokens
        kept = model.kept * min(chunk, tokens) + past * int(longer.max(initial=0))
    elif again:
        kept = kept / number + model.inputs * share
    # The backward of attention has 5 products, the forward 2; the head computes its forward twice.
    operations = ((1 + again) * model.forward + model.backward) * tokens
    operations += (3.5 + again) * attended
    operations += 2 * (3 + model.trains_head) * model.head * trained
    traffic = sent * share * (2 + again)
    speed = machine.inside if ranks <= 8 else machine.between
    seconds = operations / ranks / machine.tflops / 1e12 + traffic / speed / 1e9
    sizes = {
        "weights": model.state / shards,
        "gathered": model.gathered * (shards > 1),
        "activations": kept,
        "exchange": exchange,
        "logits": _TILE + 4 * model.head * model.trains_head,
    }
    found: Estimate = {name: size / 1e9 for name, size in sizes.items()}
    return found | {
        "setting": setting,
        "ranks": ranks,
        "shards": shards,
        "total": sum(found.values()),
        "traffic_of_token": sent / number,
        "traffic": traffic / 1e9,
        "operations": operations / ranks,
        "seconds": seconds,
        "cost": seconds / share * 1e6,
    }


def estimate(run: Run, machine: Machine) -> tuple[RunPlan, Estimate]:
    """Return the plan of a run on all devices, and what one needs for its largest micro-batch.

    That is in GB and seconds, for the setting of the run and, as `ways`, for others.

    Raises:
        ValueError: the machine or the model cannot be estimated, or a group would lack devices.
    """
    size, chunk = run.options.sequence_parallel_size, run.options.max_tokens_in_memory or 0
    if not all(0 < value < math.inf for value in asdict(machine).values()):
        raise ValueError(
            f"--gpus, --memory and --speed must be finite numbers above 0, not {machine}"
        )
    if machine.devices % size:
        raise ValueError(
            f"--gpus {machine.devices} counts all processes: give a multiple of "
            f"sequence_parallel_size={size}"
        )
    model = model_of(run)  # refused before all data are prepared
    plan = plan_run(run, ranks=machine.devices // size)
    epoch, documents = plan.epoch, plan.documents
    largest = np.asarray(epoch.members[np.lexsort((epoch.costs, epoch.tokens))[-1]])
    lengths = documents.lengths()[largest]
    if SEQ_LENGTHS in documents.columns:  # rows that were packed before
        lengths = np.concatenate([documents[row][SEQ_LENGTHS] for row in largest.tolist()])
    batch = model, lengths, int(documents.num_trained()[largest].sum()), machine
    ways = [on_device(*batch, 1, chunk or _CHUNK)]
    most = math.gcd(machine.devices, model.layers[0][0])
    for ranks in range(1, most + 1):
        if most % ranks == 0:
            ways.append(on_device(*batch, ranks))
    fit = [way for way in ways if way["total"] <= machine.memory]
    best = min(fit, key=lambda way: way["cost"], default={"setting": "nothing fits"})
    return plan, {
        **asdict(model),
        **asdict(machine),
        **on_device(*batch, size, chunk),
        "tokens": int(lengths.sum()),
        "longest": int(lengths.max()),
        "best": best["setting"],
        "ways": ways,
    }


def as_text(found: Estimate) -> str:
    """Return the lines to print of an estimate."""
    ways = "\n".join(_WAY.format(**way) for way in found["ways"])
    return _TEXT.format(**found, table=ways)
