"""Tested versions of the libraries that this package builds on, and a warning about others.

`constraints-oldest.txt` and `constraints.txt` install the two ends of each range.
`tests/test_versions.py` checks that these files, `pyproject.toml` and this table agree.
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
    """Log one warning for each process, with the installed versions outside of `TESTED`.

    Patch releases are ignored: 5.23.4 counts as 5.23.0.
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
