"""Ten minutes on a machine with a GPU: what no CPU can say, checked and measured.

    python benchmarks/gpu.py --output benchmarks/results/gpu.md
    python benchmarks/gpu.py --dry-run        # the same code on a CPU, small, to test this script

    kernels     forward and backward of each kernel against attention in float64
    models      packed runs: the backend, seconds with the check, losses against documents alone
    blocks      what documents without tokens cost, as static_shapes makes them
    rows        host time of rows that all differ (a graph for each row would take 40 ms or more)
    steps       a step of ours against TRL's, and how often the host waits for the device
    prefixes    memory of a row whose branches see 180,000 keys

Each part raises AssertionError where a number is wrong, and prints figures where it is right. Parts
that fail do not stop the others; the script then ends with status 1. Without flash-attn, its lines
are missing. In a dry run, kernels of CPUs stand in for those of GPUs, and no time is judged.
"""

import argparse
import gc
import math
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from machine import provenance, publish, table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from transformers.utils.import_utils import is_flash_attn_2_available
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer
from trl_packing.attention import document_sdpa, varlen
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.tiny import tiny_tokenizer

_ROUNDING = 8  # times the error of plain attention in the same dtype, against float64


class Machine(NamedTuple):
    """Where the parts run, and how large they are."""

    device: str
    kernels: dict[str, Callable[..., Tensor]]
    is_dry: bool

    @classmethod
    def found(cls, dry_run: bool) -> "Machine":
        """Return this machine; raise SystemExit if it has no GPU and `dry_run` is False."""
        documents = document_sdpa.document_attention
        if dry_run:
            return cls("cpu", {"documents": documents}, True)
        if not torch.cuda.is_available():
            raise SystemExit("this machine has no CUDA device; add --dry-run to test the script")
        return cls("cuda", {"varlen": varlen.varlen_attention, "documents": documents}, False)

    @property
    def fastest(self) -> Callable[..., Tensor]:
        return next(iter(self.kernels.values()))

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
        flash = "with flash-attn 2" if is_flash_attn_2_available() else "without flash-attn"
        return f"{torch.cuda.get_device_name()}, {capability}, {libraries}, {flash}\n"


# --- kernels --------------------------------------------------------------------------------------


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
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


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
    sizes = machine.size([(8, 2, 64), (8, 2, 80), (8, 8, 128), (4, 1, 256)], [(4, 2, 8)])
    dtypes = machine.size([torch.bfloat16, torch.float16], [torch.float32])
    windows = (0, machine.size(64, 4))
    lines = []
    for (name, kernel), kind in product(machine.kernels.items(), rows):
        cases = list(product(sizes, dtypes, windows, (False, True)))
        worst = 0.0
        for case in cases:
            error, allowed = compare_with_float64(kernel, rows[kind], *case)
            assert error <= allowed, (
                f"{name}, {kind}, (heads, dtype, window, sinks) = {case}: error {error:.2g}, "
                f"rounding allows {allowed:.2g}"
            )
            worst = max(worst, error / allowed)
        lines.append([name, kind, str(len(cases)), f"{worst:.2f}"])
    return table(["kernel", "row", "cases", "largest error / allowed"], lines)


# --- runs -----------------------------------------------------------------------------------------


def model_of(machine: Machine, name: str, **changes: Any) -> Any:
    """Return a model with random weights: 12 layers of 1,024, tiny in a dry run."""
    width, layers = machine.size((1024, 12), (32, 2))
    config = AutoConfig.for_model(name, vocab_size=machine.size(32_000, 320))
    same = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": machine.size(16, 4),
        "num_key_value_heads": machine.size(4, 2),
        "head_dim": machine.size(64, 8),
        "num_local_experts": 4,
        "sliding_window": machine.size(512, 8),
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "pad_token_id": 0,
    }
    for field, value in (same | changes).items():
        if hasattr(config, field):
            setattr(config, field, value)
    torch.manual_seed(0)
    implementation = "eager" if name == "gpt_oss" else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(
        machine.device, machine.size(torch.bfloat16, torch.float32)
    )


def documents_of(machine: Machine, tokens: int) -> Dataset:
    """Return documents of 300 tokens on average (log-normal), `tokens` in all."""
    rng = np.random.default_rng(0)
    made: list[list[int]] = []
    while sum(map(len, made)) < tokens:
        length = int(
            np.clip(rng.lognormal(math.log(machine.size(220, 12)), 0.8), 4, machine.size(4096, 64))
        )
        made.append(rng.integers(6, 300, length).tolist())
    return Dataset.from_list([{"input_ids": ids} for ids in made])


def settings(machine: Machine, folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "packing": True,
        "max_length": machine.size(4096, 64),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": machine.size(6, 2),
        "learning_rate": 0.0,
        "bf16": not machine.is_dry,
        "use_cpu": machine.is_dry,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | changes


def alone(model: Any, documents: Dataset) -> float:
    """Return the mean loss of the documents' tokens, one document at a time."""
    total, number = 0.0, 0
    model.eval()
    with torch.no_grad():
        for ids in documents["input_ids"]:
            row = torch.tensor([ids], device=model.device)
            logits = model(input_ids=row, use_cache=False).logits[0, :-1].float()
            total += torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="sum").item()
            number += len(ids) - 1
    return total / number


