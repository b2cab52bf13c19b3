"""Attention: kernels that keep the documents of a packed row apart, one file per backend.

Belongs here: backends, their choice and installation, calls that do not name their documents, rows
divided over ranks, and properties of a model. Does not: the measurement that a backend is exact
(isolation). Backends never import one another. Read `backends.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(__name__, {"resolve_attention": "backends"})
