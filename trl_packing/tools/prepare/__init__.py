"""Preparing the data of a run once, on a machine without a GPU.

Belongs here: a folder of prepared documents, made at once or not at all. Does not: reading it,
which the trainer does (`data/prepared.py`).

Read `prepare_run.py` first.
"""
