"""The end of sft_packed.py: short log lines, the padding avoided, and a picture of the loss.

step  400 · epoch 1.63 · loss 1.204 · 14,310 tokens/s        while it trains

padded     batches of 20 documents: 693,560 tokens, 64% padding
packed     246 bins of 1,024 tokens: 251,021 tokens, 0% padding

5.79 ┤█▅▂
     │███▇▅▃▁
0.21 ┤███████████▇▅▄▃▃▂▂▁▁▁▁▁
      step 100                 step 1,968
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import ProgressCallback

from trl_packing import PackedSFTTrainer
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.training.epoch_report import PackingReport

BLOCKS = " ▁▂▃▄▅▆▇█"
SHOWN = {  # a metric and its place in a log line
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "train_runtime": "{:,.0f} seconds",
    "train_loss": "mean loss {:.3f}",
    "train_documents": "{:,} documents",
    "train_tokens": "{:,} tokens",
    "eval_loss": "eval_loss {:.3f}",
}


class ShortLines(ProgressCallback):
    """Prints one short line for each log, where transformers prints all of its numbers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line above the progress bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(short_line(state.global_step, logs or {}))


def short_line(step: int, logs: dict[str, float]) -> str:
    """Return the metrics of a log that a reader follows, in one line.

    Example:
        >>> short_line(400, {"loss": 1.2041, "grad_norm": 3.0, "epoch": 1.626})
        'step   400 · epoch 1.63 · loss 1.204'
    """
    found = [words.format(logs[name]) for name, words in SHOWN.items() if name in logs]
    return " · ".join([f"step {step:>5,}", *found])


def padded_tokens(lengths: np.ndarray, size: int, seed: int) -> int:
    """Return the tokens that a model is given in batches of `size`, padded to their longest.

    Args:
        lengths: tokens of each document.
        size: documents of a batch.
        seed: draws the order of the documents.
    """
    drawn = np.random.default_rng(seed).permutation(lengths)
    starts = np.arange(0, len(drawn), size)
    rows = np.diff(np.append(starts, len(drawn)))
    return int((np.maximum.reduceat(drawn, starts) * rows).sum())


def what_packing_did(report: PackingReport, lengths: np.ndarray, epochs: float, seed: int) -> str:
    """Return the tokens of an epoch padded and packed, for as many documents a step.

    Args:
        report: of the run.
        lengths: tokens of the documents that are trained.
        epochs: number of them that were trained.
        seed: draws the order of the padded run.
    """
    size = max(round((report.documents_per_step or 1) / report.ranks / report.accumulation), 1)
    real, padded = int(lengths.sum()), padded_tokens(lengths, size, seed)
    packed = (
        f"{report.bins:,} bins of {report.capacity:,} tokens"
        if report.bins
        else "rows of any length"
    )
    return "\n".join(
        [
            "An epoch, with as many documents a step:",
            f"padded     batches of {size:,}: the model computes {padded:,} tokens, "
            f"{1 - real / padded:.0%} of them padding",
            f"packed     {packed}: the model computes {real:,} tokens, no padding",
            f"avoided    {(padded - real) * epochs:,.0f} tokens of padding in {epochs:g} epochs",
        ]
    )


def losses(trainer: PackedSFTTrainer) -> tuple[list[int], list[float]]:
    """Return the steps at which the training loss was logged, and the losses."""
    logged = [log for log in trainer.state.log_history if "loss" in log]
    return [log["step"] for log in logged], [log["loss"] for log in logged]


def chart(steps: Sequence[int], values: Sequence[float], width: int = 60, height: int = 5) -> str:
    """Return `values` as a picture of characters, `width` columns wide."""
    at = np.linspace(steps[0], steps[-1], width)
    low, high = min(values), max(values)
    heights = (np.interp(at, steps, values) - low) / ((high - low) or 1.0)
    filled = 1 + heights * (8 * height - 1)  # eighths of a character; the lowest value shows too
    labels = {0: f"{high:.2f} ┤", height - 1: f"{low:.2f} ┤"}
    margin = max(map(len, labels.values()))
    lines = []
    for row in range(height):
        eighths = np.clip(filled - 8 * (height - 1 - row), 0, 8).round().astype(int)
        bars = "".join(BLOCKS[n] for n in eighths).rstrip()
        lines.append(f"{labels.get(row, '│'):>{margin}}{bars}")
    first, last = f"step {steps[0]:,}", f"step {steps[-1]:,}"
    return "\n".join([*lines, f"{'':{margin}}{first}{last:>{width - len(first)}}"])


def save_picture(steps: Sequence[int], values: Sequence[float], path: Path) -> bool:
    """Write the losses as a PNG; return False where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, color="#3b78d8")
    axes.set(xlabel="optimizer step", ylabel="training loss", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    return True


def summary(trainer: PackedSFTTrainer, say: Any) -> None:
    """Print what packing did and the loss; write loss.png into the folder of the run."""
    report, dataset = trainer.packing_report, trainer.train_dataset
    # An epoch of a mixture draws documents, which a padded run would not.
    if report is not None and report.lengths is not None and not report.documents_in_data:
        lengths = ArrowDocuments(dataset, ["input_ids"]).lengths()
        epochs, seed = float(f"{trainer.state.epoch or 0.0:.3g}"), trainer.args.seed
        say(f"\n{what_packing_did(report, lengths, epochs, seed)}")
    steps, values = losses(trainer)
    if len(steps) > 1:
        say(f"\nTraining loss\n{chart(steps, values)}")
        path = Path(trainer.args.output_dir) / "loss.png"
        if trainer.is_world_process_zero() and save_picture(steps, values, path):
            say(f"\nThe same as a picture: {path}")
