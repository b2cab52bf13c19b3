"""Speed of preparation, from rows of text or messages to documents, compared with TRL's.

    python benchmarks/prepare.py --tokenizer PATH --data gsm8k_train.jsonl \\
        --output benchmarks/results/prepare.md                          # about 2 minutes, 2 cores

Both trainers prepare the same rows in one process, without a cache. The documents must have the
same tokens and labels. `--memory 100000 1000000` prepares that many rows and prints how much the
memory of the process grows.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_caching, disable_progress_bars, load_dataset
from machine import Peak, anonymous_mib, provenance, publish, table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTTrainer


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# form -> (makes a row from question and answer, promised ratio)
FORMS: dict[str, tuple[Callable[[str, str], dict[str, Any]], float | None]] = {
    "conversations": (lambda q, a: {"messages": [user(q), assistant(a)]}, 3.0),
    "prompt and completion, messages": (
        lambda q, a: {"prompt": [user(q)], "completion": [assistant(a)]},
        None,
    ),
    "prompt and completion, text": (lambda q, a: {"prompt": f"{q}\n", "completion": a}, None),
    "text": (lambda q, a: {"text": f"{q}\n{a}"}, None),
}


def trainer(cls: type, rows: Dataset, tokenizer: Any, folder: str) -> SFTTrainer:
    """Return a trainer on two rows with the smallest model; its preparation is then timed."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    args = SFTConfig(folder, max_length=2048, report_to="none", use_cpu=True, bf16=False)
    return cls(
        LlamaForCausalLM(config), args, train_dataset=rows.take(2), processing_class=tokenizer
    )


def seconds(trainer: SFTTrainer, rows: Dataset) -> tuple[float, Dataset]:
    began = time.perf_counter()
    documents = trainer._prepare_dataset(
        rows, trainer.processing_class, trainer.args, False, None, "train"
    )
    return time.perf_counter() - began, documents


def compare(form: str, pairs: list[tuple[str, str]], tokenizer: Any, repeats: int) -> list[str]:
    row, promised = FORMS[form]
    rows = Dataset.from_list([row(*pair) for pair in pairs])
    times: dict[type, list[float]] = {SFTTrainer: [], PackedSFTTrainer: []}
    documents = {}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {cls: trainer(cls, rows, tokenizer, folder) for cls in times}
        for _ in range(repeats):  # in turns, so that a machine with drifting speed favors neither
            for cls, one in trainers.items():
                taken, documents[cls] = seconds(one, rows)
                times[cls].append(taken)
    for column in ("input_ids", "labels"):
        assert documents[SFTTrainer][column] == documents[PackedSFTTrainer][column], column
    ratio = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    speeds = (f"{len(rows) / statistics.median(taken):,.0f}" for taken in times.values())
    missed = "" if promised is None or ratio >= promised else " (missed)"
    return [form, *speeds, f"{ratio:.1f}×", f"≥ {promised}×{missed}" if promised else ""]


def growth_over(number: int, pairs: list[tuple[str, str]], tokenizer: Any) -> str:
    """Prepare conversations from a file, and return how much the process grew."""
    row, _ = FORMS["conversations"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.jsonl"
        with path.open("w") as file:
            for i in range(number):
                question, answer = pairs[i % len(pairs)]
                short = row(f"{i}. {question[:60]}", answer[:60])
                file.write(json.dumps(short) + "\n")
        rows = load_dataset("json", data_files=str(path), split="train", cache_dir=folder)
        one = trainer(PackedSFTTrainer, rows, tokenizer, folder)
        before, peak = anonymous_mib(), Peak()
        peak.start()
        taken, documents = seconds(one, rows)
        peak.stop.set()
        peak.join()
        return (
            f"{len(documents):,} short conversations: {len(rows) / taken:,.0f} rows/s, the process "
            f"grew by {peak.mib - before:,.0f} MiB at its peak (mapped files aside).\n"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="a chat model's folder or hub id")
    parser.add_argument("--data", required=True, help="a .jsonl with question and answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--memory", type=int, nargs="*", default=[], help="rows to measure memory with"
    )
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_caching()
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    lines = Path(arguments.data).read_text().splitlines()
    pairs = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    rows = [compare(form, pairs, tokenizer, arguments.repeats) for form in FORMS]
    header = [f"{len(pairs):,} rows", "TRL rows/s", "ours rows/s", "ratio", "promised"]
    text = f"# Preparing data\n\n{table(header, rows)}\n"
    for number in arguments.memory:
        text += f"{growth_over(number, pairs, tokenizer)}\n"
    publish(text + provenance(), arguments.output)


if __name__ == "__main__":
    main()
