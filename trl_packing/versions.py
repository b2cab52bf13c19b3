"""Versions of the libraries below that the tests run with, and a warning outside of them.

`constraints-oldest.txt` and `constraints.txt` install the two ends of each range, and
`tests/test_versions.py` holds the files, `pyproject.toml` and this table together.
"""

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

logger = logging.getLogger(__name__)

TESTED = {
    "trl": ("1.16.0", "1.16.0"),
    "transformers": ("5.17.0", "5.23.0"),
    "accelerate": ("1.12.0", "1.15.0"),
    "datasets": ("4.8.5", "5.2.0"),
}


@cache
def warn_of_untested_versions() -> None:
    """Log one warning a process that names the installed versions outside of `TESTED`.

    Patch releases do not count: 5.23.4 is as good as 5.23.0.
    """
    untested = [
        f"{name} {installed} (tested: {oldest} to {newest})"
        for name, (oldest, newest) in TESTED.items()
        if (installed := _installed(name)) is not None
        and not _minor(oldest) <= _minor(installed) <= _minor(newest)
    ]
    if untested:
        logger.warning(
            f"trl_packing has not been tested with {', '.join(untested)}. The isolation check "
            "still measures your model before the first step; if something fails, install a tested "
            "version."
        )


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _minor(number: str) -> tuple[int, ...]:
    return Version(number).release[:2]
