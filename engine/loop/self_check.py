"""Asks every owner whether its own state is consistent. One failure hides no other, and none ends the loop."""

from collections.abc import Callable, Mapping


def problems_of(checks: Mapping[str, Callable[[], None]]) -> list[str]:
    """What each of `checks` finds (an AssertionError), behind the name of its owner. A check that fails is a finding too."""
    return [f"{owner}: {problem}" for owner, check in checks.items() if (problem := _problem(check)) is not None]


def _problem(check: Callable[[], None]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error) or "an assertion failed"
    except Exception as error:
        return f"its check failed: {type(error).__name__}: {error}"
    return None
