"""Tested versions of the libraries that this package builds on, and a warning about others."""

import logging
from functools import cache
from importlib.metadata import distributions

from packaging.version import Version

logger = logging.getLogger(__name__)

TESTED = {
    "trl": ("1.16.0", "1.16.0"),
    "transformers": ("5.17.0", "5.24.0"),
    "accelerate": ("1.12.0", "1.15.0"),
    "datasets": ("4.8.5", "5.2.0"),
}


@cache
def warn_of_untested_versions() -> None:
    """Log one warning for each process, with the installed versions outside of `TESTED`."""
    untested = [
        f"{name} {installed_version(name)} (tested: {oldest} to {newest})"
        for name, (oldest, newest) in TESTED.items()
        if not is_tested(name)
    ]
    if untested:
        logger.warning(
            f"trl_packing has not been tested with {', '.join(untested)}; if something fails, "
            "install a tested version"
        )


def is_tested(name: str) -> bool:
    """Whether the installed version of one of `TESTED` is in its range; patches are ignored."""
    oldest, newest = TESTED[name]
    found = Version(installed_version(name) or "0").release[:2]
    return Version(oldest).release[:2] <= found <= Version(newest).release[:2]


@cache
def installed_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    return next((each.version for each in distributions(name=name)), None)
