"""Runs on several gloo processes, started by torchrun from `tests/test_*.py`."""
