"""The data sets of a run that can be prepared, and the rules for them.

train_dataset    a data set                      "train"
eval_dataset     a data set, or {"a": …}         "eval", or "a", …
train_dataset    {"math": …, "chat": …}          a folder for each, as for a run on it alone
"""

import copy
from dataclasses import replace
from urllib.parse import quote

from datasets import Dataset

from trl_packing.config import PackingOptions
from trl_packing.data.checks import check_not_empty
from trl_packing.data.prepared import records_of
from trl_packing.documents.labels import IMAGE_COLUMNS
from trl_packing.tools.command.trainer_call import TrainerCall
from trl_packing.tools.preview.previewed_run import PreviewedRun


def sources_of(call: TrainerCall) -> dict[str, TrainerCall]:
    """Return a run for each source of a mixture, by its name.

    The documents of a source are the same in the mixture and alone.

    Raises:
        ValueError: rows are held out, which have no place beside folders of sources.
    """
    if call.eval_dataset is not None:
        raise ValueError(
            "the sources of a mixture are prepared for training, and this run also has rows to "
            "evaluate: leave out test_split_size and eval_strategy, or the eval_dataset; in "
            "Python, rows may be evaluated beside prepared sources"
        )
    args = copy.copy(call.args)
    for setting in ("mixture", "mixture_unit", "mixture_temperature"):
        setattr(args, setting, getattr(PackingOptions, setting))
    return {
        name: replace(call, args=args, train_dataset=rows)
        for name, rows in call.train_dataset.items()
    }


def folder_of(name: str) -> str:
    """Return the name of a source or a set as a single name of a folder."""
    return quote(name, safe="").replace(".", "%2E")


def sets_of(call: TrainerCall) -> dict[str, Dataset]:
    """Return the data sets by name: "train", and "eval" or the keys of a dictionary.

    Raises:
        ValueError: one of them cannot be prepared.
    """
    if isinstance(call.train_dataset, dict):
        raise ValueError(
            f"train_dataset has the sources {', '.join(map(repr, call.train_dataset))}; prepare "
            "each by itself, and name its folder as path of its entry in datasets (in Python: "
            "train_dataset={SOURCE: load_prepared(FOLDER), ...})"
        )
    evaluated = call.eval_dataset
    if not isinstance(evaluated, dict):
        evaluated = {} if evaluated is None else {"eval": evaluated}
    if "train" in evaluated:
        raise ValueError("an evaluation set is called 'train'; give it another name")
    sets = {"train": call.train_dataset, **evaluated}
    for name, rows in sets.items():
        if not isinstance(rows, Dataset):
            raise ValueError(
                f"the {name} dataset is {type(rows).__name__}, which cannot be prepared: only data "
                "sets of known length are; load it without streaming, or save it to a file first"
            )
        check_not_empty(rows, name)
        if records_of(rows):
            raise ValueError(
                f"the {name} dataset is prepared already; train it as it is, or name its rows"
            )
        if {*IMAGE_COLUMNS} & {*rows.column_names}:
            raise ValueError(
                f"the {name} dataset has images, which are loaded while it is trained; it cannot "
                "be prepared"
            )
    return sets


def run_and_sets_of(call: TrainerCall) -> tuple[PreviewedRun, dict[str, Dataset]]:
    """Return the run of a trainer, with the rules that prepare its data, and its data sets.

    Raises:
        ValueError: its data cannot be prepared.
    """
    args = call.args
    if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        raise ValueError("skip_prepare_dataset=True leaves nothing to prepare; leave it out")
    if getattr(args, "assistant_only_loss", False):
        raise ValueError(
            "assistant_only_loss=True needs conversations when training starts, and prepared data "
            "are tokens; set train_on='assistant', which trains the same turns by any template"
        )
    sets = sets_of(call)  # refuses streams, of which a preview would read only the first rows
    return PreviewedRun.from_call(call), sets
