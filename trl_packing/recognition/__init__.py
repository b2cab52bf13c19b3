"""Recognition: find the packed row that a model call is about when the call does not say it.

Belongs here: the row of the current micro-batch, and rows found again by their tokens. Does not:
the kernels that the boundaries are for (attention), or the data sets that rows come from.

Read `current_row.py` first.
"""
