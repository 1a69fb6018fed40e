"""Failures of calls to workers, by kind, and the workers that failed one request."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from router.client.upstream import UpstreamError
from router.pool.reports import reports_draining, reports_request_failed
from router.pool.worker import Pool, Role, Worker

UNJOINED = 502  # status of a decode worker that could not find or reach the prefill worker
MOVED = "moved"  # reason of an answer that was migrated: its KV waits there for another worker
_FAULTS = frozenset((500, UNJOINED, 503))


class CallFailed(Exception):
    """A failed call. `reason`: as UpstreamError, MOVED, or "status" for an HTTP error."""

    def __init__(
        self,
        worker: Worker,
        *,
        reason: str,
        detail: str = "",
        status: int = 0,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> None:
        super().__init__(f"{worker.role} worker {worker.url}: {detail or f'HTTP {status}'}")
        self.worker = worker
        self.reason = reason
        self.status = status
        self.headers = headers or {}
        self.body = body

    @property
    def label(self) -> str:
        return f"http_{self.status}" if self.reason == "status" else self.reason

    @property
    def draining(self) -> bool:
        return self.status == 503 and reports_draining(self.body)

    @property
    def unjoined(self) -> bool:
        """True if decode could not reach prefill: either may be at fault."""
        return self.status == UNJOINED and self.worker.role is Role.DECODE

    @property
    def is_own(self) -> bool:
        """True if the worker blames the request; another worker's answer decides."""
        return self.status == 500 and reports_request_failed(self.body)

    @property
    def is_fault(self) -> bool:
        """True for a worker's fault, which its circuit counts.

        False for errors of the client (4xx; 504), back-pressure (503 with Retry-After), orderly
        ends, calls given up by health checks, unreachable prefill workers. A failure that may be
        the request's counts after another worker's answer (`circuit_blamed`).
        """
        if self.reason != "status":
            return self.reason in ("refused", "lost", "timeout")
        if self.draining or self.unjoined or self.is_own:
            return False
        return self.status in _FAULTS and not (self.status == 503 and "retry-after" in self.headers)

    @property
    def is_death(self) -> bool:
        """True if the worker died with the request, not if only silent."""
        return self.reason == "lost" or (self.status == 503 and self.is_fault)

    @property
    def retryable(self) -> bool:
        """True if another worker may succeed, unlike back-pressure and bad requests."""
        return self.reason in ("refused", "lost", "down", MOVED) or self.status in _FAULTS


def broken_stream(worker: Worker, err: UpstreamError) -> CallFailed:
    if err.reason == "down":
        return CallFailed(worker, reason="down", detail=str(err))
    return CallFailed(worker, reason="lost", detail=f"the stream broke off: {err}")


# ---- The workers that failed one request.

MAX_JOINS = 2

Server = tuple[str, int | None]


def server_of(worker: Worker) -> Server | None:
    return (worker.bootstrap.host, worker.bootstrap.port) if worker.role is Role.PREFILL else None


class FailedWorkers(msgspec.Struct):
    """Failures of one request: dead workers, errors of live ones, and `num_own` of these that the
    request may have caused.

    The workers that failed one request, and those to try next. Other workers come first; after a
    failed join other bootstrap servers, each with `MAX_JOINS` attempts. A failure that the request
    may have caused is tried once elsewhere: an answer blames the first workers, another failure the
    request.
    """

    last: CallFailed
    num_deaths: int = 0
    num_errors: int = 0
    num_own: int = 0
    _suspects: dict[int, Worker] = msgspec.field(default_factory=dict)
    _failed: set[int] = msgspec.field(default_factory=set)
    _unjoined: dict[Server, int] = msgspec.field(default_factory=dict)

    def note(self, failure: CallFailed, workers: Sequence[Worker]) -> None:
        self.last = failure
        self.num_deaths += failure.is_death
        self.num_errors += failure.reason == "status" and not failure.is_death and not failure.draining
        self._failed.add(failure.worker.worker_id)
        if failure.is_own:
            self.num_own += 1
            self._suspects |= {w.worker_id: w for w in workers}
        if failure.is_own or failure.unjoined:
            self._failed.update(w.worker_id for w in workers)
        if failure.unjoined:
            for server in filter(None, map(server_of, workers)):
                self._unjoined[server] = self._unjoined.get(server, 0) + 1

    def has_failed(self, worker: Worker) -> bool:
        return worker.worker_id in self._failed

    @property
    def is_own(self) -> bool:
        """True if different workers failed alike."""
        return self.num_own > 1

    def decides_nothing(self, workers: Iterable[Worker]) -> bool:
        """Return whether all `workers` had the last failure, so that retrying proves nothing."""
        return self.last.is_own and all(w.worker_id in self._suspects for w in workers)

    def take_suspects(self, answering: Iterable[Worker]) -> list[Worker]:
        """Return, once, the workers to blame, as `answering` succeeded."""
        suspects, self._suspects = self._suspects, {}
        for worker in answering:
            suspects.pop(worker.worker_id, None)
        return list(suspects.values())

    def best_of(self, alive: Pool) -> Pool:
        if not self._unjoined:
            return [w for w in alive if w.worker_id not in self._failed] or alive
        left = [w for w in alive if self._num_unjoined(w) < MAX_JOINS]
        fresh = [w for w in left if w.worker_id not in self._failed]
        return [w for w in fresh if not self._num_unjoined(w)] or fresh or left

    def _num_unjoined(self, worker: Worker) -> int:
        server = server_of(worker)
        return 0 if server is None else self._unjoined.get(server, 0)
