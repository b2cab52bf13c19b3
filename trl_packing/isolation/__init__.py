"""Isolation: measures on the user's model whether documents of a row affect each other.

This folder holds the probes, the comparison, its verdict, the fallback to slower backends, and the
guard that runs all of it before training. The backends are in `attention`.

Read `check.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(__name__, {"IsolationReport": "check", "check_isolation": "check"})
