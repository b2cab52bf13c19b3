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
    """Log one warning for each process, with the installed versions outside of `TESTED`."""
    untested = [
        f"{name} {installed} (tested: {oldest} to {newest})"
        for name, (oldest, newest) in TESTED.items()
        if (installed := installed_version(name)) is not None and not is_tested(name, installed)
    ]
    if untested:
        logger.warning(
            f"trl_packing has not been tested with {', '.join(untested)}. The isolation check "
            "still measures your model before the first step; if something fails, install a tested "
            "version."
        )


def is_tested(name: str, number: str) -> bool:
    """Whether a version of one of `TESTED` is in its range. Patch releases are ignored.

    Examples:
        >>> is_tested("trl", TESTED["trl"][1] + ".7"), is_tested("trl", "99.0")
        (True, False)
    """
    oldest, newest = TESTED[name]
    return _minor(oldest) <= _minor(number) <= _minor(newest)


@cache
def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _minor(number: str) -> tuple[int, ...]:
    return Version(number).release[:2]
