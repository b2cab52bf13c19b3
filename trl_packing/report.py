"""What preparation kept and lost, and what a training step is made of: numbers, then words.

Everything here is a value object. `overflow` and the trainer fill it in; `str()` is what a user
reads.
"""

import json
from dataclasses import asdict, astuple, dataclass, field, replace

# Below so many optimizer steps an epoch it warns: few steps learn little, whatever their size.
WARN_STEPS = 20

# Above this share of lost trained tokens, or of documents that lost a stop token, it warns.
WARN_LOST_SHARE = 0.01


@dataclass(frozen=True)
class Amount:
    """Documents, their tokens, the trained ones of these, and the stop tokens of the trained."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    stops: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Amount") -> "Amount":
        return Amount(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        trained = f", {self.trained:,} trained" * bool(self.trained)
        stops = f", {_number(self.stops, 'stop token')}" * bool(self.stops)
        return _number(self.tokens, "token") + trained + stops


@dataclass(frozen=True)
class Step:
    """What one step of preparation lost: `concerned` documents (or pieces) are `why`.

    `lost` is what there was before the step less what there was after it. Pieces are documents from
    then on, so a step that splits documents loses a negative number of them.
    `lost_a_stop` counts the documents that have fewer trained stop tokens than before, `empty`
    those of the concerned that have no token at all.
    """

    concerned: int
    why: str
    lost: Amount = field(default_factory=Amount)
    lost_a_stop: int = 0
    way_out: str = ""
    unit: str = "document"
    empty: int = 0

    def __add__(self, other: "Step") -> "Step":
        """Return the same step on the documents of both."""
        return replace(
            self,
            concerned=self.concerned + other.concerned,
            lost=self.lost + other.lost,
            lost_a_stop=self.lost_a_stop + other.lost_a_stop,
            empty=self.empty + other.empty,
        )

    def __str__(self) -> str:
        empty = f" ({self.empty:,} of them empty)" * bool(self.empty)
        lost = f"; lost {self.lost}" * (self.lost.tokens > 0 or self.lost.trained > 0)
        return f"{_number(self.concerned, self.unit)} {self.why}{empty}{lost}"


@dataclass(frozen=True)
class PreparationCounts:
    """What came into the preparation of one data set, what came out, and each step between them.

    `notes` are sentences on the documents that are no loss.
    """

    before: Amount = field(default_factory=Amount)
    after: Amount = field(default_factory=Amount)
    steps: tuple[Step, ...] = ()
    notes: tuple[str, ...] = ()

    def adds_up(self) -> bool:
        """Whether the steps lost exactly what came in and did not come out."""
        return self.before - sum((step.lost for step in self.steps), Amount()) == self.after

    def __add__(self, other: "PreparationCounts") -> "PreparationCounts":
        """Return the counts of two parts of a data set; of notes, those of the first with any."""
        steps = {step.why: step for step in self.steps}
        for step in other.steps:
            steps[step.why] = steps[step.why] + step if step.why in steps else step
        return PreparationCounts(
            self.before + other.before,
            self.after + other.after,
            tuple(steps.values()),
            self.notes or other.notes,
        )

    def with_note(self, note: str) -> "PreparationCounts":
        return replace(self, notes=(*self.notes, note))

    def __str__(self) -> str:
        lines = [str(step) for step in self.steps]
        if sum(step.lost.tokens > 0 or step.lost.trained > 0 for step in self.steps) > 1:
            lines.append(f"lost in all: {self.before - self.after}")
        return "\n".join(filter(None, [*lines, self._warning(), *self.notes]))

    def _warning(self) -> str:
        """Return a sentence if more than `WARN_LOST_SHARE` is lost, with the way out of most."""
        shares = {
            "{:.1%} of the trained tokens are lost": _share(
                self.before.trained - self.after.trained, self.before.trained
            ),
            "{:.1%} of the documents lost a stop token": _share(
                sum(step.lost_a_stop for step in self.steps), self.before.documents
            ),
        }
        words = [text.format(n) for text, n in shares.items() if n > WARN_LOST_SHARE]
        if not words:
            return ""
        most = max(self.steps, key=lambda step: (step.lost.trained, step.lost_a_stop))
        return f"warning: {' and '.join(words)}{'; ' * bool(most.way_out)}{most.way_out}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _number(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"


@dataclass(frozen=True)
class PackingReport:
    """What a training run is made of, as the plan of its first epoch knows it.

    Counts are None where a data set has no length (a stream), `bins` where nothing is packed.
    `tokens_per_micro_batch` is None unless shapes are held; then it counts the padding too.
    `given_in_steps` are settings that count optimizer steps, by name.
    """

    ranks: int
    accumulation: int
    micro_batch: str
    attention: str | None
    capacity: int | None
    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    bins: int | None = None
    micro_batches_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    documents_per_step: float | None = None
    padded_documents_per_step: int | None = None
    largest_micro_batch: int | None = None
    loss: str | None = None
    tokens_per_micro_batch: int | None = None
    preparation: PreparationCounts = field(default_factory=PreparationCounts)
    given_in_steps: dict[str, int] = field(default_factory=dict)

    @property
    def utilization(self) -> float | None:
        """Real tokens / (bins × capacity); None without bins or without capacity."""
        if self.tokens is None or not self.bins or not self.capacity:
            return None
        return self.tokens / (self.bins * self.capacity)

    @property
    def padding(self) -> float | None:
        """Share of an epoch's tokens that fills up rows of one shape; None without such rows."""
        held, batches = self.tokens_per_micro_batch, self.micro_batches_per_epoch
        if not held or not batches or self.tokens is None:
            return None
        return 1 - self.tokens / (batches * held)

    def to_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self) | {"utilization": self.utilization})

    @property
    def padded_steps(self) -> int | None:
        """Optimizer steps an epoch of a padded run of the same settings; None for packed rows."""
        if self.documents is None or self.padded_documents_per_step is None:
            return None
        return -(-self.documents // self.padded_documents_per_step)

    def __str__(self) -> str:
        lines = [
            self._data(),
            self._plan(),
            self._shapes(),
            self._step(),
            *self._padded(),
            f"loss         {self.loss}" if self.loss else "",
            f"attention    {self.attention}" if self.attention else "",
        ]
        lines = [line for line in lines if line]
        lines += [f"             {line}" for line in str(self.preparation).splitlines()]
        width = max(len(line) for line in lines)
        return "\n".join([f"{' trl_packing ':─^{width}}", *lines, "─" * width])

    def _data(self) -> str:
        if self.documents is None or not self.tokens or self.trained_tokens is None:
            return f"documents    a stream: {self._read()}"
        share = f" ({self.trained_tokens / self.tokens:.0%})"
        return (
            f"documents    {self.documents:,} · {self.tokens:,} tokens · "
            f"{self.trained_tokens:,} trained{share}"
        )

    def _read(self) -> str:
        read = self.preparation.before
        if not read.documents:
            return "counted as it is read"
        return f"read so far {_number(read.documents, 'document')} · {read}"

    def _plan(self) -> str:
        if self.bins is None:
            return f"micro-batch  {self.micro_batch}"
        if self.utilization is None:
            return f"packed into  {self.bins:,} rows"
        return (
            f"packed into  {self.bins:,} bins of {self.capacity:,} tokens · "
            f"{self.utilization:.2%} filled"
        )

    def _shapes(self) -> str:
        if not self.tokens_per_micro_batch:
            return ""
        line = f"shapes       every micro-batch has {self.tokens_per_micro_batch:,} tokens"
        return line if self.padding is None else f"{line} · {self.padding:.2%} padding in all"

    def _step(self) -> str:
        if self.steps_per_epoch is None:
            return ""
        return (
            f"an epoch     {self.micro_batches_per_epoch:,} micro-batches · "
            f"{self.steps_per_epoch:,} optimizer steps · "
            f"{self.documents_per_step:,.1f} documents, "
            f"{(self.trained_tokens or 0) / self.steps_per_epoch:,.0f} trained tokens a step"
            f" ({self.ranks} rank{'s' * (self.ranks > 1)} × {self.accumulation} accumulated × "
            f"{self.micro_batch})"
        )

    def _in_epochs(self, steps: int, padded_steps: int) -> str:
        """Return what settings in steps come to: a packed step may hold many padded ones."""
        epochs = {n: (v, v / steps, v / padded_steps) for n, v in self.given_in_steps.items()}
        return "; ".join(
            f"{name}={value} is {here:.1f} epochs here, {padded:.1f} padded"
            for name, (value, here, padded) in epochs.items()
        )

    def _padded(self) -> list[str]:
        """Return what a padded run would be, and what keeps its steps; a warning for few steps."""
        lines = []
        steps, size = self.steps_per_epoch, self.padded_documents_per_step
        if steps and self.padded_steps and size and steps != self.padded_steps:
            padded = f"{_number(self.padded_steps, 'step')} of {_number(size, 'document')}"
            lines.append(f"padded       {padded}; documents_per_step={size} keeps them")
            if self.given_in_steps:
                lines.append(f"             {self._in_epochs(steps, self.padded_steps)}")
        largest = self.largest_micro_batch
        if largest and self.capacity and largest > self.capacity:
            lines.append(
                f"             the largest micro-batch seen has {largest:,} tokens; if memory runs "
                "out, raise gradient_accumulation_steps"
            )
        if steps and steps < WARN_STEPS:
            lines.append(
                f"             warning: {_number(steps, 'optimizer step')} an epoch; lower "
                "max_length, per_device_train_batch_size or gradient_accumulation_steps, or set "
                "documents_per_step, if the run has few epochs"
            )
        return lines
