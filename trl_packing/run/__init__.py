"""A run without its model: everything that its settings and its rows decide. Read `run.py` first.

The trainer, the commands `plan`, `inspect` and `prepare`, and the tests build the same `Run`.
"""
