"""Isolation: measures on the user's model whether documents of a row affect each other.

Belongs here: probes, the comparison, its verdict, the fallback to slower backends, and the guard
that runs all of it before training. Does not: the backends themselves (attention).

Read `check.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(__name__, {"IsolationReport": "check", "check_isolation": "check"})
