"""Asks every owner whether its own state is consistent. One failure hides no other, and none ends the loop."""

from collections.abc import Callable, Mapping

Check = Callable[[], list[str] | None]  # raises AssertionError, or returns what is wrong


def problems_of(checks: Mapping[str, Check]) -> list[str]:
    """What each of `checks` finds, behind the name of its owner. A check that fails itself is a finding too."""
    return [f"{owner}: {problem}" for owner, check in checks.items() for problem in _problems(check)]


def _problems(check: Check) -> list[str]:
    try:
        return check() or []
    except AssertionError as error:
        return [str(error) or "an assertion failed"]
    except Exception as error:
        return [f"its check failed: {type(error).__name__}: {error}"]
