"""Data: a data set becomes documents that fit, and every loss on the way is counted.

Belongs here: checks of rows and columns, end-of-sequence tokens, overflow policies, counts. Does
not: how one row is rendered (formatting), and which documents share a bin (packing).

Read `stages.py` first.
"""
