"""Look-ups under way at each bootstrap server, and the rooms that wait in line for one. Pure.

A server that hangs holds a thread until the look-up times out. `MAX_LOOKUPS_A_SERVER` leaves threads for the others.
"""

from collections import Counter
from collections.abc import Container

from transfer_backends.kvpoll import RoomKey

MAX_LOOKUPS_A_SERVER = 4


class LookUpLine:
    """Tables by server, with an entry only while a look-up is under way there."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, dict[RoomKey, None]] = {}

    def begin(self, server: str, key: RoomKey) -> bool:
        """Return True if the look-up may start; else the room waits in line."""
        if self._under_way[server] >= MAX_LOOKUPS_A_SERVER:
            self._waiting.setdefault(server, {})[key] = None
            return False
        self._under_way[server] += 1
        return True

    def end(self, server: str) -> None:
        self._under_way[server] -= 1
        if self._under_way[server] <= 0:
            del self._under_way[server]

    def take(self, server: str) -> RoomKey | None:
        line = self._waiting.get(server)
        if not line:
            self._waiting.pop(server, None)
            return None
        key = next(iter(line))
        del line[key]
        return key

    def leave(self, server: str, key: RoomKey) -> None:
        line = self._waiting.get(server, {})
        line.pop(key, None)
        if not line:
            self._waiting.pop(server, None)

    def check(self, rooms: Container[RoomKey]) -> None:
        for server, line in self._waiting.items():
            assert server in self._under_way, f"rooms wait for a look-up at {server}, where none is under way"
            for key in line:
                assert key in rooms, f"room {key} waits for a look-up and is gone"
