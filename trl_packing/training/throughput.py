"""The speed of a run: counts of trained documents and tokens, over the seconds of training.

    micro-batch        `Counts` of one rank, on the CPU
        │  add
    interval           since the last log, all ranks        tokens_per_second, utilization, mfu, ...
        │  add
    run                since train() began                  train_tokens_per_second, ...

docs/metrics.md defines each of the names.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields

GIB = 2**30


@dataclass(frozen=True)
class Counts:
    """Counts of trained documents.

    Attributes:
        documents: number of documents.
        tokens: without padding.
        trained_tokens: targets of the loss.
        room: tokens that fit (bins × capacity); those that were computed, padding included, if
            nothing is packed into bins.
        flops: operations that the rows need on this model (`attention.flops`); 0 if unknown.
        computed: tokens of the rows, padding included.
        shared: tokens that were not computed, because a document before in the row has them.
        images: of the documents.
    """

    documents: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    room: int = 0
    flops: float = 0.0
    computed: int = 0
    shared: int = 0
    images: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def shared_by(self, ranks: int) -> "Counts":
        """Return the counts of one rank, given the sum of `ranks` ranks that counted the same."""
        return Counts(
            self.documents // ranks,
            self.tokens // ranks,
            self.trained_tokens // ranks,
            self.room // ranks,
            self.flops / ranks,
            self.computed // ranks,
            self.shared // ranks,
            self.images // ranks,
        )

    @staticmethod
    def summed(rows: Sequence[Sequence[float]]) -> "Counts":
        """Return the sum of counts, each given as a row of numbers."""
        sums = [sum(numbers) for numbers in zip(*rows, strict=True)]
        names = (count.name for count in fields(Counts))
        return Counts(
            **{n: x if n == "flops" else int(x) for n, x in zip(names, sums, strict=True)}
        )


@dataclass(frozen=True)
class Machine:
    """The devices of a run.

    Attributes:
        peak_flops: FLOP/s of all devices; None if that of any is unknown.
        peak_memory_bytes: of the rank that used most; None if unknown.
    """

    peak_flops: float | None = None
    peak_memory_bytes: float | None = None


class Stopwatch:
    """Seconds of training, without the pauses.

    >>> times = iter([0.0, 2.0, 10.0, 13.0])
    >>> watch = Stopwatch(lambda: next(times))
    >>> watch.start()
    >>> with watch.pause():  # from 2 to 10
    ...     pass
    >>> watch.seconds()
    5.0
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._before = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start the clock; no-op if it is running."""
        if self._since is None:
            self._since = self._clock()

    @property
    def is_running(self) -> bool:
        return self._since is not None

    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else self._clock() - self._since)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Stop the clock inside the block; no-op if it is not running."""
        if self._since is None:
            yield
            return
        self._before, self._since = self.seconds(), None
        try:
            yield
        finally:
            self.start()


class Throughput:
    """Counts and seconds of a run, and of the interval since the last log."""

    def __init__(self, first_step: int = 0, clock: Callable[[], float] = time.perf_counter):
        self.watch = Stopwatch(clock)
        self.run = Counts()
        self._local = Counts()  # of this rank, since they were last shared
        self._interval = Counts()
        self._first_step = self._last_step = first_step
        self._last_seconds = 0.0

    def add(self, counts: Counts) -> None:
        """Add a micro-batch of this rank."""
        self._local += counts

    def take_local(self) -> Counts:
        """Return the counts that this rank has added since the last call."""
        local, self._local = self._local, Counts()
        return local

    def add_shared(self, counts: Counts) -> None:
        """Add counts of all ranks together."""
        self._interval += counts
        self.run += counts

    def interval_metrics(self, step: int, machine: Machine) -> dict[str, float]:
        """Return the metrics since the last call; `step` optimizer steps are done."""
        seconds = self.watch.seconds()
        past, steps = seconds - self._last_seconds, step - self._last_step
        found = metrics(self._interval, past, steps, machine, shares=bool(self.run.shared))
        self._interval, self._last_seconds, self._last_step = Counts(), seconds, step
        return found

    def run_metrics(self, step: int, machine: Machine) -> dict[str, float]:
        """Return the metrics and totals of the whole run; their names begin with train_."""
        seconds = self.watch.seconds()
        totals = {
            "documents": self.run.documents,
            "tokens": self.run.tokens,
            "trained_tokens": self.run.trained_tokens,
            **({"computed_tokens": self.run.computed} if self.run.shared else {}),
            **({"images": self.run.images} if self.run.images else {}),
            "seconds": seconds,
        }
        steps, shares = step - self._first_step, bool(self.run.shared)
        found = totals | metrics(self.run, seconds, steps, machine, shares=shares)
        return {f"train_{name}": value for name, value in found.items()}


def metrics(
    counts: Counts, seconds: float, steps: int, machine: Machine, *, shares: bool = False
) -> dict[str, float]:
    """Return the metrics of `counts` in `seconds` and `steps`; unknown ones are left out.

    Args:
        counts: of all ranks.
        seconds: of training.
        steps: optimizer steps.
        machine: the devices of all ranks.
        shares: whether documents of the run have shared tokens.
    """
    found: dict[str, float] = {}
    if not counts.room:  # the batches of a user's collator have no CPU copy
        return found
    if seconds > 0:
        found["tokens_per_second"] = counts.tokens / seconds
        found["trained_tokens_per_second"] = counts.trained_tokens / seconds
        found["documents_per_second"] = counts.documents / seconds
        if counts.images:
            found["images_per_second"] = counts.images / seconds
        if shares:
            found["computed_tokens_per_second"] = counts.computed / seconds
    found["utilization"] = (counts.tokens - counts.shared) / counts.room
    if steps:
        found["documents_per_step"] = counts.documents / steps
    if machine.peak_memory_bytes:
        found["peak_memory_gib"] = machine.peak_memory_bytes / GIB
    if machine.peak_flops and counts.flops and seconds > 0:
        found["mfu"] = counts.flops / seconds / machine.peak_flops
    return found


def machine_of(peaks: Sequence[float], memories: Sequence[float]) -> Machine:
    """Return the machine of ranks with these peaks and memories; 0 means unknown."""
    return Machine(
        peak_flops=sum(peaks) if all(peaks) else None,
        peak_memory_bytes=max(memories) or None,
    )
