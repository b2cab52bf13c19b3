"""`PackingReport`: the documents, bins and optimizer steps of an epoch, printed before the first.

print(trainer.packing_report)        in a terminal
trainer.packing_report               in a notebook, as a table
trainer.packing_report.to_json()     the numbers
"""

import json
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.isolation.guard import Checked
from trl_packing.training.image_counts import ImageCounts
from trl_packing.training.prefix_sharing import PrefixSavings
from trl_packing.training.report_layout import Line, as_html, as_text
from trl_packing.training.source_shares import SourceShare, source_lines

# The report warns of fewer optimizer steps an epoch: few steps learn little, whatever their size.
WARN_STEPS = 20


@dataclass(frozen=True)
class PackingReport:
    """The documents, bins and optimizer steps of the first epoch of a run.

    Counts are None where a data set has no length (a stream), `bins` where nothing is packed.

    Attributes:
        ranks: data-parallel processes.
        accumulation: micro-batches that a rank accumulates in an optimizer step.
        micro_batch: the size of a micro-batch in words.
        attention: what keeps documents apart, in words.
        capacity: most tokens of a bin.
        documents: that the epoch trains.
        tokens: of these documents.
        trained_tokens: targets of the loss among them.
        bins: of the epoch.
        micro_batches_per_epoch: of all ranks.
        steps_per_epoch: optimizer steps.
        documents_per_step: mean over the optimizer steps of the epoch.
        padded_documents_per_step: of a padded run with the same settings.
        largest_micro_batch: tokens of the largest micro-batch of the first steps.
        loss: the weighting of the loss, in words.
        tokens_per_micro_batch: padding included; None unless static shapes hold it constant.
        preparation: what was kept and lost when documents were prepared.
        given_in_steps: settings that count optimizer steps, by name.
        room: tokens that fit into a micro-batch of bins.
        checked: what was checked on the model, with the evidence.
        prefixes: tokens that documents share, and what the run makes of it; None if unknown.
        tokens_computed: in all bins, where these hold groups of documents; else None.
        sources: of the training set, and how often the epoch draws them; empty if not known.
        documents_in_data: of the data set, where the epoch draws a mixture of them; else None.
        order: of the documents of an epoch, in words; "" if they are drawn at random.
        images: of the documents; None without any.
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
    room: int | None = None
    checked: Checked = field(default_factory=Checked)
    prefixes: PrefixSavings | None = None
    tokens_computed: int | None = None
    sources: tuple[SourceShare, ...] = ()
    documents_in_data: int | None = None
    order: str = ""
    images: ImageCounts | None = None

    @property
    def utilization(self) -> float | None:
        """Real tokens / (bins × capacity); None without bins or without capacity."""
        if self.tokens is None or not self.bins or not self.capacity:
            return None
        return (self.tokens_computed or self.tokens) / (self.bins * self.capacity)

    @property
    def padding(self) -> float | None:
        """Share of padding in an epoch's tokens; None unless all rows have one shape."""
        held, batches = self.tokens_per_micro_batch, self.micro_batches_per_epoch
        if not held or not batches or self.tokens is None:
            return None
        return 1 - self.tokens / (batches * held)

    def to_json(self) -> str:
        """Return the report as one line of JSON. Numbers that are not finite become strings."""
        return json.dumps(_finite(asdict(self) | {"utilization": self.utilization}))

    @property
    def padded_steps(self) -> int | None:
        """Optimizer steps an epoch of a padded run with the same settings; None for packed rows."""
        if self.documents is None or self.padded_documents_per_step is None:
            return None
        return -(-self.documents // self.padded_documents_per_step)

    def __str__(self) -> str:
        return as_text(self.lines())

    def _repr_html_(self) -> str:
        """Return the table that a notebook shows."""
        return as_html(self.lines())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show in IPython, and beside the table of a notebook, what `print` shows."""
        printer.text(str(self))

    def lines(self) -> list[Line]:
        """Return the report as labels and texts."""
        lines = [
            ("turns", str(self.preparation.conversations)),
            ("documents", self._data()),
            *source_lines(self.sources),
            ("images", str(self.images or "")),
            *self._plan(),
            ("prefixes", str(self.prefixes or "")),
            *self._epoch(),
            ("order", self.order),
            *self._padded(),
            ("loss", self.loss or ""),
            ("attention", self.attention or ""),
            ("checked", str(self.checked)),
            *(("", line) for line in str(self.preparation).splitlines()),
        ]
        return [(label, text) for label, text in lines if text]

    def _data(self) -> str:
        if self.documents is None or not self.tokens or self.trained_tokens is None:
            return f"a stream: {self._read()}"
        share = f" ({self.trained_tokens / self.tokens:.0%})"
        drawn = "" if self.documents_in_data is None else f" drawn of {self.documents_in_data:,}"
        return (
            f"{self.documents:,}{drawn} · {self.tokens:,} tokens · {self.trained_tokens:,} trained"
            f"{share}"
        )

    def _read(self) -> str:
        read = self.preparation.before
        if not read.documents:
            return "counted as it is read"
        return f"read so far {quantity(read.documents, 'document')} · {read}"

    def _plan(self) -> list[Line]:
        if self.bins is None:
            return [("micro-batch", self.micro_batch), ("shapes", self._shapes())]
        packed = f"{self.bins:,} rows"
        if self.utilization is not None:
            bins = quantity(self.bins, "bin")
            packed = f"{bins} of {self.capacity:,} tokens · {self.utilization:.2%} filled"
        return [("packed into", packed), ("shapes", self._shapes())]

    def _shapes(self) -> str:
        if not self.tokens_per_micro_batch:
            return ""
        line = f"every micro-batch has {self.tokens_per_micro_batch:,} tokens"
        return line if self.padding is None else f"{line} · {self.padding:.2%} padding in all"

    def _epoch(self) -> list[Line]:
        batches = self.micro_batches_per_epoch
        if self.steps_per_epoch is None or batches is None:
            return []
        most = None if self.tokens_per_micro_batch else self.room or self.largest_micro_batch
        epoch = [
            quantity(self.steps_per_epoch, "optimizer step"),
            quantity(batches, "micro-batch"),
            f"up to {most:,} tokens a micro-batch" if most else "",
        ]
        trained = (self.trained_tokens or 0) / self.steps_per_epoch
        ranks = quantity(self.ranks, "rank")
        documents = f"{self.documents_per_step:,.1f}".removesuffix(".0")
        step = [
            f"{documents} document{'s' * (documents != '1')}",
            f"{trained:,.0f} trained tokens",
            f"{ranks} × {self.accumulation} accumulated × {self.micro_batch}",
        ]
        return [("an epoch", " · ".join(filter(None, epoch))), ("a step", " · ".join(step))]

    def _in_epochs(self, steps: int, padded_steps: int) -> str:
        """Return settings in steps as epochs: a packed step may hold many padded ones."""
        epochs = {n: (v, v / steps, v / padded_steps) for n, v in self.given_in_steps.items()}
        return "; ".join(
            f"{name}={value} is {_short(here)} epochs here, {_short(padded)} if padded"
            for name, (value, here, padded) in epochs.items()
        )

    def _padded(self) -> list[Line]:
        """Return the steps of a padded run, how to keep them, and a warning for few steps."""
        lines = []
        steps, size = self.steps_per_epoch, self.padded_documents_per_step
        if steps and self.padded_steps and size and steps != self.padded_steps:
            padded = f"{quantity(self.padded_steps, 'step')} an epoch"
            keeps = f"{quantity(size, 'document')} each (documents_per_step={size} keeps that)"
            lines.append(("if padded", f"{padded}, {keeps}"))
            if self.given_in_steps:
                lines.append(("", self._in_epochs(steps, self.padded_steps)))
        largest = self.largest_micro_batch
        if largest and self.capacity and largest > self.capacity:
            seen = (
                f"the largest micro-batch seen has {largest:,} tokens; if memory runs out, raise "
                "gradient_accumulation_steps"
            )
            lines.append(("", seen))
        if steps and steps < WARN_STEPS:
            lines.append(
                ("", f"warning: {quantity(steps, 'optimizer step')} an epoch{self._more()}")
            )
        return lines

    def _more(self) -> str:
        """Return the setting that makes more steps of an epoch, where there is one."""
        if self.padded_documents_per_step is None:  # rows or a user's sampler stay as they are
            can = (self.micro_batches_per_epoch or 0) > (self.steps_per_epoch or 0) * self.ranks
            return "; lower gradient_accumulation_steps, if the run has few epochs" * can
        least = self.ranks * self.accumulation
        size = max((self.documents or 0) // WARN_STEPS, least)
        steps = -(-(self.documents or 0) // size)
        if steps <= (self.steps_per_epoch or 0):
            return ""
        return f"; documents_per_step={size} makes {steps}, if the run has few epochs"


def _short(epochs: float) -> str:
    """Return a number of epochs: 2.5, 0.3, 0.02, under 0.01."""
    if epochs >= 0.095:
        return f"{epochs:.1f}"
    return f"{epochs:.2f}" if epochs >= 0.005 else "under 0.01"


def _finite(value: Any) -> Any:
    """Return `value` with floats that JSON cannot hold as strings: "nan", "inf"."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value
