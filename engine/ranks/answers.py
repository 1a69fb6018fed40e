"""Answers of a group's followers, and the first one's end. Pure."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from engine.core.plan import Plan
from engine.ranks.messages import Done, Failed, ToLeader


class EndOfGroup(NamedTuple):
    """Reason for the end, with the rank; `refused`: a wrong flag or file."""

    text: str
    refused: bool


def is_proven(plan: Plan, *, copies_beside: bool = False) -> bool:
    """Return True if the result of `plan`, or a later one, proves that every rank ran it.

    Each sum of a forward needs all ranks, on GPUs after writing the layer's KV. Copies without a
    forward, or parallel to it (`copies_beside`), need no sum, and a transfer peer may write those
    pages next, so followers answer such steps.
    """
    return not plan.copies_pages or (bool(plan.items) and not copies_beside)


class Answers:
    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.end: EndOfGroup | None = None
        self._by_key: dict[Hashable, dict[int, Any]] = {}  # by answered message: rank -> answer
        self._calls: dict[Hashable, Callable[[], None]] = {}  # due when all have answered
        self._number = 0

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def take(self, rank: int, message: ToLeader) -> None:
        """Record a message; Ready and Serving answer their types, `Done` its number."""
        if isinstance(message, Failed):
            self.note_end(f"{self.names[rank]}: {message.text}", refused=message.refused)
            return
        key = message.number if isinstance(message, Done) else type(message)
        self._by_key.setdefault(key, {})[rank] = message

    def note_end(self, text: str, *, refused: bool = False) -> None:
        """Record an end; the first one counts."""
        if self.end is None:
            self.end = EndOfGroup(text, refused)

    def has_all(self, key: Hashable) -> bool:
        return len(self._by_key.get(key, ())) == len(self.names)

    def when_all(self, key: Hashable, call: Callable[[], None]) -> None:
        """Queue `call` for `take_calls` until all have answered `key`."""
        self._calls[key] = call

    def take_calls(self) -> list[Callable[[], None]]:
        return [self._calls.pop(key) for key in list(self._calls) if self.has_all(key)]

    def pop(self, key: Hashable) -> dict[int, Any]:
        return self._by_key.pop(key, {})

    def missing(self, key: Hashable) -> str:
        there = self._by_key.get(key, {})
        return ", ".join(name for rank, name in self.names.items() if rank not in there)
