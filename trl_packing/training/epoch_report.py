"""What an epoch of a run is made of: its sampler, and the report on it, before anything is trained.

documents, settings, ranks  →  PackedBatchSampler  →  PackingReport
"""

import json
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts, quantity
from trl_packing.data.overflow import Overflow
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.packing.document_order import order_seed, packing_seed
from trl_packing.packing.sampler import PackedBatchSampler, attention_cost

# Below so many optimizer steps an epoch it warns: few steps learn little, whatever their size.
WARN_STEPS = 20


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


# Steps looked at for the largest micro-batch: enough to see it coming, in well under a second.
_STEPS_LOOKED_AT = 200

_DEFAULT_SAVE_STEPS = 500  # of transformers; nobody has asked for it


def training_sampler(
    documents: ArrowDocuments,
    args: SFTConfig,
    *,
    packing: bool,
    batch_size: int,
    ranks: int = 1,
    rank: int = 0,
    hidden_size: int | None = None,
    torch_seed: int | None = None,
    subset: np.ndarray | None = None,
) -> PackedBatchSampler:
    """Return the sampler of one rank's training micro-batches.

    batch_size: `per_device_train_batch_size`, times the devices of this process.
    hidden_size: the model's, for the cost of attention; None leaves that out.
    torch_seed: that of torch's global generator when training starts; None stands for `args.seed`.
    subset: the documents to sample from, which it then counts from 0; None for all of them.

    Raises ValueError for documents_per_step on rows that were packed before.
    """
    accumulation, options = args.gradient_accumulation_steps, PackingOptions.of(args)
    per_step, rows = options.documents_per_step, is_packed(documents)
    if rows and per_step is not None:
        raise ValueError(
            f"documents_per_step={per_step} cannot regroup rows that were packed before (they have "
            "seq_lengths); leave it out, or pass the documents"
        )
    if per_step is None and not packing and not rows:
        per_step = batch_size * accumulation * ranks
    sampling = args.train_sampling_strategy
    seed = packing_seed(args)
    if per_step is not None:
        torch_seed = args.seed if torch_seed is None else torch_seed
        seed = order_seed(sampling, data_seed=args.data_seed, torch_seed=torch_seed)
    lengths = documents.lengths()
    return PackedBatchSampler(
        lengths if subset is None else lengths[subset],
        args.max_length,
        bins_per_batch=batch_size,
        documents_per_step=per_step,
        rows=rows,
        num_ranks=ranks,
        rank=rank,
        accumulation=accumulation,
        strategy=args.packing_strategy,
        seed=seed,
        shuffle=sampling != "sequential",
        sampling=sampling,
        attention_cost=attention_cost(hidden_size),
        drop_last=args.dataloader_drop_last,
        allow_idle_ranks=subset is not None,
    )


def plan_settings(args: SFTConfig, *, packing: bool, batch_size: int, ranks: int) -> dict[str, Any]:
    """Return all that the micro-batches of an epoch follow from, beside the documents and lengths.

    Settings that decide how documents are cut are among them. batch_size: as above.
    """
    return {
        "ranks": ranks,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "max_length": args.max_length,
        "overflow": Overflow.from_args(args, packing).policy,
        "packing": packing,
        "packing_strategy": args.packing_strategy,
        "documents_per_step": PackingOptions.of(args).documents_per_step,
        "train_sampling_strategy": str(args.train_sampling_strategy),
        "dataloader_drop_last": args.dataloader_drop_last,
        "seed": packing_seed(args),
    }


