"""Plain trainer: packing for `transformers.Trainer` or your training loop, without TRL's.

Belongs here: `enable_packing` and the data sets that go with it. Does not: anything of `training`.
Read `enable.py` first.
"""

from trl_packing import lazy_names

_DATA = ("PackedDataset", "RepackEveryEpoch", "make_supervised_dset")
__getattr__ = lazy_names(__name__, {"enable_packing": "enable"} | dict.fromkeys(_DATA, "dataset"))
