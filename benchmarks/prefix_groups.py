"""Tokens computed and prefixes of a step, by the size of groups (prefix_sharing="group").

    python benchmarks/prefix_groups.py --tokenizer PATH --data FOLDER \\
        --output benchmarks/results/prefix_groups.md      # about half a minute

An epoch of each data set is planned in bins of 8,192 tokens. No model runs. FOLDER holds
gsm8k_train.jsonl and glaive_toolcall_en_demo.json.
"""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from machine import provenance, publish, table
from prefix_data import (
    THINKING,
    answers,
    chats,
    every_turn,
    reasoning_conversations,
    tool_conversations,
)
from transformers import AutoTokenizer

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler

CAPACITY = 8192
SIZES = (2, 4, 8, 16, 32)
ALL = 10**6

DATA: dict[str, tuple[Callable[[Path], list[Any]], str | None]] = {
    "16 answers of 128 tokens to each of 200 prompts of 512": (
        lambda _: answers(200, 16, 512, 128),
        None,
    ),
    "4 answers of 128 tokens to each of 300 prompts of 2,048": (
        lambda _: answers(300, 4, 2048, 128),
        None,
    ),
    "tool conversations (Glaive), a document for each turn": (
        lambda folder: tool_conversations(folder, ALL),
        None,
    ),
    "reasoning conversations (GSM8K), a document for each turn": (
        lambda folder: reasoning_conversations(folder, 1000),
        THINKING,
    ),
    "GSM8K chats with a system prompt": (lambda folder: chats(folder, ALL), None),
}


def documents_of(name: str, folder: Path, tokenizer: Any) -> ArrowDocuments:
    make, template = DATA[name]
    tokenizer.chat_template = template or tokenizer.chat_template
    rows = make(folder)
    if "messages" in rows[0]:
        rows = [d for row in rows for d in every_turn(row["messages"], tokenizer)]
    rows = [row for row in rows if len(row["input_ids"]) <= CAPACITY]
    return ArrowDocuments(Dataset.from_list(rows), ["input_ids", "labels"])


def measure(documents: ArrowDocuments) -> list[list[str]]:
    """Return a line for bins of single documents, and for groups of each size."""
    index = PrefixIndex.of(documents)
    lengths = documents.lengths()
    lines = []
    for size in (1, *SIZES):
        groups = group_documents(index, lengths, CAPACITY, size) if size > 1 else None
        bins = PackedBatchSampler(lengths, CAPACITY, groups=groups)
        tokens = _computed(index, lengths, bins.micro_batches())
        lines.append(
            [
                "`bin`" if groups is None else f"`group`, {size}",
                f"{len(bins):,}",
                f"{lengths.sum() / tokens:.2f}×",
            ]
        )
    return lines


def _computed(index: PrefixIndex, lengths: np.ndarray, batches: list[np.ndarray]) -> int:
    offsets = np.cumsum([0, *map(len, batches)])
    return int(index.computed_tokens(lengths, np.concatenate(batches), offsets).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", required=True, help="with a chat template")
    parser.add_argument("--data", required=True, type=Path, help="folder of both data sets")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    text = (
        "# Sizes of groups\n\nFewer tokens computed than the documents have, in bins of "
        f"{CAPACITY:,} tokens:\n\n"
    )
    header = ["`prefix_sharing`", "bins", "in bins"]
    for name in DATA:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
        documents = documents_of(name, arguments.data, tokenizer)
        tokens = int(documents.lengths().sum())
        text += f"## {name[0].upper()}{name[1:]}\n\n"
        text += f"{len(documents):,} documents, {tokens:,} tokens\n\n"
        text += table(header, measure(documents)) + "\n"
    publish(text + provenance(("trl", "transformers")), arguments.output)


if __name__ == "__main__":
    main()
