"""What the followers of a group have answered, and the end of the first that ended. Pure: no thread, no socket, no clock."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

from engine.core.plan import Plan
from engine.ranks.messages import Done, Failed, ToLeader


class EndOfGroup(NamedTuple):
    """The reason for which a group cannot go on. `text` names the rank. `refused`: the operator gave it a wrong flag or file."""

    text: str
    refused: bool


def is_proven(plan: Plan, *, copies_beside: bool = False) -> bool:
    """Whether the result of `plan`, or what follows it, proves that every rank has run it.

    Each sum of a forward needs all ranks, so the result of a step with items does: on a GPU, too, where the stream has written a
    layer's KV before it adds to the layer's sum. No sum needs copies alone, nor on a GPU those that run beside the forward
    (`copies_beside`), and a transfer peer may write the pages next, so the followers answer such a step.
    """
    return not plan.copies_pages or (bool(plan.items) and not copies_beside)


class Answers:
    """`names`: of the followers' processes, by rank, such as "rank 2 of 4 (pid 4711)"."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
        self.end: EndOfGroup | None = None
        self._by_key: dict[Hashable, dict[int, Any]] = {}  # by what is answered: rank -> answer
        self._calls: dict[Hashable, Callable[[], None]] = {}  # when all have answered
        self._number = 0

    def next_number(self) -> int:
        """Return the number of the next message that asks for a `Done`."""
        self._number += 1
        return self._number

    def take(self, rank: int, message: ToLeader) -> None:
        """Note a message of `rank`. Ready and Serving answer their own types, `Done` its number."""
        if isinstance(message, Failed):
            self.note_end(f"{self.names[rank]}: {message.text}", refused=message.refused)
            return
        key = message.number if isinstance(message, Done) else type(message)
        self._by_key.setdefault(key, {})[rank] = message

    def note_end(self, text: str, *, refused: bool = False) -> None:
        """The first end counts."""
        if self.end is None:
            self.end = EndOfGroup(text, refused)

    def has_all(self, key: Hashable) -> bool:
        return len(self._by_key.get(key, ())) == len(self.names)

    def when_all(self, key: Hashable, call: Callable[[], None]) -> None:
        """`take_calls` returns `call` once all have answered `key`."""
        self._calls[key] = call

    def take_calls(self) -> list[Callable[[], None]]:
        """Return, once, the calls whose answers are there."""
        return [self._calls.pop(key) for key in list(self._calls) if self.has_all(key)]

    def pop(self, key: Hashable) -> dict[int, Any]:
        """Return the answers to `key` by rank, and forget them."""
        return self._by_key.pop(key, {})

    def missing(self, key: Hashable) -> str:
        """The names of the followers that have not answered `key`."""
        there = self._by_key.get(key, {})
        return ", ".join(name for rank, name in self.names.items() if rank not in there)
