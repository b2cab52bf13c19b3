"""Verify one model, or a tiny model of every architecture.

Belongs here: comparisons of packed documents with each alone. Does not: checks that training
itself makes (isolation/).

Read `verify.py` first.
"""
