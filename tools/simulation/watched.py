"""Handles of the decode manager, watched: which pages and rows are given to transfers now, so that every write can be judged.

A page is given by `provide` and taken back by `close`, which the role calls when it reuses or frees the memory.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from transfer_backends.contract import TargetPages
from transfer_backends.decode.manager import DecodeManager
from transfer_backends.ports import KVReceiver


class WatchedReceivers:
    """What the decode role sees of the manager."""

    def __init__(self, manager: DecodeManager, exposed: dict[str, Counter[int]], *, seen: Counter[str]) -> None:
        """`seen`: what has come about in this run."""
        self._manager = manager
        self._seen = seen
        self._exposed = exposed

    @property
    def counters(self) -> dict[str, int]:
        return self._manager.counters

    def receiver(self, room: int, **named: Any) -> "WatchedReceiver":
        return WatchedReceiver(self._manager.receiver(room, **named), self._exposed, self._seen)

    def check(self) -> None:
        self._manager.check()

    def close(self) -> bool:
        return self._manager.close()


class WatchedReceiver:
    """Delegates; counts what is exposed, by kind: pages, the row, then the tail's pools."""

    def __init__(self, receiver: KVReceiver, exposed: dict[str, Counter[int]], seen: Counter[str]) -> None:
        self._seen = seen
        self._receiver = receiver
        self._exposed = exposed
        self._given: list[Sequence[int]] = []

    def __getattr__(self, name: str) -> Any:
        """The rest as it is."""
        return getattr(self._receiver, name)

    def provide(self, target: TargetPages) -> None:
        if target.work is None:
            self._seen["pages not sent"] += target.skip_pages
        beside = [target.metadata_row], *target.tail
        self._given = [list(items) for items in (target.pages, *beside)]
        for kind, given in zip(self._exposed, self._given, strict=True):
            self._exposed[kind].update(given)
        self._receiver.provide(target)

    def close(self) -> None:
        self._receiver.close()
        for kind, given in zip(self._exposed, self._given, strict=False):
            self._exposed[kind].subtract(given)
        self._given = []
