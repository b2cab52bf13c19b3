"""The packed rows of a run, token by token, on a page.

Belongs here: what shows rows as the collator makes them. Does not: the plan of all bins.

Read `packed_rows.py` first.
"""
