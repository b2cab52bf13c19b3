"""The plan of an epoch before it starts, its page and picture.

Belongs here: bins, steps and what other settings would make of them. Does not: single tokens.

Read `run_plan.py` first.
"""
