"""Ten minutes on a machine with a GPU: what no CPU can say, checked and measured.

    python benchmarks/gpu.py --output benchmarks/results/gpu.md
    python benchmarks/gpu.py --dry-run        # the same code on a CPU, small, to test this script

    kernels     forward and backward of each kernel against attention in float64
    models      packed runs: the backend, seconds with the check, numbers against documents alone
    ranks       the same on two GPUs, if the machine has them
    blocks      what documents without tokens cost, as static_shapes makes them
    rows        host time of rows that all differ (a graph for each row would take 40 ms or more)
    prefixes    memory of a row whose branches see 180,000 keys
    steps       time, memory and waits of a step of ours against TRL's, full and with LoRA

Each part raises AssertionError where a number is wrong, and prints figures where it is right. Parts
that fail do not stop the others; the script then ends with status 1. TRL also runs FlashAttention 2
by the kernel that PyTorch has of it, without the package flash-attn. In a dry run, kernels of CPUs
stand in for those of GPUs, and no time is judged. Beside the package, it needs peft only.

The time is an estimate for one H100: half a minute for imports, two for kernels, models, blocks,
rows and prefixes, three for the seven runs of steps without a compiler, and up to three for the one
that compiles 28 layers.
"""

import argparse
import gc
import math
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import gpu_models
import numpy as np
import torch
from machine import provenance, publish, table
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention import document_sdpa, flash_attn, varlen
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys
from trl_packing.tools.doctor import tiny_llama

_ROUNDING = 8  # times the error of plain attention in the same dtype, against float64


