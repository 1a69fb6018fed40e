"""What the finish checks ask of a regular expression: a pure hook, handed in with the request (engine/text/stop_regex.py)."""

from typing import Protocol


class StopPattern(Protocol):
    """`reach`: characters that a match may have at most; of longer ones none need be found."""

    pattern: str
    reach: int

    def found(self, text: str, start: int) -> bool:
        """Whether a match begins at `start` or later; what stands before it is context."""
