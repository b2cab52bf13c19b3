"""Verify one model.

Belongs here: comparisons of packed documents with each alone. Does not: checks that training
itself makes (isolation/).

Read `verify.py` first.
"""
