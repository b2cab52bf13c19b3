"""Runs compared after they were trained.

Belongs here: reading and comparing run.json and trainer_state.json. Does not: writing them
(training/).

Read `compare.py` first.
"""
