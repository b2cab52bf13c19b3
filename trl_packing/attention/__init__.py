"""Attention: kernels that keep the documents of a packed row apart, one file a backend.

Belongs here: a backend, how a model is told to use it, and the choice among them. Does not: the
measurement that a backend is exact on a model (isolation). Backends never import one another.

Read `backends.py` first.
"""

from trl_packing import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "AttentionChoice": "backends",
        "install_attention": "backends",
        "resolve_attention": "backends",
    },
)
