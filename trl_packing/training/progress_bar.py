"""Shows the throughput of a run on its progress bar."""

from typing import Any

from transformers import TrainerCallback
from trl import SFTTrainer


class ThroughputOnBar(TrainerCallback):
    """Shows the throughput of each log on the progress bar, in a terminal or a notebook."""

    def __init__(self, trainer: SFTTrainer):
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        text = in_short(logs or {})
        if not text or not state.is_world_process_zero:
            return
        for callback in self.trainer.callback_handler.callbacks:
            bar: Any = getattr(callback, "training_bar", None)
            if hasattr(bar, "set_postfix_str"):  # rich's has none, and shows all logs
                bar.set_postfix_str(text)
            tracker: Any = getattr(callback, "training_tracker", None)
            if hasattr(tracker, "prefix"):
                tracker.prefix = text


def in_short(logs: dict[str, float]) -> str:
    """Return the text for a progress bar; empty if `logs` are not of training.

    >>> in_short({"tokens_per_second": 12345.6, "utilization": 0.9987, "mfu": 0.41})
    '12.3k tokens/s, 99.9% full, 41% MFU'
    >>> in_short({"tokens_per_second": 24000.0, "computed_tokens_per_second": 10000.0})
    '24k tokens/s (10k computed)'
    """
    if "tokens_per_second" not in logs:
        return ""
    computed = logs.get("computed_tokens_per_second")
    beside = "" if computed is None else f" ({_scaled(computed)} computed)"
    words = [f"{_scaled(logs['tokens_per_second'])} tokens/s{beside}"]
    if "utilization" in logs:
        words.append(f"{logs['utilization']:.1%} full")
    if "mfu" in logs:
        words.append(f"{logs['mfu']:.0%} MFU")
    return ", ".join(words)


def _scaled(number: float) -> str:
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:,.3g}G"