class Machine(NamedTuple):
    """Where the parts run, how large they are, and what `resolve_attention` chooses there.

    `half` is the precision of runs, and `backends` are those that a run may take.
    """

    device: str
    kernels: dict[str, Callable[..., Tensor]]
    is_dry: bool
    half: torch.dtype = torch.float32
    backends: tuple[str, ...] = ("documents",)

    @classmethod
    def found(cls, dry_run: bool) -> "Machine":
        """Return this machine; raise SystemExit if it has no GPU and `dry_run` is False."""
        documents = document_sdpa.document_attention
        if dry_run:
            return cls("cpu", {"documents": documents}, True)
        if not torch.cuda.is_available():
            raise SystemExit("this machine has no CUDA device; add --dry-run to test the script")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        # Older GPUs emulate bf16.
        is_new = torch.cuda.get_device_capability() >= (8, 0)
        half = torch.bfloat16 if is_new else torch.float16
        best = resolve_attention(tiny_llama(), device="cuda", dtype=half)
        names = [choice.backend for choice in (best, *best.slower)]
        fast = [name for name in names if name in ("varlen", *flash_attn.VERSIONS)]
        kernels = {"varlen": varlen.varlen_attention} if "varlen" in fast else {}
        kernels["documents"] = documents
        kernels |= {name: by_transformers(name) for name in fast if name != "varlen"}
        return cls("cuda", kernels, False, half, tuple(fast) or ("documents",))

    @property
    def fastest(self) -> Callable[..., Tensor]:
        return next(iter(self.kernels.values()))

    @property
    def judges_time(self) -> bool:
        """Whether times are compared with bounds, which hold for kernels over boundaries."""
        return not self.is_dry and "varlen" in self.kernels

    def size(self, full: Any, small: Any) -> Any:
        return small if self.is_dry else full

    def wait(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()

    def milliseconds(self, run: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median of `repeats` runs, after two that warm up."""
        taken = []
        for _ in range(2 + self.size(repeats, 1)):
            self.wait()
            began = time.perf_counter()
            run()
            self.wait()
            taken.append(1e3 * (time.perf_counter() - began))
        return statistics.median(taken[2:])

    def peak_gib(self, run: Callable[[], Any]) -> float:
        """Return what `run` allocates at most; 0 on a CPU."""
        if self.is_dry:
            run()
            return 0.0
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def versions(self) -> str:
        if self.is_dry:
            return "dry run on a CPU\n"
        capability = "sm{}{}".format(*torch.cuda.get_device_capability())
        libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        flash = f"flash-attn: {', '.join(flash_attn.installed()) or 'not installed'}"
        return f"{torch.cuda.get_device_name()}, {capability}, {libraries}, {flash}\n"


# --- kernels --------------------------------------------------------------------------------------


def by_transformers(name: str) -> Callable[..., Tensor]:
    """Return the kernel of an installed flash-attn, called by transformers' attention function."""
    flash_attn.gather_prefix_keys(name)
    module: Any = torch.nn.Linear(1, 1)  # has what transformers asks a layer for
    module.config = SimpleNamespace(_attn_implementation=name)
    module.is_causal = True

    def kernel(q, k, v, cu_seqlens, options, longest, keys=None):
        rows = [x.transpose(0, 1)[None] for x in (q, k, v)]
        arguments = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
        arguments |= {"max_length_q": longest, "max_length_k": longest}
        if keys is not None:
            arguments |= {"cu_seq_lens_k": keys.cu_seqlens_k, "key_index": keys.key_index}
            arguments |= {"max_length_k": keys.max_length}
        arguments |= {"sliding_window": options.window or None, "s_aux": options.sinks}
        attend = ALL_ATTENTION_FUNCTIONS[name]
        return attend(module, *rows, None, scaling=options.scale, **arguments)[0][0]

    return kernel


class Row(NamedTuple):
    """Boundaries of a row, and its keys if its documents share prefixes."""

    cu_seqlens: Tensor
    keys: PrefixKeys | None
    longest: int

    @classmethod
    def of(cls, lengths: list[int], device: str, longest: int = 0) -> "Row":
        ends = np.cumsum([0, *lengths]).astype(np.int32)
        return cls(torch.from_numpy(ends).to(device), None, max(longest, *lengths))

    @classmethod
    def of_branches(cls, sizes: tuple[int, int, int], device: str) -> "Row":
        """Return a row of one prompt; `sizes` are its tokens, its answers, and their tokens."""
        prefix, branches, tokens = sizes
        start = np.arange(prefix)
        made = [
            {"input_ids": np.append(start, np.arange(tokens) + 10_000 * (b + 1))}
            for b in range(branches)
        ]
        batch = PackedCollator(shares_prefixes=True)(made)
        keys = PrefixKeys(
            batch["cu_seq_lens_k"].to(device), batch["key_index"].to(device), batch["max_length_k"]
        )
        return cls(batch["cu_seq_lens_q"].to(device), keys, batch["max_length_q"])

    @property
    def num_tokens(self) -> int:
        return int(self.cu_seqlens[-1])


def reference(query, key, value, row: Row, options: KernelOptions) -> Tensor:
    """Return attention of each segment over its keys, aligned at the last one, in their dtype."""
    index = torch.arange(len(key), device=key.device) if row.keys is None else row.keys.key_index
    cu_k = row.cu_seqlens if row.keys is None else row.keys.cu_seqlens_k
    group = query.shape[1] // key.shape[1]
    parts = []
    for n in range(len(row.cu_seqlens) - 1):
        q = query[row.cu_seqlens[n] : row.cu_seqlens[n + 1]].transpose(0, 1)
        at = index[cu_k[n] : cu_k[n + 1]]
        k, v = (x[at].repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = q @ k.mT * options.scale
        behind = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        distance = behind[:, None] - torch.arange(k.shape[1], device=q.device)
        hidden = (
            distance < 0 if not options.window else (distance < 0) | (distance >= options.window)
        )
        scores = scores.masked_fill(hidden, -math.inf)
        if options.sinks is not None:
            sinks = options.sinks.to(scores.dtype)[:, None, None].expand(-1, q.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        parts.append((scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1))
    return torch.cat(parts)


def gradients(
    attention: Callable[..., Tensor], tensors: list[Tensor], upstream: Tensor
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    output = attention(*leaves)
    # A kernel that gives a tensor no gradient gives it zeros.
    found = torch.autograd.grad(output, leaves, upstream.to(output.dtype), materialize_grads=True)
    return [output, *found]


def compare_with_float64(
    kernel: Callable[..., Tensor],
    row: Row,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    has_sinks: bool,
) -> tuple[float, float]:
    """Return the largest error of outputs and gradients, and the error that rounding allows."""
    torch.manual_seed(0)
    device = row.cu_seqlens.device
    (num, kv, size) = heads
    tensors = [torch.randn(row.num_tokens, h, size, device=device).to(dtype) for h in (num, kv, kv)]
    tensors += [torch.randn(num, device=device)] * has_sinks
    upstream = torch.randn(row.num_tokens, num, size, device=device)

    def options(sinks):
        return KernelOptions(size**-0.5, window, sinks=sinks[0] if sinks else None)

    def by_kernel(q, k, v, *sinks):
        return kernel(q, k, v, row.cu_seqlens, options(sinks), row.longest, keys=row.keys)

    def by_reference(q, k, v, *sinks):
        return reference(q, k, v, row, options(sinks))

    exact = gradients(by_reference, [x.double() for x in tensors], upstream)
    rounded, found = (gradients(f, tensors, upstream) for f in (by_reference, by_kernel))
    # Differences of large numbers may be exactly 0, as the gradient of a row of one token is.
    largest = max(wanted.abs().max().item() for wanted in exact)
    error = 0.0
    allowed = math.inf
    for wanted, plain, got in zip(exact, rounded, found, strict=True):
        noise = max((plain.double() - wanted).abs().max().item(), torch.finfo(dtype).eps * largest)
        part = (got.double() - wanted).abs().max().item()
        if not part <= _ROUNDING * noise:  # NaN as well
            return part, _ROUNDING * noise
        error = max(error, part)
        allowed = min(allowed, _ROUNDING * noise)
    return error, max(error, allowed)


def kernels(machine: Machine) -> str:
    """Check every kernel on rows of all kinds."""
    lengths = machine.size([5, 1, 0, 257, 640, 33, 128, 1000, 0], [5, 1, 0, 17, 9, 0])
    rows = {
        "documents": Row.of(lengths, machine.device),
        "a longer max_length": Row.of(lengths, machine.device, longest=4 * max(lengths)),
        "one token": Row.of([1], machine.device),
        "prefixes": Row.of_branches(machine.size((500, 7, 60), (20, 3, 5)), machine.device),
    }
    # The heads of 20 columns get zeros behind them.
    sizes = machine.size(
        [(8, 2, 64), (8, 2, 80), (8, 8, 128), (4, 1, 256), (4, 2, 20)], [(4, 2, 8), (4, 2, 5)]
    )
    dtypes = machine.size([torch.bfloat16, torch.float16], [torch.float32])
    if machine.half == torch.float16:
        dtypes = [torch.float16]
    windows = (0, machine.size(64, 4))
    lines = []
    for (name, kernel), kind in product(machine.kernels.items(), rows):
        cases = list(product(sizes, dtypes, windows, (False, True)))
        worst = 0.0
        refused = []
        for case in cases:
            if case[-1] and flash_attn.drops_sinks(name):
                refused.append("sinks")
                continue
            try:
                error, allowed = compare_with_float64(kernel, rows[kind], *case)
            except Exception as problem:
                if not flash_attn.is_flash_attention(name):
                    raise
                refused.append(f"{type(problem).__name__}: {str(problem)[:60]}")
                continue
            assert error <= allowed, (
                f"{name}, {kind}, (heads, dtype, window, sinks) = {case}: error {error:.2g}, "
                f"rounding allows {allowed:.2g}"
            )
            worst = max(worst, error / allowed)
        reasons = "; ".join(sorted(set(refused)))
        assert len(refused) < len(cases), f"{name}, {kind}: no case ran: {reasons}"
        lines.append([name, kind, str(len(cases) - len(refused)), f"{worst:.2f}", reasons])
    return table(["kernel", "row", "cases", "largest error / allowed", "refused"], lines)


# --- single layers --------------------------------------------------------------------------------


def forward_and_backward(
    machine: Machine, row: Row, kernel: Callable[..., Tensor] | None = None
) -> Callable[[], Any]:
    """Return a run of one layer of an 8B model: 32 heads of 128, 8 of them keys."""
    heads, kv, size = machine.size((32, 8, 128), (4, 2, 8))
    dtype = machine.half
    q, k, v = (
        torch.randn(row.num_tokens, h, size, device=machine.device, dtype=dtype, requires_grad=True)
        for h in (heads, kv, kv)
    )
    upstream = torch.randn_like(q)
    options = KernelOptions(size**-0.5)

    def run() -> None:
        output = (kernel or machine.fastest)(
            q, k, v, row.cu_seqlens, options, row.longest, keys=row.keys
        )
        torch.autograd.grad(output, (q, k, v), upstream)

    return run


def blocks(machine: Machine) -> str:
    """Time a row with documents without tokens behind it, and with a longer max_length."""
    tokens, number, longest = machine.size((16_384, 55, 1_139), (60, 5, 20))
    rng = np.random.default_rng(0)
    others = rng.multinomial(tokens - longest, [1 / (number - 1)] * (number - 1))
    lengths = [*others.tolist(), longest]
    lines, times = [], []
    for documents, most in (
        (number, longest),
        (5 * number, longest),
        (5 * number, tokens),
        (10 * number, tokens),
    ):
        row = Row.of([*lengths, *[0] * (documents - number)], machine.device, longest=most)
        times.append(machine.milliseconds(forward_and_backward(machine, row)))
        lines.append([f"{documents}", f"{most:,}", f"{times[-1]:.2f}"])
    # static_shapes makes the second row; the others show why it does not take the capacity.
    assert not machine.judges_time or times[1] <= 1.5 * times[0], (
        f"empty documents cost {times[1] - times[0]:.2f} ms a layer"
    )
    return table(["documents", "max_length", "ms, forward and backward of a layer"], lines)


def rows(machine: Machine) -> str:
    """Time the host on rows that all differ."""
    rng = np.random.default_rng(1)
    taken = []
    tokens = machine.size(16_384, 64)
    for _ in range(machine.size(20, 3)):
        lengths = rng.multinomial(tokens, rng.dirichlet([2.0] * machine.size(55, 5))).tolist()
        run = forward_and_backward(machine, Row.of(lengths, machine.device))
        machine.wait()
        began = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - began))
        machine.wait()
    slowest = max(taken[2:], default=0.0)
    assert not machine.judges_time or slowest < 20, (
        f"a row took the host {slowest:.0f} ms: is a graph built for each?"
    )
    return table(
        ["rows", "median host ms", "slowest"],
        [[str(len(taken)), f"{statistics.median(taken):.2f}", f"{slowest:.2f}"]],
    )


def prefixes(machine: Machine) -> str:
    """Measure one layer of a row whose branches see many keys, shared and apart."""
    prefix, branches, tokens = machine.size((2_048, 80, 180), (40, 4, 6))
    shared = Row.of_branches((prefix, branches, tokens), machine.device)
    apart = Row.of([prefix + tokens] * machine.size(7, 4), machine.device)  # about as many tokens
    lines = []
    for name, row in (("shared", shared), ("apart", apart)):
        run = forward_and_backward(machine, row)
        keys = row.num_tokens if row.keys is None else len(row.keys.key_index)
        peak = machine.peak_gib(run)
        assert peak < 12, f"{name}: {peak:.1f} GiB in one layer"
        lines.append(
            [
                name,
                f"{row.num_tokens:,}",
                f"{keys:,}",
                f"{machine.milliseconds(run):.2f}",
                f"{peak:.2f}",
            ]
        )
    assert shared.keys is not None
    assert len(shared.keys.key_index) > shared.num_tokens, "no branch shares the prompt"
    return table(["row", "tokens", "keys", "ms of a layer", "peak GiB"], lines)


# `steps` compiles a model at its end, which accelerate remembers in the environment.
_PARTS = (kernels, gpu_models.models, gpu_models.ranks, blocks, rows, prefixes, gpu_models.steps)
PARTS = {part.__name__: part for part in _PARTS}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts; return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true", help="small, on a CPU")
    parser.add_argument("--output", help="Markdown file to write")
    options = parser.parse_args(arguments)
    machine = Machine.found(options.dry_run)
    warnings.filterwarnings("ignore")
    text = "# On a GPU\n\n"
    failed: list[str] = []
    for name in options.parts:
        began = time.perf_counter()
        try:
            found = PARTS[name](machine)
        except Exception as error:  # the other parts may still say something
            traceback.print_exc()
            found = f"**failed**: {type(error).__name__}: {error}\n"
            failed = [*failed, name]
        text += f"## {name} ({time.perf_counter() - began:.0f} s)\n\n{found}\n"
        print(text.rpartition("## ")[2])
    publish(text + machine.versions() + provenance(), options.output)
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
