"""Set attributes for the time of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the block, and restore them at its end."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
