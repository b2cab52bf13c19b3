"""The plan of an epoch before it starts.

Belongs here: bins, steps and what other settings would make of them. Does not: single tokens.

Read `plan.py` first.
"""
