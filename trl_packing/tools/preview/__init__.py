"""A run before it starts: its settings, its rows as documents, and their text.

Belongs here: what prepares and shows single rows. Does not: pages, and plans of an epoch.

Read `previewed_run.py` first.
"""
