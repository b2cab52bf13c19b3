"""CPU time and memory of a packed step of hybrid models: in one row, and as padded forwards.

    python benchmarks/hybrids.py --output benchmarks/results/hybrids.md   # about 15 minutes

Models of 4 layers × 512 hidden compute forward and backward of a row of 4,096 tokens on one thread.
Each way runs in a separate process, for its peak of memory, and the processes take turns. The ratio
is the median over pairs of turns. The last logits of both ways must agree first. TRL runs the same
documents on the untouched model, as its padding-free batch.

MiB are the peak of the first step. Later ones also hold pages that the allocator keeps, in pieces
that it cannot use; trimmed between steps, both ways stay where they were.

`products` is the ratio if a packed step were nothing but the products of its linear layers, which
every exact way computes: no way can be below it.
"""

import argparse
import resource
import statistics
import time
import warnings
from typing import Any

import numpy as np
import torch
from machine import in_process, provenance, publish, table
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from trl_packing import PackedCollator, resolve_attention
from trl_packing.attention.calls import use_current_row
from trl_packing.attention.install import install_attention
from trl_packing.documents.host_row import for_kernels
from trl_packing.training.malloc import keep_freed_pages

TOKENS = 4096
VOCABULARY = 1024
MEANS = (256, 64)  # tokens of a document
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "linear_num_value_heads": 8,
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "lfm2": {
        "layer_types": ["conv", "conv", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*",
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 2,
        "ssm_state_size": 64,
    },
    "falcon_h1": {
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
    },
}


def documents(mean: int) -> list[dict[str, np.ndarray]]:
    """Return documents of log-normal lengths around `mean` that fill a row to the last token."""
    generator = np.random.default_rng(0)
    left = TOKENS
    found = []
    while left:
        drawn = int(generator.lognormal(np.log(mean) - 0.32, 0.8))
        length = min(max(4, drawn), left)
        found.append({"input_ids": generator.integers(3, VOCABULARY, length)})
        left -= length
    return found


def model(name: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **MODELS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()


def measure(name: str, mean: int, way: str, steps: int, result: Any) -> None:
    """Send the seconds of each step, peak memory in MiB, logits, and the share of products."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # CPU seconds without those in which threads wait for each other
    batch = PackedCollator()(documents(mean))
    trained = model(name)
    install_attention(trained, resolve_attention(trained, way))
    names = ("labels", "target_counts")
    inputs = {key: value for key, value in for_kernels(batch).items() if key not in names}
    seconds, peaks = [], []
    with keep_freed_pages(on_cpu=True), use_current_row(batch):
        for _ in range(steps + 1):
            began = time.process_time()
            logits = trained(**inputs).logits
            logits.logsumexp(-1).mean().backward()
            seconds.append(time.process_time() - began)
            trained.zero_grad()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            trained(**inputs).logits.logsumexp(-1).mean().backward()
    events = profiled.key_averages()
    products = sum(e.self_cpu_time_total for e in events if e.key in ("aten::mm", "aten::addmm"))
    share = products / sum(e.self_cpu_time_total for e in events)
    result.send((seconds[1:], peaks[0], logits[0, -64:].detach().numpy(), share))


def by_trl(name: str) -> str:
    """Return what TRL's padding-free batch does on the untouched model."""
    rows = [{"input_ids": d["input_ids"].tolist()} for d in documents(16)[:8]]
    collate = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    untouched = model(name).eval()

    def last(rows: list[dict[str, list[int]]]) -> torch.Tensor:
        batch = collate(rows)
        batch.pop("labels")
        with torch.no_grad():
            return untouched(**batch, use_cache=False).logits[0, -len(rows[-1]["input_ids"]) :]

    try:
        difference = float((last(rows) - last(rows[-1:])).abs().max())
    except Exception as error:
        return f"raises {type(error).__name__}"
    return f"differs by {difference:.1g}" if difference > 1e-3 else "exact"


def compare(name: str, mean: int, steps: int, turns: int) -> list[str]:
    pairs = []
    peaks = []
    for _ in range(turns):
        padded, padded_peak, expected, _ = in_process(measure, name, mean, "padded", steps)
        own, peak, found, share = in_process(measure, name, mean, "documents", steps)
        assert np.abs(found - expected).max() < 1e-4, (name, np.abs(found - expected).max())
        pairs.append((statistics.median(padded), statistics.median(own)))
        peaks.append((padded_peak, peak))
    ratio = statistics.median(own / padded for padded, own in pairs)
    microseconds = [1e6 * statistics.median(way) / TOKENS for way in zip(*pairs, strict=True)]
    memory = [statistics.median(way) for way in zip(*peaks, strict=True)]
    return [
        f"`{name}`",
        str(mean),
        *(f"{number:,.0f}" for number in microseconds),
        f"{ratio:.2f}",
        f"{ratio * share:.2f}",
        *(f"{number:,.0f}" for number in memory),
        by_trl(name),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=[*MODELS], help="default: all")
    parser.add_argument("--means", nargs="*", type=int, default=MEANS, help="default: 256 64")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of each way")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        for mean in arguments.means:
            rows.append(compare(name, mean, arguments.steps, arguments.turns))
            print(*rows[-1], flush=True)
    header = ["model", "tokens a document", "padded µs/token", "one row µs/token", "ratio"]
    header += ["products", "padded MiB", "one row MiB", "TRL 1.16 on this machine"]
    title = "# A packed step of hybrid models on a CPU, without kernels"
    publish(f"{title}\n\n{table(header, rows)}\n{provenance()}", arguments.output)


if __name__ == "__main__":
    main()
