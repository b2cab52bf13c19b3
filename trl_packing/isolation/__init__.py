"""Isolation: measure on this model whether documents of a row see each other, before training.

Belongs here: probes, the comparison, its verdict, and the fallback to a slower backend. Does not:
the backends themselves (attention).

Read `check.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(__name__, {"IsolationReport": "check", "check_isolation": "check"})
