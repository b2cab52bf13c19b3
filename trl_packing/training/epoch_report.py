"""`PackingReport`: the documents, bins and optimizer steps of an epoch, printed before the first.

print(trainer.packing_report)
"""

import json
from dataclasses import asdict, dataclass, field

from trl_packing.data.counts import PreparationCounts, quantity

# The report warns of fewer optimizer steps an epoch: few steps learn little, whatever their size.
WARN_STEPS = 20


@dataclass(frozen=True)
class PackingReport:
    """The documents, bins and optimizer steps of the first epoch of a run.

    Counts are None where a data set has no length (a stream), `bins` where nothing is packed.

    Attributes:
        micro_batch: the size of a micro-batch in words.
        attention: what keeps documents apart, in words.
        capacity: most tokens of a bin.
        documents_per_step: mean over the optimizer steps of the epoch.
        padded_documents_per_step: of a padded run with the same settings.
        largest_micro_batch: tokens of the largest micro-batch of the first steps.
        loss: the weighting of the loss, in words.
        tokens_per_micro_batch: padding included; None unless static shapes hold it constant.
        preparation: what was kept and lost when documents were prepared.
        given_in_steps: settings that count optimizer steps, by name.
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
        """Share of padding in an epoch's tokens; None unless all rows have one shape."""
        held, batches = self.tokens_per_micro_batch, self.micro_batches_per_epoch
        if not held or not batches or self.tokens is None:
            return None
        return 1 - self.tokens / (batches * held)

    def to_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self) | {"utilization": self.utilization})

    @property
    def padded_steps(self) -> int | None:
        """Optimizer steps an epoch of a padded run with the same settings; None for packed rows."""
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
        return f"read so far {quantity(read.documents, 'document')} · {read}"

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
        """Return settings in steps as epochs: a packed step may hold many padded ones."""
        epochs = {n: (v, v / steps, v / padded_steps) for n, v in self.given_in_steps.items()}
        return "; ".join(
            f"{name}={value} is {here:.1f} epochs here, {padded:.1f} padded"
            for name, (value, here, padded) in epochs.items()
        )

    def _padded(self) -> list[str]:
        """Return the steps of a padded run, how to keep them, and a warning for few steps."""
        lines = []
        steps, size = self.steps_per_epoch, self.padded_documents_per_step
        if steps and self.padded_steps and size and steps != self.padded_steps:
            padded = f"{quantity(self.padded_steps, 'step')} of {quantity(size, 'document')}"
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
                f"             warning: {quantity(steps, 'optimizer step')} an epoch; lower "
                "max_length, per_device_train_batch_size or gradient_accumulation_steps, or set "
                "documents_per_step, if the run has few epochs"
            )
        return lines
