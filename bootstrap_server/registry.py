"""Registered workers by incarnation, and owners of rooms. Pure.

A start at the same address replaces the old one; without sharing any but its other DP ranks.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bootstrap_server.protocol import Registration, RouteReply
from service.flags import FlagSet, flag
from service.http.errors import ApiError
from service.telemetry.context import FORMATS

# ---- Flags of the bootstrap server.


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig(FlagSet):
    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8998, "port to listen on", least=0, most=65535, special={0: "a free one"})
    lease_s: float = flag(
        15.0, "time for which a prefill worker stays listed without renewing its lease", unit="s", above=0
    )
    room_ttl_s: float = flag(120.0, "time for which the owner of a room is remembered", unit="s", above=0)
    max_workers: int = flag(16384, "most prefill workers that may be registered", least=1)
    allow_insecure: bool = flag(
        False, "listen beyond loopback without --cluster-secret-file: anyone may register a worker"
    )
    allowed_hosts: tuple[str, ...] = flag(
        (),
        "host names, besides addresses and localhost, that requests may name if the server listens on loopback without "
        "a secret; *: any",
    )
    max_rooms: int = flag(262144, "most rooms remembered; beyond it the oldest are forgotten", least=1)
    cluster_secret_file: str | None = flag(None, "file with the secret that all of the cluster's workers share")
    log_level: str = flag("info", "lowest level of the log", choices=("debug", "info", "warning", "error"))
    log_format: str = flag("text", "log as text or as one JSON object per line", choices=FORMATS)


# ---- registry


class Registry:
    def __init__(self, config: BootstrapConfig, *, shared: bool) -> None:
        self.shared = shared
        self.lease_s = config.lease_s
        self._config = config
        self._workers: OrderedDict[str, tuple[Registration, float]] = OrderedDict()  # by expiry
        self._rooms: OrderedDict[int, tuple[str, float]] = OrderedDict()
        self._names: list[str] = []  # incarnations, sorted
        self._at: dict[str, str] = {}  # control address -> incarnation at it

    def register(self, worker: Registration, now_s: float) -> None:
        for incarnation in self._replaced_by(worker):
            self._drop(incarnation)
        if len(self._workers) >= self._config.max_workers:
            raise ApiError(503, f"{len(self._workers)} prefill workers are registered, no more fit (--max-workers)")
        self._workers[worker.incarnation] = (worker, now_s + self.lease_s)
        insort(self._names, worker.incarnation)
        self._at[worker.control] = worker.incarnation

    def _replaced_by(self, worker: Registration) -> set[str]:
        if not self.shared:
            return {
                name
                for name, (other, _) in self._workers.items()
                if other.dp_size != worker.dp_size or other.dp_rank == worker.dp_rank
            }
        return {worker.incarnation, self._at.get(worker.control, "")} & self._workers.keys()

    def _drop(self, incarnation: str) -> None:
        worker, _ = self._workers.pop(incarnation)
        del self._names[bisect_left(self._names, incarnation)]
        del self._at[worker.control]

    def leave(self, incarnation: str) -> None:
        if incarnation not in self._workers:
            raise ApiError(404, f"incarnation: {incarnation!r} is not registered")
        self._drop(incarnation)

    def register_rooms(self, incarnation: str, rooms: Sequence[int], now_s: float) -> None:
        if incarnation not in self._workers:
            raise ApiError(404, f"incarnation: {incarnation!r} is not registered")
        for room in rooms:
            self._rooms.pop(room, None)
            self._rooms[room] = (incarnation, now_s + self._config.room_ttl_s)
        while len(self._rooms) > self._config.max_rooms:
            self._rooms.popitem(last=False)

    def look_up(self, room: int) -> RouteReply:
        if not self._workers:
            raise ApiError(404, "no prefill worker is registered here")
        if not self.shared:
            if (worker := self._rank_of(room)) is not None:
                return RouteReply(worker, False)
            size = next(iter(self._workers.values()))[0].dp_size
            raise ApiError(404, f"DP rank {room % size} of {size} of this prefill worker is not registered")
        owner = self._rooms.get(room)
        if owner is None:
            raise ApiError(404, f"room: no prefill worker has registered {room}", field="room")
        entry = self._workers.get(owner[0])
        if entry is None:
            raise ApiError(404, f"room: the prefill worker that owned {room} is gone", field="room")
        return RouteReply(entry[0], True)

    def _rank_of(self, room: int) -> Registration | None:
        return next((worker for worker, _ in self._workers.values() if worker.dp_rank == room % worker.dp_size), None)

    def look_up_any(self, room: int, *, but: Collection[str]) -> RouteReply:
        """The worker of `room`, else another outside `but`, spread by room."""
        if not self.shared and (worker := self._rank_of(room)) is not None and worker.incarnation not in but:
            return RouteReply(worker, False)
        owner = self._rooms.get(room)
        if owner is not None and owner[0] in self._workers and owner[0] not in but:
            return RouteReply(self._workers[owner[0]][0], self.shared)
        left_out = sorted({bisect_left(self._names, name) for name in but if name in self._workers})
        if len(left_out) == len(self._names):
            raise ApiError(404, "no other prefill worker is registered here")
        place = room % (len(self._names) - len(left_out))
        for gap in left_out:
            place += gap <= place
        return RouteReply(self._workers[self._names[place]][0], self.shared)

    def expire(self, now_s: float) -> None:
        while self._workers and next(iter(self._workers.values()))[1] <= now_s:
            self._drop(next(iter(self._workers)))
        while self._rooms and next(iter(self._rooms.values()))[1] <= now_s:
            self._rooms.popitem(last=False)

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    @property
    def num_rooms(self) -> int:
        return len(self._rooms)

    def check(self) -> None:
        for name, (worker, _) in self._workers.items():
            assert worker.incarnation == name, f"worker {name} is filed wrongly"
        for expiries in ([e for _, e in self._workers.values()], [e for _, e in self._rooms.values()]):
            assert expiries == sorted(expiries), "entries are not in the order they expire in"
        assert self._names == sorted(self._workers), "the sorted names differ from the workers'"
        places = {worker.control: name for name, (worker, _) in self._workers.items()}
        assert self._at == places, "the addresses differ from the workers'"
