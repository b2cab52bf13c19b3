"""The data sets of a trainer, prepared when TRL asks for it, or when a user sets them later."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from datasets import IterableDataset
from trl.trainer.utils import global_then_local_main_first

from trl_packing.data.bad_rows import check_is_dataset
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.limits import ModelLimits
from trl_packing.run.run import Run


@dataclass(eq=False)
class RunData:
    """Prepares the data sets of a trainer.

    Attributes:
        waiting: the sources of the training set, of which TRL's constructor gets the first; None
            for a single data set, and once they are prepared.
        expects_training: the next "train" is the training set, not an evaluation set of that name.
        counts: what was kept and lost of each data set, by its name.
    """

    waiting: dict[str, Any] | None
    expects_training: bool = True  # TRL's constructor prepares it before evaluation sets
    counts: dict[str, PreparationCounts] = field(default_factory=dict)

    def prepare(self, run: Run, dataset: Any, name: str) -> Any:
        """Return the documents of a data set by the rules of `run`, and keep the counts."""
        trains = name == "train" and self.expects_training
        self.expects_training = False
        if name == "train" and not trains:
            name = "evaluated train"  # a user has called an evaluation set so
        check_is_dataset(dataset, name)
        if not trains:  # a callback may read the prompts
            run = replace(run, rules=replace(run.rules, keeps_columns=True))
        rows = dataset
        if trains and self.waiting is not None:
            rows, self.waiting = self.waiting, None
        else:
            run = run.of_source(dataset)
        with global_then_local_main_first():  # one rank writes the cache, the others read it
            documents, counts = run.prepare(rows, name)
        if counts is not None:
            self.counts[name] = counts
        return documents


def check_evaluation_sets(limits: ModelLimits, sets: Mapping[str, Any]) -> None:
    """Raise ValueError for evaluation sets with ids or lengths that the model cannot read."""
    for name, dataset in sets.items():
        limits.check(dataset, name)
        first = islice(dataset, 100) if isinstance(dataset, IterableDataset) else ()
        for number, document in enumerate(first):
            if "input_ids" in document:
                limits.check_document(document, f"document {number} of the {name} dataset")
