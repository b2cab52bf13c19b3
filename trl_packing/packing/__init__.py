"""Packing: documents go into bins, bins into optimizer steps, and each micro-batch into one row.

Belongs here: algorithms on lengths, samplers, collators. Does not: anything that needs a model.
Importing this folder loads NumPy alone.

Read `bins.py` first.
"""

from trl_packing.packing.bins import PackingPlan, pack

__all__ = ["PackingPlan", "pack"]
