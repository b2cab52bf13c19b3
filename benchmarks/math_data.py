"""Plain `transformers.Trainer` on math data: packed rows compared with padding.

    python benchmarks/math_data.py --data gsm8k_train.jsonl --output benchmarks/results/math.md

About 2 minutes on 2 idle cores. DART-Math's page claims a speedup of 6 to 8 over "simple batching",
which pads every document to the model's maximum length. That is 4,096 tokens for documents of about
512, so arithmetic alone gives a factor of 8. This baseline is "to max" here; "to longest" pads to
the longest document of a batch, as a trainer's collator does. The maximum is 8 times the mean
length, rounded up to 128, as on the page; a second case has half of that.

All three train the same documents with the plain `Trainer`: a Llama of 4 layers × 256 hidden, four
rows a micro-batch, float32. All micro-batches are accumulated into one step, so its loss is the
mean over the same tokens, and must be equal. Times are CPU seconds of the process (all threads),
because other work on the machine affects them less than wall time; each is the median of
alternating turns.

Without --data, documents have random tokens and log-normal lengths with GSM8K's mean and spread.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from machine import provenance, publish, table
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from trl_packing import PackedDataset, enable_packing, make_supervised_dset

TOKENIZER = Path(__file__).parents[1] / "recipes" / "demo" / "tokenizer"
ROWS = 4  # in a micro-batch
WAYS = ("to max", "to longest", "packed")


class Case(NamedTuple):
    documents: Dataset
    tokenizer: Any
    max_length: int


class Watch(TrainerCallback):
    """Measure the CPU seconds of the only step."""

    seconds = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds = time.process_time() - self.began


def documents_of(data: str | None, tokenizer: Any, number: int) -> Dataset:
    """Return `number` random documents, drawn from a file of questions and answers or generated."""
    rng = np.random.default_rng(0)
    if data is None:
        lengths = np.maximum(rng.lognormal(5.35, 0.4, number).astype(int), 8)
        ids = [rng.integers(3, len(tokenizer), n).tolist() for n in lengths]
        labels = [[-100] * (len(i) // 2) + i[len(i) // 2 :] for i in ids]
        mask = [[1] * len(i) for i in ids]
        return Dataset.from_dict({"input_ids": ids, "labels": labels, "attention_mask": mask})
    lines = Path(data).read_text(encoding="utf-8").splitlines()
    chosen = [json.loads(lines[i]) for i in rng.permutation(len(lines))[:number]]
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(row) + "\n" for row in chosen))
        file.flush()
        documents = make_supervised_dset(tokenizer, file.name, "question", "answer")
    assert isinstance(documents, Dataset)
    return documents


def train(way: str, case: Case) -> tuple[float, float]:
    """Return the CPU seconds of a step over all documents, and its loss."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(case.tokenizer),
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=case.max_length,
            use_cache=False,
        )
    )
    dataset: Any = case.documents
    collator: Any = None  # Trainer's default
    if way == "packed":
        dataset = PackedDataset(case.documents, case.tokenizer, case.max_length)
        enable_packing(model, dataset)
    else:
        multiple = case.max_length if way == "to max" else None
        collator = DataCollatorForSeq2Seq(case.tokenizer, pad_to_multiple_of=multiple)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=-(-len(dataset) // ROWS),
            num_train_epochs=1,
            learning_rate=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=dataset, data_collator=collator, callbacks=[watch]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert trainer.state.global_step == 1
    return watch.seconds, trainer.state.log_history[0]["loss"]


def compare(case: Case, turns: int) -> list[str]:
    """Return a line of the table."""
    lengths = [len(ids) for ids in case.documents["input_ids"]]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    losses = []
    for _ in range(turns):
        for way in WAYS:
            taken, loss = train(way, case)
            seconds[way].append(taken)
            losses.append(loss)
    assert max(losses) - min(losses) < 1e-4 * losses[0], losses
    most, longest, packed = (statistics.median(seconds[way]) for way in WAYS)
    mean = statistics.mean(lengths)
    rows = PackedDataset(case.documents, case.tokenizer, case.max_length)
    return [
        f"{case.max_length:,}",
        f"{mean:.0f}",
        f"{case.max_length / mean:.1f}×",
        f"{sum(lengths) / (len(rows) * case.max_length):.1%}",
        *(f"{value:.1f}" for value in (most, longest, packed)),
        f"{most / packed:.1f}×",
        f"{longest / packed:.1f}×",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a .jsonl file with question and answer (GSM8K)")
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="default: the demo's")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    disable_progress_bars()
    load = os.getloadavg()[0]
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    tokenizer.model_max_length = 10**9  # cut nothing
    documents = documents_of(arguments.data, tokenizer, arguments.documents)
    lengths = [len(ids) for ids in documents["input_ids"]]
    eight = -(-8 * sum(lengths) // len(lengths) // 128) * 128
    maxima = [n for n in (eight // 2, eight) if n >= max(lengths)]
    rows = [compare(Case(documents, tokenizer, n), arguments.turns) for n in maxima]
    header = [
        "max length",
        "mean tokens",
        "max ÷ mean",
        "rows filled",
        *(f"{w}, CPU s" for w in WAYS),
    ]
    header += ["to max ÷ packed", "to longest ÷ packed"]
    what = Path(arguments.data).name if arguments.data else "made up"
    text = (
        f"# Packed rows in plain Trainer, on math data\n\n{len(documents)} documents ({what}), a "
        f"step over all of them; load average {load:.1f} before, {os.getloadavg()[0]:.1f} after."
        " Padding costs more than its\nshare of tokens: on a CPU padded attention is computed over "
        "the square of the maximum length.\n\n"
        f"{table(header, rows)}\n{provenance()}"
    )
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
