"""Runs whose data are prepared in a folder: small rows, and the arguments of their trainer."""

import json
from pathlib import Path

from datasets import Dataset

from helpers.runs import TrainerCall
from helpers.tiny import tiny_tokenizer
from trl_packing import PackedSFTConfig


def chats(number=24, *, weights=False, sources=False):
    """Return conversations of one to three turns."""
    rows = []
    for i in range(number):
        messages = []
        for turn in range(1 + i % 3):
            weight = {"weight": (None, 0.5, 0.0)[(i + turn) % 3]} if weights else {}
            messages.append({"role": "user", "content": f"Question {i}, part {turn}?", **weight})
            answer = {"role": "assistant", "content": f"So {i}. " * (1 + (i + turn) % 5)}
            messages.append({**answer, **weight})
        rows.append({"messages": messages} | ({"source": "ab"[i % 2]} if sources else {}))
    return Dataset.from_list(rows)


def write_rows(path, rows):
    """Write rows as JSON lines, and return the name of the file."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def settings(folder="unused", **changes):
    """Return the settings of a small run on a CPU."""
    defaults = {"max_length": 64, "use_cpu": True, "bf16": False, "report_to": "none"}
    return PackedSFTConfig(str(folder), **(defaults | changes))


def call_for(rows, evaluated=None, tokenizer=None, model=None, **changes):
    """Return the arguments of a trainer on `rows`."""
    tokenizer = tokenizer or tiny_tokenizer(chat=True)
    return TrainerCall(model, settings(**changes), rows, tokenizer, eval_dataset=evaluated)
