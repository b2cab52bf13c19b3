"""Packed, padding-free, completion-only SFT for TRL.

Importing this package is fast, because names are loaded on first use: `pack` needs neither torch
nor TRL. `tests/test_layers.py` has the table of allowed imports between folders.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_packing.attention.backends import resolve_attention as resolve_attention
    from trl_packing.attention.calls import other_rows as other_rows
    from trl_packing.config import PackedSFTConfig as PackedSFTConfig
    from trl_packing.data.files import load_prepared as load_prepared
    from trl_packing.data.files import load_rows as load_rows
    from trl_packing.data.responses import (
        DataCollatorForCompletionOnlyLM as DataCollatorForCompletionOnlyLM,
    )
    from trl_packing.documents.boundaries import block_diagonal_mask as block_diagonal_mask
    from trl_packing.documents.boundaries import cu_seqlens_from_lengths as cu_seqlens_from_lengths
    from trl_packing.documents.boundaries import (
        document_ids_from_lengths as document_ids_from_lengths,
    )
    from trl_packing.documents.boundaries import lengths_from_eos as lengths_from_eos
    from trl_packing.documents.boundaries import (
        position_ids_from_lengths as position_ids_from_lengths,
    )
    from trl_packing.isolation.check import check_isolation as check_isolation
    from trl_packing.packing.bins import PackingPlan as PackingPlan
    from trl_packing.packing.bins import pack as pack
    from trl_packing.packing.collator import (
        DataCollatorWithFlattening as DataCollatorWithFlattening,
    )
    from trl_packing.packing.collator import PackedCollator as PackedCollator
    from trl_packing.packing.sampler import PackedBatchSampler as PackedBatchSampler
    from trl_packing.pages.show import show_document as show_document
    from trl_packing.pages.show import show_rows as show_rows
    from trl_packing.plain_trainer.dataset import PackedDataset as PackedDataset
    from trl_packing.plain_trainer.dataset import RepackEveryEpoch as RepackEveryEpoch
    from trl_packing.plain_trainer.dataset import make_supervised_dset as make_supervised_dset
    from trl_packing.plain_trainer.enable import enable_packing as enable_packing
    from trl_packing.trainer import PackedSFTTrainer as PackedSFTTrainer

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
    "load_rows": "data.files",
    "load_prepared": "data.files",
    "show_document": "pages.show",
    "show_rows": "pages.show",
    "PackedDataset": "plain_trainer.dataset",
    "RepackEveryEpoch": "plain_trainer.dataset",
    "make_supervised_dset": "plain_trainer.dataset",
    "enable_packing": "plain_trainer.enable",
    "other_rows": "attention.calls",
}

__all__ = [*_HOME]


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, which imports the module of a name on first use.

    `homes` is public name -> module of the package that defines it.
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
