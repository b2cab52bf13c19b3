"""`plan_run`: all that a plan page shows, computed from the documents that the run would train.

plan = plan_run(run, ranks=8)
plan.report               the report that `trl-packing plan` prints
plan.what_if              the same run with other values of max_length
Path("plan.html").write_text(plan_page(plan))
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trl_packing.data.counting import pieces_of_documents
from trl_packing.data.overflow import Overflow, Pieces
from trl_packing.data.preparation import Unfitted, fit
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, token_columns
from trl_packing.packing.bins import PackingPlan
from trl_packing.tools.plan.variants import (
    MAX_LENGTHS,
    RANKS,
    PlannedEpoch,
    Setup,
    Variant,
    on_ranks,
    other_max_lengths,
    ways_to_batch,
    ways_to_share,
)
from trl_packing.tools.preview.preview import plan_of, report_on
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.mixture import Mixture, mixture_of


@dataclass(frozen=True, eq=False)
class CutDocuments:
    """The documents that the overflow policy cut or dropped.

    Attributes:
        documents: all documents of any length.
        overflow: the policy.
        pieces: those that the policy keeps of them.
        rows: numbers of the documents of which a token is lost, or that are split.
    """

    documents: ArrowDocuments
    overflow: Overflow
    pieces: Pieces
    rows: np.ndarray

    @classmethod
    def of(cls, whole: Unfitted) -> "CutDocuments":
        """Return those of the run's own policy."""
        documents = _token_documents(whole.documents)
        lengths, pieces = documents.lengths(), pieces_of_documents(documents, whole.overflow)
        intact = pieces.rows[pieces.stops - pieces.starts == lengths[pieces.rows]]
        return cls(documents, whole.overflow, pieces, np.setdiff1d(np.arange(len(lengths)), intact))


@dataclass(frozen=True, eq=False)
class RunPlan:
    """The first epoch of a run, and the same documents under other settings.

    Attributes:
        run: the settings and the data.
        report: the text report.
        documents: prepared, in the order of the data set.
        epoch: their micro-batches.
        bins: the bins; None where nothing is packed into bins.
        cut: documents of any length; None if the rows stay as they are.
        what_if: plans with other values of max_length.
        ways: plans of padded batches, bins, and a fixed number of documents a step.
        ranks: plans on other numbers of ranks.
        sharing: plans with each value of `prefix_sharing`; none where documents share nothing.
        mixture: the sources of the documents; None if they are not known.
    """

    run: PreviewedRun
    report: PackingReport
    documents: ArrowDocuments
    epoch: PlannedEpoch
    bins: PackingPlan | None
    cut: CutDocuments | None
    what_if: tuple[Variant, ...]
    ways: tuple[Variant, ...]
    ranks: tuple[Variant, ...]
    sharing: tuple[Variant, ...]
    mixture: Mixture | None = None

    @property
    def grouped(self) -> bool:
        """Whether bins or steps hold groups of documents with a common prefix."""
        return self.report.prefixes is not None and self.report.prefixes.per_step is not None

    @property
    def tokenizer(self) -> Any:
        return self.run.preparation.eos.tokenizer

    def lengths_before(self) -> np.ndarray:
        """Return the tokens of each document before any was cut, ``(documents,)`` int64."""
        if self.cut is not None:
            return self.cut.documents.lengths()
        packed = SEQ_LENGTHS in self.documents.columns
        if not packed:
            return self.documents.lengths()
        return np.concatenate([row[SEQ_LENGTHS] for row in self.documents])


def plan_run(run: PreviewedRun, *, ranks: int = 1) -> RunPlan:
    """Return the plan of the first epoch of `run`.

    Args:
        run: the settings and the data.
        ranks: data-parallel processes.

    Raises:
        ValueError: `ranks` is below 1, or preparation refuses the data.
    """
    whole = run.unfitted()
    prepared, counts = run.documents() if whole is None else fit(whole, run.preparation)
    documents, sampler = plan_of(run, prepared, ranks=ranks)
    setup = Setup(run.args, ranks, run.hidden_size, sampler.groups, sampler.loads, sampler.draw)
    lengths, own = documents.lengths(), run.args.max_length
    limits = sorted({*MAX_LENGTHS, own} - {None}) + [None] * (own is None)
    return RunPlan(
        run=run,
        report=report_on(run, documents, sampler, counts),
        documents=documents,
        epoch=PlannedEpoch.from_sampler(sampler),
        bins=None if sampler.rows else sampler.plan(),
        cut=None if whole is None else CutDocuments.of(whole),
        # Documents that are cut elsewhere have other prefixes, images, and numbers in a mixture.
        what_if=()
        if whole is None or sampler.draw is not None
        else tuple(
            other_max_lengths(
                whole, run.preparation, replace(setup, groups=None, loads=None), limits
            )
        ),
        ways=() if sampler.rows else tuple(ways_to_batch(lengths, setup)),
        ranks=tuple(on_ranks(lengths, setup, sorted({*RANKS, ranks}), rows=sampler.rows)),
        # Equal tokens of images may stand for other images.
        sharing=() if sampler.loads is not None else ways_to_share(documents, setup),
        mixture=mixture_of(documents, run.args),
    )


def _token_documents(dataset: Any) -> ArrowDocuments:
    return ArrowDocuments(dataset, token_columns(dataset.column_names))
