"""Who is registered, and whose a room is. Pure: told of calls and of time. Knows no HTTP.

A worker is keyed by its incarnation. A new life at the same control address or URL replaces the old one at once; in a
server that is not shared every registration replaces all others (it lives inside its one worker).
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from bootstrap_server.config import BootstrapConfig
from bootstrap_server.protocol import Registration, RouteReply


class RegistryError(Exception):
    """The call cannot be served. `status` is the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Registry:
    def __init__(self, config: BootstrapConfig, *, shared: bool) -> None:
        self.shared = shared
        self._config = config
        self._workers: OrderedDict[str, tuple[Registration, float]] = OrderedDict()  # expires soonest first
        self._rooms: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def register(self, worker: Registration, now_s: float) -> None:
        if worker.role != "prefill":
            raise RegistryError(400, f"role: must be 'prefill', got {worker.role!r}")
        for incarnation in [i for i, (other, _) in self._workers.items() if self._replaces(worker, other)]:
            del self._workers[incarnation]
        if len(self._workers) >= self._config.max_workers:
            raise RegistryError(
                503, f"{len(self._workers)} prefill workers are registered, no more fit (--max-workers)"
            )
        self._workers[worker.incarnation] = (worker, now_s + self._config.lease)

    def _replaces(self, new: Registration, old: Registration) -> bool:
        same_place = new.control == old.control or (new.url != "" and new.url == old.url)
        return not self.shared or same_place or new.incarnation == old.incarnation

    def leave(self, incarnation: str) -> None:
        if self._workers.pop(incarnation, None) is None:
            raise RegistryError(404, f"incarnation: {incarnation!r} is not registered")

    def register_rooms(self, incarnation: str, rooms: Sequence[int], now_s: float) -> None:
        if incarnation not in self._workers:
            raise RegistryError(404, f"incarnation: {incarnation!r} is not registered")
        for room in rooms:
            self._rooms.pop(room, None)
            self._rooms[room] = (incarnation, now_s + self._config.room_ttl)
        while len(self._rooms) > self._config.max_rooms:
            self._rooms.popitem(last=False)

    def look_up(self, room: int) -> RouteReply:
        if not self._workers:
            raise RegistryError(404, "no prefill worker is registered here")
        if not self.shared:
            return RouteReply(next(iter(self._workers.values()))[0], False)
        owner = self._rooms.get(room)
        if owner is None:
            raise RegistryError(404, f"room: no prefill worker has registered {room}")
        entry = self._workers.get(owner[0])
        if entry is None:
            raise RegistryError(404, f"room: the prefill worker that owned {room} is gone")
        return RouteReply(entry[0], True)

    def look_up_any(self, room: int, *, but: Collection[str]) -> RouteReply:
        """The worker that has or had `room`, else another one, spread by room; none of the incarnations in `but`."""
        owner = self._rooms.get(room)
        if owner is not None and owner[0] in self._workers and owner[0] not in but:
            return RouteReply(self._workers[owner[0]][0], self.shared)
        others = [worker for name, (worker, _) in sorted(self._workers.items()) if name not in but]
        if not others:
            raise RegistryError(404, "no other prefill worker is registered here")
        return RouteReply(others[room % len(others)], self.shared)

    def expire(self, now_s: float) -> None:
        while self._workers and next(iter(self._workers.values()))[1] <= now_s:
            self._workers.popitem(last=False)
        while self._rooms and next(iter(self._rooms.values()))[1] <= now_s:
            self._rooms.popitem(last=False)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def check(self) -> list[str]:
        """What is inconsistent; empty when all is well."""
        problems = [
            f"worker {name} is filed wrongly" for name, (w, _) in self._workers.items() if w.incarnation != name
        ]
        for table in ([e for _, e in self._workers.values()], [e for _, e in self._rooms.values()]):
            if table != sorted(table):
                problems.append("entries are not in the order they expire in")
        return problems
