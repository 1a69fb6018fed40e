"""A stop regex, as the finish checks use it: a pure hook that comes with the request (engine/text/stop_regex.py)."""

from typing import Protocol


class StopPattern(Protocol):
    """`reach`: longest match, in characters. Longer matches may be missed."""

    pattern: str
    reach: int

    def found(self, text: str, start: int) -> bool:
        """Whether a match begins at `start` or later; text before it is context."""
