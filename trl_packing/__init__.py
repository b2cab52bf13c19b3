"""Packed, padding-free, completion-only SFT for TRL.

Importing this package is fast, because names are loaded on first use: `pack` needs neither torch
nor TRL. `tests/test_layers.py` has the table of allowed imports between folders.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_packing.attention.backends import resolve_attention
    from trl_packing.attention.calls import other_rows
    from trl_packing.config import PackedSFTConfig
    from trl_packing.data.prepared import load_prepared, load_rows
    from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
    from trl_packing.documents.boundaries import (
        block_diagonal_mask,
        cu_seqlens_from_lengths,
        document_ids_from_lengths,
        lengths_from_eos,
        position_ids_from_lengths,
    )
    from trl_packing.isolation.check import check_isolation
    from trl_packing.packing.bins import PackingPlan, pack
    from trl_packing.packing.collator import DataCollatorWithFlattening, PackedCollator
    from trl_packing.packing.sampler import PackedBatchSampler
    from trl_packing.plain_trainer.dataset import (
        PackedDataset,
        RepackEveryEpoch,
        make_supervised_dset,
    )
    from trl_packing.plain_trainer.enable import enable_packing
    from trl_packing.tools.preview.show import show_document
    from trl_packing.tools.preview.show_rows import show_rows
    from trl_packing.trainer import PackedSFTTrainer

__version__ = "0.1.0"

_HOME = {
    "PackedSFTTrainer": "trainer",
    "PackedSFTConfig": "config",
    "PackedCollator": "packing.collator",
    "DataCollatorWithFlattening": "packing.collator",
    "DataCollatorForCompletionOnlyLM": "data.responses",
    "PackedBatchSampler": "packing.sampler",
    "pack": "packing.bins",
    "PackingPlan": "packing.bins",
    "cu_seqlens_from_lengths": "documents.boundaries",
    "position_ids_from_lengths": "documents.boundaries",
    "document_ids_from_lengths": "documents.boundaries",
    "lengths_from_eos": "documents.boundaries",
    "block_diagonal_mask": "documents.boundaries",
    "resolve_attention": "attention.backends",
    "check_isolation": "isolation.check",
    "load_rows": "data.prepared",
    "load_prepared": "data.prepared",
    "show_document": "tools.preview.show",
    "show_rows": "tools.preview.show_rows",
    "PackedDataset": "plain_trainer.dataset",
    "RepackEveryEpoch": "plain_trainer.dataset",
    "make_supervised_dset": "plain_trainer.dataset",
    "enable_packing": "plain_trainer.enable",
    "other_rows": "attention.calls",
}

__all__ = [
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorWithFlattening",
    "PackedBatchSampler",
    "PackedCollator",
    "PackedDataset",
    "PackedSFTConfig",
    "PackedSFTTrainer",
    "PackingPlan",
    "RepackEveryEpoch",
    "block_diagonal_mask",
    "check_isolation",
    "cu_seqlens_from_lengths",
    "document_ids_from_lengths",
    "enable_packing",
    "lengths_from_eos",
    "load_prepared",
    "load_rows",
    "make_supervised_dset",
    "other_rows",
    "pack",
    "position_ids_from_lengths",
    "resolve_attention",
    "show_document",
    "show_rows",
]


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, which imports the module of a name on first use.

    Args:
        package: `__name__` of the package.
        homes: public name -> module of the package that defines it.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load


__getattr__ = lazy_names(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
