"""What preparation kept and lost, and what a training step is made of: numbers, then words.

Everything here is a value object. `prepare` and the trainer fill it in; `str()` is what a user
reads.
"""

import json
from dataclasses import asdict, dataclass, field

# Above this share of lost training tokens the report warns.
WARN_LOST_SHARE = 0.01


@dataclass(frozen=True)
class PreparationCounts:
    """What happened to the documents of one data set on their way through the overflow policy.

    Tokens and trained tokens are counted before (`*_in`) and after (`*_out`).
    """

    documents_in: int = 0
    documents_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    trained_in: int = 0
    trained_out: int = 0
    overlong: int = 0
    empty: int = 0
    untrained: int = 0
    policy: str = "truncate"
    capacity: int | None = None

    def __str__(self) -> str:
        lines = []
        if self.overlong:
            lines.append(
                f"{_documents(self.overlong)} longer than max_length={self.capacity}: "
                f"{_VERB[self.policy]}"
            )
        if self.untrained:
            empty = f" ({self.empty:,} of them empty)" if self.empty else ""
            lines.append(f"{_documents(self.untrained)} without a trained token: dropped{empty}")
        tokens, trained = self.tokens_in - self.tokens_out, self.trained_in - self.trained_out
        if tokens or trained:
            lines.append(f"tokens lost: {tokens:,}; trained tokens lost: {trained:,}")
        if self.trained_in and trained / self.trained_in > WARN_LOST_SHARE:
            lines.append(
                f"warning: {trained / self.trained_in:.1%} of the trained tokens are lost; "
                "raise max_length or set overflow='split'"
            )
        return "\n".join(lines)


def _documents(number: int) -> str:
    return f"{number:,} document{'s' * (number != 1)}"


_VERB = {
    "truncate": "cut at the end",
    "truncate_start": "cut at the start",
    "truncate_prompt": "prompt cut at the start",
    "drop": "dropped",
    "split": "split into pieces",
    "wrapped": "cut where rows end",
    "error": "refused",
}


@dataclass(frozen=True)
class PackingReport:
    """What a training run is made of, as the plan of its first epoch knows it.

    Counts are None where a data set has no length (a stream), `bins` where nothing is packed.
    """

    ranks: int
    accumulation: int
    micro_batch: str
    attention: str
    capacity: int | None
    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    bins: int | None = None
    micro_batches_per_epoch: int | None = None
    steps_per_epoch: int | None = None
    documents_per_step: float | None = None
    preparation: PreparationCounts = field(default_factory=PreparationCounts)

    @property
    def utilization(self) -> float | None:
        """Real tokens / (bins × capacity); None without bins or without capacity."""
        if self.tokens is None or not self.bins or not self.capacity:
            return None
        return self.tokens / (self.bins * self.capacity)

    def to_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self) | {"utilization": self.utilization})

    def __str__(self) -> str:
        lines = [self._data(), self._plan(), self._step(), f"attention    {self.attention}"]
        lines += [f"             {line}" for line in str(self.preparation).splitlines()]
        width = max(len(line) for line in lines)
        return "\n".join([f"{' trl_packing ':─^{width}}", *filter(None, lines), "─" * width])

    def _data(self) -> str:
        if self.documents is None or not self.tokens or self.trained_tokens is None:
            return "documents    a stream: counted as it is read"
        share = f" ({self.trained_tokens / self.tokens:.0%})"
        return (
            f"documents    {self.documents:,} · {self.tokens:,} tokens · "
            f"{self.trained_tokens:,} trained{share}"
        )

    def _plan(self) -> str:
        if self.bins is None:
            return f"micro-batch  {self.micro_batch}"
        if self.utilization is None:
            return f"packed into  {self.bins:,} rows"
        return (
            f"packed into  {self.bins:,} bins of {self.capacity:,} tokens · "
            f"{self.utilization:.2%} filled"
        )

    def _step(self) -> str:
        if self.steps_per_epoch is None:
            return ""
        return (
            f"an epoch     {self.micro_batches_per_epoch:,} micro-batches · "
            f"{self.steps_per_epoch:,} optimizer steps · "
            f"{self.documents_per_step:,.1f} documents a step"
            f" ({self.ranks} rank{'s' * (self.ranks > 1)} × {self.accumulation} accumulated × "
            f"{self.micro_batch})"
        )
