"""Loss, documents and tokens of each source while a run trains, as an evaluation has them.

    row           documents and tokens of each source         on the CPU, from the host copy
    micro-batch   Σ w · loss, Σ w and trained tokens          on the device (loss/sums.py)
        │  shared with all other counts, once a log
    interval      loss_<source>, num_documents_<source>, num_tokens_<source>, ...
        │  add
    run           train_loss_<source>, ...

Interval and run are those of `throughput.py`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset

from trl_packing.config import PackingOptions
from trl_packing.documents.host_row import HostRow
from trl_packing.documents.labels import SOURCE
from trl_packing.loss.sources import Sources
from trl_packing.loss.sums import OF_SOURCE, LossSums
from trl_packing.training.columns import columns_of

logger = get_logger(__name__)

_ON_CPU = 2  # documents and tokens of each source


def training_sources(dataset: Any, source_column: str | None) -> Sources | None:
    """Return the sources of a training set; None if it names none.

    A column that names no sources is warned of: evaluation sets may still need the setting.

    Args:
        dataset: the prepared training set.
        source_column: the setting. The column of a mixture takes precedence.
    """
    if not isinstance(dataset, Dataset):
        return None
    column = SOURCE if SOURCE in dataset.column_names else source_column
    if column is None or column not in dataset.column_names:
        return None
    try:
        return Sources.of(dataset, column, "the training set")
    except ValueError as problem:
        logger.warning_once(f"the training log has no losses by source: {problem}")
        return None


def stream_sources(dataset: IterableDataset, options: PackingOptions) -> tuple[str, ...]:
    """Return the names of the streams that were joined to `dataset`; none of a single stream."""
    if SOURCE in columns_of(dataset) and isinstance(options.mixture, dict):
        return tuple(name for name, share in options.mixture.items() if share.get("weight"))
    if options.source_column is not None:
        logger.warning_once(
            f"the training log has no losses by source: source_column={options.source_column!r} of "
            "a stream tells them only by being read; pass train_dataset as a dictionary of streams"
        )
    return ()


class SourceMeter:
    """Counts what a run trains of each source.

    Args:
        sums: of the micro-batches of this rank; is told the number of sources.

    Attributes:
        names: of the sources; empty if they are not told apart.
    """

    def __init__(self, sums: LossSums):
        self.sums = sums
        self.names: tuple[str, ...] = ()
        self.start_run()

    def follow(self, names: tuple[str, ...]) -> None:
        """Count the sources with these names from now on; no-op if they are the same."""
        if names != self.names:
            self.names = names
            self.sums.tell_apart(0)  # forget the sums of others
            self.sums.tell_apart(len(names))
            self.start_run()

    def start_run(self) -> None:
        """Start from zero."""
        self._counts = np.zeros(self.num_on_cpu)
        self._interval = np.zeros((len(self.names), _ON_CPU + OF_SOURCE))
        self._run = self._interval.copy()

    # --- counting -----------------------------------------------------------------------------

    @property
    def num_on_cpu(self) -> int:
        """Number of values that `take_counts` returns."""
        return _ON_CPU * len(self.names)

    def count(self, row: HostRow) -> None:
        """Add a micro-batch of this rank."""
        if row.sources is None or not self.names:
            return
        counts, number = self._counts.reshape(len(self.names), _ON_CPU), 1 + len(self.names)
        ids = 1 + row.sources  # 0 belongs to no source
        counts[:, 0] += np.bincount(ids, minlength=number)[1:]
        counts[:, 1] += np.bincount(ids, row.lengths, minlength=number)[1:]

    def take_counts(self) -> list[float]:
        """Return the documents and tokens of each source that this rank has added since."""
        counts, self._counts = self._counts, np.zeros(self.num_on_cpu)
        return counts.tolist()

    def add_shared(self, counts: Sequence[float], sums: Sequence[float], shared_by: int) -> None:
        """Add numbers of all ranks.

        Args:
            counts: sums of `take_counts`.
            sums: of no source and of each, `OF_SOURCE` of `LossSums` each.
            shared_by: ranks that have counted the same micro-batches.
        """
        if not self.names:
            return
        on_cpu = np.reshape(counts, (-1, _ON_CPU))
        scored = np.reshape(sums, (-1, OF_SOURCE))[1:]  # row 0 belongs to no source
        self._interval += np.concatenate([on_cpu, scored], axis=1) / shared_by

    # --- metrics ------------------------------------------------------------------------------

    def interval_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        interval, self._interval = self._interval, np.zeros_like(self._interval)
        self._run = self._run + interval
        return self._metrics(interval)

    def run_metrics(self) -> dict[str, float]:
        """Return those of the whole run, up to now; their names begin with train_."""
        found = self._metrics(self._run + self._interval)
        return {f"train_{name}": value for name, value in found.items()}

    def _metrics(self, numbers: np.ndarray) -> dict[str, float]:
        found: dict[str, float] = {}
        counts_rows, scores = (numbers[:, span].any() for span in (slice(0, 2), slice(2, 5)))
        for name, row in sorted(zip(self.names, numbers.tolist(), strict=True)):
            documents, tokens, losses, weights, trained = row
            if weights:
                found[f"loss_{name}"] = losses / weights
            if counts_rows:  # the batches of a user's collator have no CPU copy
                found[f"num_documents_{name}"] = int(documents)
                found[f"num_tokens_{name}"] = int(tokens)
            if scores:  # a user's compute_loss may never call ours
                found[f"num_trained_tokens_{name}"] = int(trained)
        return found
