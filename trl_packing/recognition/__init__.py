"""Recognition: the packed row of a model call that does not name its boundaries.

Belongs here: the row of the current micro-batch, and calls that are completed by it. Does not: the
kernels that use the boundaries (attention), or the data sets that rows come from.

Read `current_row.py` first.
"""
