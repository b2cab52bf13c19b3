"""Speed of the training dataloader, from documents to collated batches, compared with TRL's.

    python benchmarks/dataloader.py --output benchmarks/results/dataloader.md       # half a minute

Both trainers pack the same tokenized documents into rows of 4,096 tokens. Their dataloaders run
through an epoch without a model, in the main process and in turns. Each must deliver every token.
"""

import argparse
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

from datasets import Dataset
from machine import provenance, publish, table
from step import documents, model
from trl import SFTConfig, SFTTrainer

from trl_packing import PackedSFTTrainer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.tiny import tiny_tokenizer

NUM_TOKENS, ROWS = 4096, 1000


def build(trainer_class: type, dataset: Dataset, folder: str, rows: int) -> SFTTrainer:
    return trainer_class(
        model(1024, "fp32", NUM_TOKENS),
        SFTConfig(
            output_dir=folder,
            packing=True,
            max_length=NUM_TOKENS,
            per_device_train_batch_size=rows,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=dataset,
        processing_class=tiny_tokenizer(),
    )


def epoch(trainer: SFTTrainer) -> tuple[int, float]:
    """Return the tokens of one epoch, and the seconds spent on collating them."""
    loader = trainer.get_train_dataloader()
    began = time.perf_counter()
    num_tokens = sum(batch["input_ids"].numel() for batch in loader)
    return num_tokens, time.perf_counter() - began


def compare(dataset: Dataset, rows: int, turns: int) -> list[str]:
    speeds: dict[str, list[float]] = {"TRL": [], "ours": []}
    delivered = {}
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            "TRL": build(SFTTrainer, dataset, folder, rows),
            "ours": build(PackedSFTTrainer, dataset, folder, rows),
        }
        for _ in range(turns):
            for name, trainer in trainers.items():
                delivered[name], seconds = epoch(trainer)
                speeds[name].append(delivered[name] / seconds / 1e6)
    expected = sum(map(len, dataset["input_ids"]))
    assert delivered["TRL"] == delivered["ours"] == expected, (delivered, expected)
    theirs, ours = (statistics.median(speeds[name]) for name in ("TRL", "ours"))
    return [f"{rows}", f"{theirs:.1f}", f"{ours:.1f}", f"{ours / theirs:.1f}×", "≥ 5×"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="epochs of each trainer")
    parser.add_argument("--output", help="Markdown file to write")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    dataset = documents(NUM_TOKENS, 1024, ROWS)
    rows = [compare(dataset, size, arguments.turns) for size in (1, 4)]
    header = ["rows a batch", "TRL Mtokens/s", "ours Mtokens/s", "ratio", "promised"]
    text = f"# The training dataloader\n\n{table(header, rows)}\n{provenance()}"
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
