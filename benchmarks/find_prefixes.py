"""Finding common prefixes in a data set: seconds and memory, growth, and share of preparation.

    python benchmarks/find_prefixes.py --tokenizer PATH --data gsm8k_train.jsonl \\
        --output benchmarks/results/find_prefixes.md

`PrefixIndex` sorts the documents of an Arrow file that is mapped into memory, on one core. Memory
is the anonymous memory of the process at its peak (Linux), so the file does not count. A second
table compares its time with that of the preparation of the same rows from text.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_caching, disable_progress_bars
from machine import Peak, anonymous_mib, provenance, publish, table

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.prefix_index import PrefixIndex

LENGTH, VOCABULARY = 300, 50_000
NOTHING = "nothing in common"
SYSTEM = "a system prompt of 290 tokens"
ANSWERS = "16 answers to each question of 150 tokens, scattered"
AT_ONCE = 50_000  # documents


def write(path: Path, kind: str, number: int) -> None:
    """Write documents of 16-bit tokens as an Arrow file."""
    rng = np.random.default_rng(0)
    column = pa.list_(pa.uint16())
    question_of = rng.permutation(number) // 16
    questions = rng.integers(0, VOCABULARY, (number // 16 + 1, 150), dtype=np.uint16)
    with (
        pa.OSFile(str(path), "wb") as file,
        pa.ipc.new_stream(file, pa.schema([("input_ids", column)])) as stream,
    ):
        for first in range(0, number, AT_ONCE):
            rows = rng.integers(0, VOCABULARY, (min(AT_ONCE, number - first), LENGTH), np.uint16)
            if kind == SYSTEM:
                rows[:, :290] = np.arange(290)
            elif kind == ANSWERS:
                rows[:, :150] = questions[question_of[first : first + len(rows)]]
            offsets = np.arange(len(rows) + 1, dtype=np.int32) * LENGTH
            lists = pa.ListArray.from_arrays(offsets, rows.ravel(), type=column)
            stream.write_batch(pa.record_batch([lists], ["input_ids"]))


def measure(path: Path) -> tuple[float, float, float]:
    """Return CPU seconds and GiB of an index, and the share of tokens that neighbors share."""
    documents = ArrowDocuments(Dataset.from_file(str(path)), ["input_ids"])
    documents.lengths()  # any run has read them before
    before, peak = anonymous_mib(), Peak()
    peak.start()
    began = time.process_time()
    index = PrefixIndex.of(documents)
    taken = time.process_time() - began
    peak.stop.set()
    peak.join()
    share = float(index.common.sum(dtype=np.int64)) / (len(documents) * LENGTH)
    return taken, (peak.mib - before) / 2**10, share


def found(kind: str, number: int, folder: Path) -> list[str]:
    """Return a line of the table, measured in a process of its own."""
    path = folder / "documents.arrow"
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(write, (path, kind, number))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        taken, gib, share = pool.apply(measure, (path,))
    path.unlink()
    print(
        f"{number:,} documents, {kind}: {taken:.1f} s, {gib:.2f} GiB", file=sys.stderr, flush=True
    )
    return [f"{number:,}", kind, f"{taken:.1f}", f"{gib:.2f}", f"{share:.0%}"]


def share_of_preparation(form: str, lines: list[str], tokenizer: object) -> list[str]:
    """Return a line of the table: seconds of preparation and of the index."""
    from prepare import FORMS, seconds, trainer  # TRL would be imported in each process

    from trl_packing import PackedSFTTrainer

    pairs = [(row["question"], row["answer"]) for row in map(json.loads, lines)]
    rows = Dataset.from_list([FORMS[form][0](*pair) for pair in pairs])
    with tempfile.TemporaryDirectory() as folder:
        prepared, documents = seconds(trainer(PackedSFTTrainer, rows, tokenizer, folder), rows)
        began = time.perf_counter()
        index = PrefixIndex.of(ArrowDocuments(documents, ["input_ids", "labels"]))
        taken = time.perf_counter() - began
    share = index.common.sum() / sum(map(len, documents["input_ids"]))
    return [form, f"{prepared:.2f}", f"{taken:.3f}", f"{taken / prepared:.1%}", f"{share:.0%}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True, help="a chat model's folder or hub id")
    parser.add_argument("--data", required=True, type=Path, help="a .jsonl of GSM8K")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--growth", type=int, nargs="*", default=[3_000_000, 10_000_000])
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    load = os.getloadavg()[0]
    disable_caching()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            found(kind, arguments.documents, Path(folder)) for kind in (NOTHING, SYSTEM, ANSWERS)
        ]
        rows += [found(ANSWERS, number, Path(folder)) for number in arguments.growth]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    lines = arguments.data.read_text().splitlines()
    forms = ("conversations", "prompt and completion, text")
    shares = [share_of_preparation(form, lines, tokenizer) for form in forms]
    header = ["documents", f"of {LENGTH} tokens", "CPU s", "GiB above the data", "shared"]
    rows_of = f"{len(lines):,} rows of GSM8K"
    text = (
        f"# Finding common prefixes\n\nLoad average {load:.1f} before, {os.getloadavg()[0]:.1f} "
        f"after.\n\n{table(header, rows)}\n"
        f"{table([rows_of, 'preparation, s', 'index, s', 'share', 'shared'], shares)}\n"
    )
    publish(text + provenance(("datasets", "numpy", "pyarrow")), arguments.output)


if __name__ == "__main__":
    main()
