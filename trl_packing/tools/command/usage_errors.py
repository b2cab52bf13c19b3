"""Errors of `argparse` without the usage, which has hundreds of lines for a parser of TRL."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn
from unittest.mock import patch


@contextmanager
def short_usage_errors() -> Iterator[None]:
    """Make errors of `argparse` a ValueError inside the block."""

    def fail(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(message)

    with patch.object(argparse.ArgumentParser, "error", fail):
        yield
