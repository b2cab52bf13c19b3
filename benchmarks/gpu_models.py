"""Whole models on a GPU, for `gpu.py`: are their runs exact, and what do their steps cost?

    models, ranks   runs of PackedSFTTrainer, and of enable_packing, against documents alone
    steps           µs a token, waits and memory of steps of ours and of TRL's

An error may be a few times that of documents alone in the same precision. Each comparison has its
negative control: the same documents as one document, where everything leaks, must fail.
"""

import copy
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from machine import table
from peft import LoraConfig
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedCollator, PackedSFTConfig, PackedSFTTrainer, enable_packing
from trl_packing.attention.document_sdpa import document_attention
from trl_packing.attention.interface import KernelOptions

if TYPE_CHECKING:
    from gpu import Machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.tiny import tiny_tokenizer

_ROUNDING = 4  # times the error of documents alone in the same precision

_SMALL = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    # With the usual 0.02, random models attend to nothing: a leak is within rounding.
    "initializer_range": 0.05,
}
_QWEN3 = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
_LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_WINDOWS = {"sliding_window": 512}  # in every other layer

# The model type and the sizes of each model; a dry run has those of `_DRY`.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "gemma3": ("gemma3_text", _SMALL | _WINDOWS),
    # Its experts round coarsely: with more layers, a leak would come near to rounding.
    "gpt-oss": ("gpt_oss", _SMALL | _WINDOWS | {"num_hidden_layers": 2, "num_local_experts": 4}),
    "Qwen3-0.6B": ("qwen3", _QWEN3),
    "8 layers of 8B": ("llama", _LLAMA_8B),
}
_DRY = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
}
_CHECKED = ("llama", "gemma3", "gpt-oss")


