"""Keep the pages of freed tensors between training steps, on a CPU under glibc.

By default glibc gives large freed blocks back to the system, and the kernel zeroes each of their
pages again in the next step: up to a sixth of a packed step. PyTorch's guide recommends jemalloc or
tcmalloc, which must be preloaded; glibc can be tuned while a process runs (mallopt(3)).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL
from typing import Any

# A parameter of malloc.h: its value while training, and glibc's default.
_SETTINGS = {
    -4: (0, 65536),  # M_MMAP_MAX: no block in a mapping of its own, which dies with the block
    -1: (2**31 - 1, 128 * 1024),  # M_TRIM_THRESHOLD: the end of the heap is not given back
    -2: (2**28, 128 * 1024),  # M_TOP_PAD: the heap grows in large pieces
}


@contextmanager
def keep_freed_pages(on_cpu: bool) -> Iterator[None]:
    """Keep freed pages inside the block, unless the user has set malloc's variables."""
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    libc: Any = CDLL(None) if on_cpu and sys.platform.startswith("linux") else None
    tunes = hasattr(libc, "mallopt") and not chosen
    for parameter, (value, _) in _SETTINGS.items() if tunes else ():
        libc.mallopt(parameter, value)
    try:
        yield
    finally:
        for parameter, (_, default) in _SETTINGS.items() if tunes else ():
            libc.mallopt(parameter, default)
        if tunes:
            libc.malloc_trim(0)
