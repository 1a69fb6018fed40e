"""The installed version."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

PACKAGE = "tandem-serve"


@cache
def installed_version() -> str:
    """Return pip's version, "unknown" if not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return "unknown"