def plan_report(
    documents: ArrowDocuments,
    sampler: PackedBatchSampler,
    *,
    attention: str | None,
    loss: str | None,
    preparation: PreparationCounts,
    tokens_per_micro_batch: int | None = None,
    given_in_steps: dict[str, int] | None = None,
) -> PackingReport:
    """Return what the first epoch of `sampler` is made of; `attention` and `loss` in words.

    tokens_per_micro_batch: of every one, its padding too; None if they differ.
    given_in_steps: what `settings_in_steps` returns.
    """
    ranks, accumulation, size = sampler.num_ranks, sampler.accumulation, sampler.bins_per_batch
    steps = -(-len(sampler) // accumulation)
    return PackingReport(
        ranks=ranks,
        accumulation=accumulation,
        micro_batch=_micro_batch_words(sampler),
        attention=attention,
        capacity=sampler.capacity,
        documents=documents.num_documents,
        tokens=int(documents.lengths().sum()),
        trained_tokens=int(documents.num_trained().sum()),
        bins=sampler.num_bins,
        micro_batches_per_epoch=len(sampler) * ranks,
        steps_per_epoch=steps,
        documents_per_step=documents.num_documents / steps,
        padded_documents_per_step=None if sampler.rows else size * accumulation * ranks,
        largest_micro_batch=_largest_micro_batch(sampler),
        loss=loss,
        tokens_per_micro_batch=tokens_per_micro_batch,
        preparation=preparation,
        given_in_steps=given_in_steps or {},
    )


def settings_in_steps(args: Any) -> dict[str, int]:
    """Return the settings of `args` that somebody has given as a number of optimizer steps."""
    given = {"max_steps": args.max_steps, "warmup_steps": args.warmup_steps}
    if args.eval_strategy == "steps":
        given["eval_steps"] = args.eval_steps
    if args.save_strategy == "steps" and args.save_steps != _DEFAULT_SAVE_STEPS:
        given["save_steps"] = args.save_steps
    # Below 1 they are shares of the run.
    return {name: int(value) for name, value in given.items() if value and value >= 1}


def _micro_batch_words(sampler: PackedBatchSampler) -> str:
    if sampler.documents_per_step is None:
        return _words(sampler.bins_per_batch, "bin")
    per_batch = sampler.documents_per_step / (sampler.num_ranks * sampler.accumulation)
    return _words(per_batch, "document")


def _words(number: float, what: str) -> str:
    return f"{number:g} {what}{'s' * (number != 1)}"


def _largest_micro_batch(sampler: PackedBatchSampler) -> int | None:
    """Return the tokens of the largest micro-batch by documents; bins say themselves what fits."""
    if sampler.documents_per_step is None:
        return None
    steps = islice(sampler.steps(), _STEPS_LOOKED_AT)
    return max(int(sampler.lengths[group].sum()) for step in steps for group in step if group)


def report_of_any_sampler(
    documents: ArrowDocuments,
    args: SFTConfig,
    *,
    micro_batches: int | None,
    batch_size: int,
    ranks: int,
    attention: str,
    loss: str | None,
    preparation: PreparationCounts,
) -> PackingReport:
    """Return the report on documents that a sampler of the user's draws, one after another.

    micro_batches: of an epoch of one rank, None where it is not known yet.
    """
    accumulation = args.gradient_accumulation_steps
    return PackingReport(
        ranks=ranks,
        accumulation=accumulation,
        micro_batch=_words(batch_size, "document"),
        attention=attention,
        capacity=args.max_length,
        documents=documents.num_documents,
        tokens=int(documents.lengths().sum()),
        trained_tokens=int(documents.num_trained().sum()),
        micro_batches_per_epoch=None if micro_batches is None else micro_batches * ranks,
        steps_per_epoch=None if micro_batches is None else -(-micro_batches // accumulation),
        documents_per_step=batch_size * accumulation * ranks,
        loss=loss,
        preparation=preparation,
    )


def micro_batch_of_stream(packing: bool, batch_size: int) -> str:
    """Return what a micro-batch of a stream is, in words."""
    return _words(batch_size, "bin" if packing else "document")


def without_plan(
    args: Any,
    *,
    ranks: int,
    micro_batch: str,
    attention: str,
    loss: str | None,
    tokens_per_micro_batch: int | None = None,
) -> PackingReport:
    """Return the report on a stream, which tells its documents only as it is read.

    Raises ValueError for documents_per_step.
    """
    per_step = PackingOptions.of(args).documents_per_step
    if per_step is not None:
        raise ValueError(
            f"documents_per_step={per_step} needs to know the documents, but a stream is packed as "
            "it is read; leave it out, or load the data set without streaming"
        )
    return PackingReport(
        ranks=ranks,
        accumulation=args.gradient_accumulation_steps,
        micro_batch=micro_batch,
        attention=attention,
        loss=loss,
        capacity=args.max_length,
        tokens_per_micro_batch=tokens_per_micro_batch,
    )
