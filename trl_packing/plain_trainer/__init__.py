"""Packing for `transformers.Trainer`, or a training loop of yours, without TRL's trainer.

This folder holds `enable_packing` and the data sets that go with it. Nothing here imports
`training`, which serves `PackedSFTTrainer` only.

Read `enable.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "PackedDataset": "dataset",
        "RepackEveryEpoch": "dataset",
        "enable_packing": "enable",
        "make_supervised_dset": "supervised",
    },
)
