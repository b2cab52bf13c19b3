"""Packed, padding-free, completion-only SFT for TRL.

Importing this package is cheap: names are loaded on first use, so `pack` needs neither torch nor
TRL. `tests/test_layers.py` holds the table of which module may import which.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_packing.attention import resolve_attention
    from trl_packing.collator import DataCollatorWithFlattening, PackedCollator
    from trl_packing.config import PackedSFTConfig
    from trl_packing.current_row import other_rows
    from trl_packing.documents import (
        block_diagonal_mask,
        cu_seqlens_from_lengths,
        document_ids_from_lengths,
        lengths_from_eos,
        position_ids_from_lengths,
    )
    from trl_packing.inspection import load_rows
    from trl_packing.isolation import check_isolation
    from trl_packing.legacy_collator import DataCollatorForCompletionOnlyLM
    from trl_packing.packed_dataset import PackedDataset, RepackEveryEpoch
    from trl_packing.packing import PackingPlan, pack
    from trl_packing.plain_trainer import enable_packing
    from trl_packing.render import show_document, show_rows
    from trl_packing.sampler import PackedBatchSampler
    from trl_packing.supervised_dataset import make_supervised_dset
    from trl_packing.trainer import PackedSFTTrainer

__version__ = "0.1.0"

_HOME = {
    "PackedSFTTrainer": "trainer",
    "PackedSFTConfig": "config",
    "PackedCollator": "collator",
    "DataCollatorWithFlattening": "collator",
    "DataCollatorForCompletionOnlyLM": "legacy_collator",
    "PackedBatchSampler": "sampler",
    "pack": "packing",
    "PackingPlan": "packing",
    "cu_seqlens_from_lengths": "documents",
    "position_ids_from_lengths": "documents",
    "document_ids_from_lengths": "documents",
    "lengths_from_eos": "documents",
    "block_diagonal_mask": "documents",
    "resolve_attention": "attention",
    "check_isolation": "isolation",
    "load_rows": "inspection",
    "show_document": "render",
    "show_rows": "render",
    "PackedDataset": "packed_dataset",
    "RepackEveryEpoch": "packed_dataset",
    "make_supervised_dset": "supervised_dataset",
    "enable_packing": "plain_trainer",
    "other_rows": "current_row",
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
    "load_rows",
    "make_supervised_dset",
    "other_rows",
    "pack",
    "position_ids_from_lengths",
    "resolve_attention",
    "show_document",
    "show_rows",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
