"""Queue of look-ups at each bootstrap server. Pure.

A server that hangs holds a thread until timeout; `MAX_LOOKUPS_A_SERVER` leaves threads for others.
"""

from collections import Counter
from collections.abc import Container

from transfer_backends.kvpoll import RoomKey

MAX_LOOKUPS_A_SERVER = 4


class LookUpLine:
    """Tables by server, only while a look-up is in flight."""

    def __init__(self) -> None:
        self._under_way: Counter[str] = Counter()
        self._waiting: dict[str, dict[RoomKey, None]] = {}

    def begin(self, server: str, key: RoomKey) -> bool:
        """Return True if the look-up may start; else queue the room."""
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
