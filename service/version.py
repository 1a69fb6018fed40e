"""The version of this installation."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "tandem-serve"


@cache
def installed_version() -> str:
    """Return the version that pip shows; "unknown" for a source tree that was not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"
