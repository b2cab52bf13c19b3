"""Formatting: rows of any form become text, and text becomes tokens and labels.

Belongs here: rules about messages, chat templates, prompts and responses. Does not: anything that
depends on `max_length`, on an end-of-sequence policy, or on more than one row at a time (data).

Read `row_format.py` first.
"""
