"""The workers of a pool by the bootstrap server at which decode finds them. Pure."""

from collections.abc import Callable, Mapping, Set

from router.pool.load_order import LogReader
from router.pool.worker import LoadLog, Role, Worker

Server = tuple[str, int | None]
_NONE: Set[int] = frozenset()


def server_of(worker: Worker) -> Server | None:
    """The bootstrap server by which decode finds a prefill worker; None of others."""
    return (worker.bootstrap_host, worker.bootstrap_port) if worker.role is Role.PREFILL else None


class ServerGroups(LogReader):
    """`on_change` is called when `catch_up` finds that a worker has moved to another server."""

    def __init__(self, workers: Mapping[int, Worker], log: LoadLog, *, on_change: Callable[[], None]) -> None:
        super().__init__(workers, log)
        self._on_change = on_change
        self._begin()

    def at(self, server: Server) -> Set[int]:
        """The ids of the workers there."""
        return self._groups.get(server, _NONE)

    def catch_up(self) -> None:
        changed = self._changed()
        if changed is None:
            self._begin()
            self._on_change()
            return
        for worker_id in changed:
            worker = self._workers.get(worker_id)
            self._place(worker_id, None if worker is None else server_of(worker))

    def _place(self, worker_id: int, new: Server | None) -> None:
        old = self._server.get(worker_id)
        if old == new:
            return
        if old is not None:
            self._groups[old].discard(worker_id)
            if not self._groups[old]:
                del self._groups[old]
        self._server[worker_id] = new
        if new is None:
            del self._server[worker_id]
        else:
            self._groups.setdefault(new, set()).add(worker_id)
        self._on_change()

    def _begin(self) -> None:
        self._server: dict[int, Server | None] = {}
        self._groups: dict[Server, set[int]] = {}
        for worker_id, worker in self._workers.items():
            if (server := server_of(worker)) is not None:
                self._server[worker_id] = server
                self._groups.setdefault(server, set()).add(worker_id)