def model_of(machine: "Machine", name: str) -> Any:
    """Return a model of `SHAPES` with random weights in float32, made on the device."""
    kind, sizes = SHAPES[name]
    sizes = sizes | machine.size({}, _DRY)
    if "sliding_window" in sizes:
        sizes["sliding_window"] = machine.size(sizes["sliding_window"], 8)
        both = ["sliding_attention", "full_attention"]
        sizes["layer_types"] = both * (sizes["num_hidden_layers"] // 2)
    config = AutoConfig.for_model(kind, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    implementation = "eager" if kind == "gpt_oss" else "sdpa"
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    if "num_local_experts" in sizes:
        model.set_experts_implementation("eager")  # the others lack float64, and some GPUs
    return model


def arguments(kind: Any, machine: "Machine", folder: str, **changes: Any) -> Any:
    """Return training arguments of a class, on one GPU a process; weights stay as they are."""
    shared = {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "learning_rate": 0.0,
        "max_grad_norm": 1e9,  # unscales the gradients of fp16, and clips none
        "bf16": machine.half == torch.bfloat16,
        "fp16": machine.half == torch.float16,
        "use_cpu": machine.is_dry,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    made = kind(**(shared | changes))
    made._n_gpu = min(made.n_gpu, 1)  # Trainer would divide a row among all GPUs that it sees
    return made


def release() -> None:
    """Free the models of earlier runs, which cycles of references keep alive."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- exactness ------------------------------------------------------------------------------------


class Numbers(NamedTuple):
    """Log-probabilities of predicted tokens ``(tokens,)``, and all gradients ``(numbers,)``."""

    log_probabilities: Tensor
    gradients: Tensor


_IN_WORDS = {"log_probabilities": "log-probabilities", "gradients": "gradients"}

Row = tuple[dict[str, Any], Tensor]  # arguments of a forward, and positions that predict a token


def rows_alone(documents: list[list[int]]) -> list[Row]:
    """Return a row for each document."""
    return [({"input_ids": torch.tensor([ids])}, torch.arange(len(ids) - 1)) for ids in documents]


def packed_row(documents: list[list[int]]) -> list[Row]:
    """Return one row with the boundaries of its documents."""
    batch = PackedCollator()([{"input_ids": ids} for ids in documents])
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return [(inputs, predicting_positions(documents))]


def leaking_row(documents: list[list[int]]) -> list[Row]:
    """Return the same row as one document, whose tokens see all those before them."""
    whole = [token for ids in documents for token in ids]
    return [(packed_row([whole])[0][0], predicting_positions(documents))]


def predicting_positions(documents: list[list[int]]) -> Tensor:
    """Return the positions of a packed row whose next token is of the same document."""
    ends = np.cumsum([len(ids) for ids in documents])
    return torch.from_numpy(np.setdiff1d(np.arange(ends[-1]), ends - 1))


def gradients_of(model: Any) -> Tensor:
    """Return the gradients of all weights, one behind the other, on the CPU."""
    found = []
    for weight in model.parameters():
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        found.append(gradient.detach().flatten().cpu())
    return torch.cat(found)


def numbers_of(machine: "Machine", model: Any, rows: list[Row], *, rounds: bool = True) -> Numbers:
    """Return the numbers of one forward and backward for each row; `rounds`: as training does."""
    model.zero_grad()
    precision: Any = {"dtype": machine.half, "enabled": rounds and not machine.is_dry}
    found = []
    for inputs, positions in rows:
        on_device = {
            name: value.to(machine.device) if torch.is_tensor(value) else value
            for name, value in inputs.items()
        }
        on_device["use_cache"] = False
        with torch.autocast(machine.device, **precision):
            logits = model(**on_device).logits[0, positions]
        targets = on_device["input_ids"][0, positions + 1]
        wide = logits.double() if machine.is_dry else logits.float()
        predicted = wide.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        (-predicted.sum()).backward()
        found.append(predicted.detach().double())
    number = sum(map(len, found))
    numbers = Numbers(torch.cat(found).cpu(), gradients_of(model) / number)
    model.zero_grad()
    return numbers


def compared(name: str, found: Numbers, leak: Numbers, alone: Numbers, exact: Numbers) -> list[str]:
    """Return the difference from documents alone, the allowed one, and that of a leak, as cells.

    Raises:
        AssertionError: a difference exceeds what rounding explains, or a leak would not.
    """
    cells = []
    for field, words in _IN_WORDS.items():
        wanted = getattr(exact, field)
        difference, leaked, noise = (
            float((getattr(numbers, field) - wanted).square().mean().sqrt())
            for numbers in (found, leak, alone)
        )
        allowed = _ROUNDING * noise
        assert difference <= allowed, (  # False for NaN as well
            f"{name}: {words} differ by {difference:.2g}, rounding allows {allowed:.2g}"
        )
        assert leaked > allowed, (
            f"{name}: this check finds no leak; {words} would differ by {leaked:.2g}, rounding "
            f"allows {allowed:.2g}"
        )
        cells.append(f"{difference:.1e} (allowed {allowed:.1e}, a leak {leaked:.1e})")
    return cells


class LastGradients(TrainerCallback):
    """Keeps the gradients of the last step, and the time at which the first one began."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.began = time.perf_counter()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == state.max_steps - 1:
            self.gradients = gradients_of(model)


# A trainer, and what its check found once it has trained: the attention, and the evidence.
Checked = tuple[Any, Callable[[], tuple[Any, Any]]]


def packed_trainer(machine: "Machine", model: Any, documents: list, folder: str) -> Checked:
    """Return our trainer on the documents, all of them in every step."""
    changes = {"packing": True, "max_length": machine.size(4096, 64)}
    changes |= {"documents_per_step": len(documents), "max_steps": machine.size(6, 2)}
    trainer = PackedSFTTrainer(
        model,
        arguments(PackedSFTConfig, machine, folder, **changes),
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in documents]),
        processing_class=tiny_tokenizer(),
    )
    return trainer, lambda: (trainer.attention, trainer.packing_report.checked)


def enabled_trainer(machine: "Machine", model: Any, documents: list, folder: str) -> Checked:
    """Return a plain Trainer on the same documents, by `enable_packing`."""
    changes = {"max_steps": machine.size(6, 2), "remove_unused_columns": False}
    changes |= {"per_device_train_batch_size": len(documents)}
    enable_packing(model, documents)
    guard = model.enabled_packing.guard  # checks again in the precision of training
    trainer = Trainer(
        model,
        arguments(TrainingArguments, machine, folder, **changes),
        data_collator=PackedCollator(),
        train_dataset=Dataset.from_list([{"input_ids": ids} for ids in documents]),
    )
    return trainer, lambda: (guard.attention, guard.checked)


def few_documents(machine: "Machine") -> list[list[int]]:
    """Return documents that are compared; some are longer than the windows of the models."""
    rng = np.random.default_rng(0)
    lengths = machine.size([900, 300, 57, 700, 5, 33], [20, 5, 12, 9, 3])
    return [rng.integers(6, 300, length).tolist() for length in lengths]


def check_run(machine: "Machine", name: str, trainer_of: Callable[..., Any]) -> list[str]:
    """Train a model of `SHAPES`, and compare its numbers with those of documents alone."""
    documents = few_documents(machine)
    model = model_of(machine, name)
    wide = copy.deepcopy(model).double() if machine.is_dry else model
    exact = numbers_of(machine, wide, rows_alone(documents), rounds=False)
    alone = numbers_of(machine, model, rows_alone(documents))
    last = LastGradients()
    with tempfile.TemporaryDirectory() as folder:
        trainer, check_of = trainer_of(machine, model, documents, folder)
        trainer.add_callback(last)
        began = time.perf_counter()
        peak = machine.peak_gib(trainer.train)
    attention, checked = check_of()
    assert attention.backend in machine.backends, (
        f"{name}: runs by {attention}, and not by {' or '.join(machine.backends)}"
    )
    packed = numbers_of(machine, model, packed_row(documents))
    leak = numbers_of(machine, model, leaking_row(documents))
    cells = compared(name, packed._replace(gradients=last.gradients), leak, alone, exact)
    seconds = last.began - began
    return [name, attention.backend, f"{seconds:.1f}", f"{peak:.1f}", *cells, str(checked)]


_HEADER = ["model", "attention", "s before the first step", "peak GiB"]
_HEADER += ["log-probabilities against alone", "gradients against alone", "its own check"]


def models(machine: "Machine") -> str:
    """Check runs of models with windows and sinks, and one by `enable_packing`."""
    lines = []
    for name in _CHECKED:
        lines.append(check_run(machine, name, packed_trainer))
        release()
    enabled = check_run(machine, "llama", enabled_trainer)
    release()
    return table(_HEADER, [*lines, ["llama, enable_packing", *enabled[1:]]])


def ranks(machine: "Machine") -> str:
    """Check a run on two processes, with a GPU each, against documents alone."""
    if "LOCAL_RANK" in os.environ:
        cells = check_run(machine, "llama", packed_trainer)
        return table(_HEADER, [cells]) if os.environ["RANK"] == "0" else ""
    if not machine.is_dry and torch.cuda.device_count() < 2:
        return "skipped: this machine has one GPU\n"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = [str(Path(__file__).with_name("gpu.py")), "--parts", "ranks"]
    command = launch + script + ["--dry-run"] * machine.is_dry
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return "\n".join([*rows[:3], ""])


# --- FlashAttention 2 by PyTorch ------------------------------------------------------------------

FA2_BY_PYTORCH = "fa2_by_pytorch"


def attend_by_pytorch(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within the documents of TRL's packed rows, by the kernel that PyTorch compiles in.

    It is FlashAttention 2, called as transformers calls the package flash-attn: with boundaries and
    lengths of the batch, in the dtype of autocast. A CPU, which lacks it, takes a stand-in.
    """
    assert attention_mask is None, "a packed row has no mask"
    assert dropout == 0
    dtype, kind = value.dtype, query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    # From (1, heads, T, dim).
    q, k, v = (x[0].transpose(0, 1).to(dtype).contiguous() for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    boundaries, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    if kind == "cpu":
        options = KernelOptions(scale, sliding_window)
        return document_attention(q, k, v, boundaries, options, longest)[None], None
    spans = (boundaries, boundaries, longest, longest)
    # The kernel counts the tokens to the left of the query; the model counts the query too.
    left = sliding_window - 1 if sliding_window else -1
    window = {"window_size_left": left, "window_size_right": 0}
    is_causal = not sliding_window
    kernel = torch.ops.aten._flash_attention_forward
    output, *_ = kernel(q, k, v, *spans, 0.0, is_causal, False, scale=scale, **window)
    return output[None], None


AttentionInterface.register(FA2_BY_PYTORCH, attend_by_pytorch)
AttentionMaskInterface.register(FA2_BY_PYTORCH, lambda *args, **kwargs: None)


# --- steps ----------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One line of `steps`: a trainer with an attention and settings, on a model of `SHAPES`."""

    name: str
    trainer: Any
    implementation: str = "sdpa"
    changes: dict[str, Any] = {}  # noqa: RUF012
    shape: str = "Qwen3-0.6B"


_LORA: dict[str, Any] = {"shape": "8 layers of 8B", "changes": {"max_length": 16_384}}
_PADDED = {"packing": False, "per_device_train_batch_size": 8}

# The first run of ours with each shape is the one that others are compared with. torch_compile
# comes last: accelerate leaves it in the environment.
RUNS = [
    Run("TRL, packed, flash-attn 2", SFTTrainer, "flash_attention_2"),
    Run("TRL, packed, FA2 by PyTorch", SFTTrainer, FA2_BY_PYTORCH),
    Run("TRL, packed", SFTTrainer),
    Run("TRL, padded, 8 documents", SFTTrainer, changes=_PADDED),
    Run("ours", PackedSFTTrainer),
    Run("LoRA: TRL, packed, FA2 by PyTorch", SFTTrainer, FA2_BY_PYTORCH, **_LORA),
    Run("LoRA: ours", PackedSFTTrainer, **_LORA),
    Run(
        "ours, static_shapes, compiled",
        PackedSFTTrainer,
        changes={"static_shapes": True, "torch_compile": True},
    ),
]


class Steps(TrainerCallback):
    """Keeps seconds a token and the peak of steps; looks for waits from the fifth step on."""

    def __init__(self, machine: "Machine"):
        self.machine = machine
        self.seconds: list[float] = []
        self.tokens_before = 0.0
        self.peak = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.machine.wait()
        if not self.machine.is_dry:
            torch.cuda.reset_peak_memory_stats()
            if state.global_step >= 4:
                torch.cuda.set_sync_debug_mode("warn")
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if not self.machine.is_dry:
            torch.cuda.set_sync_debug_mode("default")
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() / 2**30)
        self.machine.wait()
        self.taken = time.perf_counter() - self.began

    def on_log(self, args, state, control, logs, **kwargs):
        if "loss" in logs:
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


def documents_of(machine: "Machine", tokens: int) -> Dataset:
    """Return documents of 300 tokens on average (log-normal), `tokens` in all."""
    rng = np.random.default_rng(0)
    middle, most = machine.size((220, 4096), (12, 64))
    made: list[list[int]] = []
    while sum(map(len, made)) < tokens:
        length = int(np.clip(middle * rng.lognormal(0, 0.8), 4, most))
        made.append(rng.integers(6, 300, length).tolist())
    return Dataset.from_list([{"input_ids": ids} for ids in made])


def check_fa2_by_pytorch(machine: "Machine") -> None:
    """Raise AssertionError if the baseline without flash-attn would leak."""
    documents = few_documents(machine)
    model = model_of(machine, "gemma3")
    wide = copy.deepcopy(model).double() if machine.is_dry else model
    exact = numbers_of(machine, wide, rows_alone(documents), rounds=False)
    alone = numbers_of(machine, model, rows_alone(documents))
    model.set_attn_implementation(FA2_BY_PYTORCH)
    found, leak = (
        numbers_of(machine, model, rows) for rows in (packed_row(documents), leaking_row(documents))
    )
    compared("FA2 by PyTorch", found, leak, alone, exact)


def measured(machine: "Machine", run: Run, documents: Dataset) -> tuple[float, float, int]:
    """Return µs a token, the peak of a step in GiB, and the waits of 10 steps."""
    timer = Steps(machine)
    model = model_of(machine, run.shape)
    model.set_attn_implementation(run.implementation)
    is_ours = run.trainer is PackedSFTTrainer
    changes = {"packing": True, "max_length": 4096} | run.changes
    changes |= {"max_steps": machine.size(14, 3)} | machine.size({}, {"max_length": 64})
    adapter = None
    if run.shape == _LORA["shape"]:
        model = model.to(machine.half)
        adapter = LoraConfig(r=16, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder, counted_waits() as waits:
        config = PackedSFTConfig if is_ours else SFTConfig
        trainer = run.trainer(
            model,
            arguments(config, machine, folder, **changes),
            train_dataset=documents,
            processing_class=tiny_tokenizer(),
            callbacks=[timer],
            peft_config=adapter,
        )
        trainer.train()
    if is_ours:
        assert trainer.attention.backend in machine.backends, f"{run.name}: {trainer.attention}"
    return 1e6 * statistics.median(timer.seconds[-10:]), timer.peak, len(waits)


def steps(machine: "Machine") -> str:
    """Time steps of each run, and count how often the host waits for the device."""
    if "varlen" in machine.backends or machine.is_dry:
        check_fa2_by_pytorch(machine)
    documents = documents_of(machine, machine.size(250_000, 3_000))
    results: dict[str, tuple[float, float, int]] = {}
    lines = []
    for run in RUNS:
        is_possible = {
            "flash_attention_2": "flash_attention_2" in machine.backends,
            FA2_BY_PYTORCH: "varlen" in machine.backends or machine.is_dry,
        }
        if not is_possible.get(run.implementation, True):
            continue
        if machine.is_dry and "compiled" in run.name:
            continue
        release()
        try:
            results[run.name] = measured(machine, run, documents)
        except torch.OutOfMemoryError:
            assert "ours" not in run.name, f"{run.name}: out of memory"
            lines.append([run.name, run.shape, "out of memory", "", "", ""])
    release()
    for run in RUNS:
        if run.name not in results:
            continue
        reference = "LoRA: ours" if run.shape == _LORA["shape"] else "ours"
        ours, _, fewest = results[reference]
        us, peak, waits = results[run.name]
        assert run.trainer is PackedSFTTrainer or fewest <= waits, (
            f"{run.name} waits {waits} times, {reference} {fewest}"
        )
        cells = [f"{us:.1f}", f"{us / ours:.2f}×", f"{peak:.1f}", str(waits)]
        lines.append([run.name, run.shape, *cells])
    header = ["run", "model", "µs a token", "against ours", "peak GiB", "waits, 10 steps"]
    return table(header, lines)
