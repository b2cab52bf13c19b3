"""Prepared data: speed and size of `trl-packing prepare`, and the start of a run on its folder.

    python benchmarks/prepared.py --tokenizer PATH --data gsm8k_train.jsonl --rows 1000000 \\
        --num_proc 2 --output benchmarks/results/prepared.md

Rows are conversations of GSM8K, each with a number of its own. The command prepares them from a
file. Then a trainer is built three times on a model of a few weights: on the rows for the first
time, on the rows from the cache of `datasets`, and on the folder. Their documents and reports must
be the same. Its memory is the
anonymous memory of all of its processes (Linux).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars
from machine import Peak, anonymous_mib, anonymous_mib_of_tree, provenance, publish, table
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trl_packing import PackedSFTConfig, PackedSFTTrainer, load_prepared, load_rows

SETTINGS: dict[str, Any] = {"max_length": 2048, "train_on": "assistant"}


def write_rows(path: Path, number: int, data: str) -> None:
    pairs = [json.loads(line) for line in Path(data).read_text().splitlines()]
    with path.open("w") as file:
        for i in range(number):
            pair = pairs[i % len(pairs)]
            user = {"role": "user", "content": f"{i}. {pair['question']}"}
            assistant = {"role": "assistant", "content": pair["answer"]}
            file.write(json.dumps({"messages": [user, assistant]}) + "\n")


def command(rows: Path, out: Path, arguments: argparse.Namespace) -> list[str]:
    settings = [word for name, value in SETTINGS.items() for word in (f"--{name}", str(value))]
    words = ["-m", "trl_packing.cli", "prepare", str(rows), str(out), *settings]
    return [
        *(sys.executable, *words, "--model", arguments.tokenizer),
        *("--num_proc", str(arguments.num_proc), "--json"),
    ]


def prepare(
    rows: Path, out: Path, arguments: argparse.Namespace
) -> tuple[dict[str, Any], float, float]:
    """Run the command; return what it says, its seconds, and the most memory of it in MiB."""
    began = time.perf_counter()
    running = subprocess.Popen(command(rows, out, arguments), stdout=subprocess.PIPE, text=True)
    peak = Peak(partial(anonymous_mib_of_tree, running.pid), interval=1.0)  # a sample takes time
    peak.start()
    said = running.communicate()[0]
    seconds = time.perf_counter() - began
    peak.stop.set()
    peak.join()
    if running.returncode:
        raise SystemExit(f"the command ended with status {running.returncode}")
    return json.loads(said), seconds, peak.mib


def build(dataset: Dataset, tokenizer: Any, folder: str) -> PackedSFTTrainer:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    args = PackedSFTConfig(folder, report_to="none", use_cpu=True, bf16=False, **SETTINGS)
    model = LlamaForCausalLM(config)
    return PackedSFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)


def measured(make: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what `make` returns, its seconds, and the memory by which it grew, in MiB."""
    before, peak = anonymous_mib(), Peak()
    peak.start()
    began = time.perf_counter()
    made = make()
    seconds = time.perf_counter() - began
    peak.stop.set()
    peak.join()
    return made, seconds, max(0.0, peak.mib - before)


def size_of(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="a chat model's folder or hub id")
    parser.add_argument("--data", required=True, help="a .jsonl with question and answer")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--num_proc", type=int, default=1)
    parser.add_argument("--memory", action="store_true", help="only the memory of the command")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        file, out = folder / "rows.jsonl", folder / "out"
        write_rows(file, arguments.rows, arguments.data)
        if arguments.memory:
            print(f"at most {prepare(file, out, arguments)[2]:,.0f} MiB in all processes")
            return
        rows = load_rows(str(file))  # so that no run below parses the file
        told, seconds, most_mib = prepare(file, out, arguments)
        documents, load_seconds, _ = measured(lambda: load_prepared(out))
        starts = {
            name: measured(partial(build, dataset, tokenizer, place))
            for name, dataset in (
                ("rows, first time", rows),
                ("rows, from the cache", rows),
                ("prepared folder", documents),
            )
        }
        reports = {str(trainer.packing_report) for trainer, *_ in starts.values()}
        assert len(reports) == 1, reports
        first = starts["rows, first time"][0].train_dataset
        for number in range(0, len(documents), max(1, len(documents) // 1000)):
            assert documents[number] == {name: first[number][name] for name in documents[number]}
        stored = told["sets"]["train"]
        header = ["start of a trainer", "s", "MiB in memory"]
        lines = [
            [name, f"{taken:,.1f}", f"{grown:,.0f}"] for name, (_, taken, grown) in starts.items()
        ]
        text = (
            f"# Prepared data\n\n{stored['rows']:,} conversations, {stored['tokens']:,} tokens, "
            f"{arguments.num_proc} processes.\n\n"
            f"- prepared in {seconds:,.0f} s ({stored['rows'] / seconds:,.0f} rows/s, "
            f"all of the command), with at most {most_mib:,.0f} MiB in all of its processes\n"
            f"- rows {size_of(file)}, prepared {size_of(out)}\n"
            f"- `load_prepared`: {1000 * load_seconds:,.0f} ms\n\n{table(header, lines)}\n"
        )
        publish(text + provenance(), arguments.output)


if __name__ == "__main__":
    main()