def models(machine: Machine) -> str:
    """Train models with windows and sinks; compare losses with those of documents alone."""
    documents = documents_of(machine, machine.size(60_000, 1_500))
    lines = []
    evaluated = documents.select(range(min(len(documents), 64)))
    for name in ("llama", "gemma3_text", "gpt_oss"):
        model = model_of(machine, name)
        expected = alone(model, evaluated)
        with tempfile.TemporaryDirectory() as folder:
            trainer = PackedSFTTrainer(
                model,
                PackedSFTConfig(**settings(machine, folder)),
                train_dataset=documents,
                eval_dataset=evaluated,
                processing_class=tiny_tokenizer(),
            )
            began = time.perf_counter()
            peak = machine.peak_gib(trainer.train)
            seconds = time.perf_counter() - began
            found = trainer.evaluate()["eval_loss"]
        # bf16 has eps 2**-8 = 4e-3, and losses of random weights are about 10.
        bound = machine.size(0.01, 1e-4) * expected
        assert abs(found - expected) <= bound, f"{name}: loss {found}, alone {expected}"
        lines.append(
            [
                name,
                str(trainer.attention),
                f"{seconds:.1f}",
                f"{peak:.1f}",
                f"{found - expected:+.1e}",
            ]
        )
    return table(
        ["model", "attention", "s, with the check", "peak GiB", "eval_loss − alone"], lines
    )


class Steps(TrainerCallback):
    """Keeps the seconds of each token of a step, and looks for waits in all but the first four."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.tokens_before = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.machine.wait()
        if not self.machine.is_dry and state.global_step >= 4:
            torch.cuda.set_sync_debug_mode("warn")
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if not self.machine.is_dry:
            torch.cuda.set_sync_debug_mode("default")
        self.machine.wait()
        self.taken = time.perf_counter() - self.began

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
            self.losses.append(float(logs["loss"]))
            tokens = logs["num_tokens"] - self.tokens_before
            self.tokens_before = logs["num_tokens"]
            self.seconds.append(self.taken / tokens)


@contextmanager
def counted_waits() -> Iterator[list[str]]:
    """Yield the calls that waited for the device while its debug mode was on, none on a CPU."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


RUNS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "TRL, packed, flash-attn 2": (SFTTrainer, {}, "flash_attention_2"),
    "TRL, packed": (SFTTrainer, {}, "sdpa"),
    "TRL, padded, 8 documents": (
        SFTTrainer,
        {"packing": False, "per_device_train_batch_size": 8},
        "sdpa",
    ),
    "ours": (PackedSFTTrainer, {}, "sdpa"),
    "ours, static_shapes, compiled": (
        PackedSFTTrainer,
        {"static_shapes": True, "torch_compile": True},
        "sdpa",
    ),
}


def steps(machine: Machine) -> str:
    """Train the shape of Qwen3-0.6B, each run in turn; return µs a token and waits."""
    documents = documents_of(machine, machine.size(120_000, 3_000))
    results = {}
    shape = (
        {}
        if machine.is_dry
        else {
            "num_hidden_layers": 28,
            "intermediate_size": 3072,
            "head_dim": 128,
            "num_key_value_heads": 8,
        }
    )
    for name, (trainer_class, changes, implementation) in RUNS.items():
        if implementation == "flash_attention_2" and not is_flash_attn_2_available():
            continue
        if machine.is_dry and "compiled" in name:
            continue
        timer = Steps(machine)
        model = model_of(machine, "qwen3", **shape)
        model.set_attn_implementation(implementation)
        config = PackedSFTConfig if trainer_class is PackedSFTTrainer else SFTConfig
        with tempfile.TemporaryDirectory() as folder, counted_waits() as waits:
            trainer_class(
                model,
                config(**settings(machine, folder, max_steps=machine.size(14, 3), **changes)),
                train_dataset=documents,
                processing_class=tiny_tokenizer(),
                callbacks=[timer],
            ).train()
        results[name] = (
            1e6 * statistics.median(timer.seconds[-10:]),
            statistics.mean(timer.losses),
            len(waits),
        )
    ours, ours_loss, ours_waits = results["ours"]
    for name, (_, loss, number) in results.items():
        # Weights are random and the learning rate is 0: runs differ by their documents alone.
        assert abs(loss - ours_loss) < 0.02 * ours_loss, f"{name}: loss {loss}, ours {ours_loss}"
        assert name.startswith("ours") or ours_waits <= number, (
            f"{name} waits {number} times, ours {ours_waits}"
        )
    lines = [
        [name, f"{us:.1f}", f"{us / ours:.2f}×", str(number)]
        for name, (us, _, number) in results.items()
    ]
    return table(["run", "µs a token", "against ours", "waits, 10 steps"], lines)


# --- single layers --------------------------------------------------------------------------------


def forward_and_backward(
    machine: Machine, row: Row, kernel: Callable[..., Tensor] | None = None
) -> Callable[[], Any]:
    """Return a run of one layer of an 8B model: 32 heads of 128, 8 of them keys."""
    heads, kv, size = machine.size((32, 8, 128), (4, 2, 8))
    dtype = machine.size(torch.bfloat16, torch.float32)
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
    assert machine.is_dry or times[1] <= 1.5 * times[0], (
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
    assert machine.is_dry or slowest < 20, (
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


PARTS = {f.__name__: f for f in (kernels, models, blocks, rows, steps, prefixes)}


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
