"""What an epoch of a run is made of: its sampler, and the report on it, before anything is trained.

documents, settings, ranks  →  PackedBatchSampler  →  PackingReport
"""

from itertools import islice
from typing import Any

import numpy as np
from trl import SFTConfig

from trl_packing.arguments import overflow_of
from trl_packing.arrow_documents import ArrowDocuments
from trl_packing.config import PackingOptions
from trl_packing.document_order import order_seed
from trl_packing.report import PackingReport, PreparationCounts
from trl_packing.sampler import PackedBatchSampler

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
    per_step, rows = options.documents_per_step, "seq_lengths" in documents.columns
    if rows and per_step is not None:
        raise ValueError(
            f"documents_per_step={per_step} cannot regroup rows that were packed before (they have "
            "seq_lengths); leave it out, or pass the documents"
        )
    if per_step is None and not packing and not rows:
        per_step = batch_size * accumulation * ranks
    sampling = args.train_sampling_strategy
    seed = args.data_seed if args.data_seed is not None else args.seed
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
        # The pieces of "bfd_split" are documents by the time of planning.
        strategy=args.packing_strategy.removesuffix("_split"),
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
        "overflow": overflow_of(args, packing).policy,
        "packing": packing,
        "packing_strategy": args.packing_strategy,
        "documents_per_step": PackingOptions.of(args).documents_per_step,
        "train_sampling_strategy": str(args.train_sampling_strategy),
        "dataloader_drop_last": args.dataloader_drop_last,
        "seed": args.data_seed if args.data_seed is not None else args.seed,
    }


def attention_cost(hidden_size: int | None) -> float:
    """Return c in the cost of documents, tokens + c · Σ len², for a model of a Llama's shape."""
    return 1 / (12 * hidden_size) if hidden_size else 0.0


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
