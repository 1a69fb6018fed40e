"""One HTTP request to one worker, its failures by kind, and the workers that failed one request."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from router.client.upstream import HttpReply, UpstreamError
from router.pool.breaker import Event
from router.pool.reports import reports_draining, reports_request_failed
from router.pool.worker import Pool, Role, Worker
from service.http.resume import FRAMES_TYPE
from service.http.routes import STREAM_TYPES

if TYPE_CHECKING:
    from router.attempts.pair_attempt import PairAttempt
    from router.attempts.request import RequestContext

UNJOINED = 502  # status of a decode worker that could not find or reach the prefill worker
MOVED = "moved"  # reason of an answer that was migrated: its KV waits there for another worker
_IN_PIECES = (*STREAM_TYPES, FRAMES_TYPE)
_FAULTS = frozenset((500, UNJOINED, 503))


class CallFailed(Exception):
    """`reason`: as UpstreamError, MOVED, or "status" for an HTTP error."""

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
        self.detail = detail or f"HTTP {status}"
        super().__init__(f"{worker.role} worker {worker.url}: {self.detail}")
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
        """Decode could not reach prefill: either may be at fault."""
        return self.status == UNJOINED and self.worker.role is Role.DECODE

    @property
    def is_own(self) -> bool:
        """The worker blames the request; another worker's answer decides."""
        return self.status == 500 and reports_request_failed(self.body)

    @property
    def is_fault(self) -> bool:
        """A worker's fault, which its circuit counts.

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
        """The worker died with the request; silence is not enough."""
        return self.reason == "lost" or (self.status == 503 and self.is_fault)

    @property
    def retryable(self) -> bool:
        """Another worker may succeed, unlike back-pressure and bad requests."""
        return self.reason in ("refused", "lost", "down", MOVED) or self.status in _FAULTS


class UpstreamCall:
    """`stream` permits streaming its answer."""

    def __init__(self, worker: Worker, reply: HttpReply, *, stream: bool) -> None:
        self.worker = worker
        self.reply = reply
        self._stream = stream
        self._failure: CallFailed | None = None
        # Set once the client has a part of the answer: whether another worker can continue.
        self.goes_on: Callable[[], bool] | None = None
        self.rooms_to_leave: Callable[[], Mapping[str, int]] = dict
        self.names_owner = ""  # owner of its samples' names
        self._leaves = False

    @property
    def movable(self) -> bool:
        return not (self.ended or self._leaves) and (self.goes_on is None or self.goes_on())

    @property
    def continuable(self) -> bool:
        return not (self.ended or self._leaves) and self.goes_on is not None and self.goes_on()

    def leave(self) -> Mapping[str, int]:
        rooms = self.rooms_to_leave()
        self._leaves = bool(rooms)
        return rooms

    @property
    def streaming(self) -> bool:
        return self._is_of(STREAM_TYPES)

    @property
    def framed(self) -> bool:
        """A whole answer comes after frames (service/http/resume.py)."""
        return self._is_of((FRAMES_TYPE,))

    def _is_of(self, types: tuple[str, ...]) -> bool:
        status = self.reply.status
        return self._stream and 0 < status < 300 and self.reply.headers.get("content-type", "").startswith(types)

    @property
    def ended(self) -> bool:
        return self.reply.complete or self.reply.error is not None

    @property
    def begun(self) -> bool:
        """True from a stream's first bytes, else at the end."""
        return self.reply.complete or (self.reply.num_buffered > 0 and self._is_of(_IN_PIECES))

    def failure(self) -> CallFailed | None:
        """A failure before the answer started; later ones go to its reader."""
        if self._failure is None:
            self._failure = self._find_failure()
        return self._failure

    def _find_failure(self) -> CallFailed | None:
        reply = self.reply
        if reply.error is not None:
            return CallFailed(self.worker, reason=reply.error.reason, detail=str(reply.error))
        if not reply.complete:
            return None
        if reply.status >= 300:
            return CallFailed(
                self.worker, reason="status", status=reply.status, headers=reply.headers, body=reply.take()
            )
        if self.streaming and not reply.num_buffered:
            return CallFailed(self.worker, reason="lost", detail="the stream ended before its first event")
        return None

    @property
    def waits_since_s(self) -> float | None:
        """Loop time of the last bytes; None while bytes are buffered."""
        return None if self.reply.num_buffered else self.reply.received_s

    @property
    def last_byte_s(self) -> float:
        return self.reply.received_s if self.reply.status else -math.inf

    def give_up(self, why: str) -> None:
        self.reply.close(UpstreamError("down", why))

    def record_end(self, now_s: float) -> None:
        """Report a good end to the circuit; faults are reported as they happen."""
        if not self.worker.circuit.quiet and self.reply.complete and self.reply.status < 300:
            self.worker.circuit.record(Event.WELL, now_s)


def stays() -> bool:
    return False


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
    request may have caused. Other workers come first; after a failed join other bootstrap
    servers, each with `MAX_JOINS` attempts. A failure that the request may have caused is tried
    once elsewhere: an answer blames the first workers, another failure the request.
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
        """Different workers failed alike."""
        return self.num_own > 1

    def decides_nothing(self, workers: Iterable[Worker]) -> bool:
        """All `workers` had the last failure: retrying proves nothing."""
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


# ---- Receivers of events (router/attempts/request.py)


def circuit_started(request: "RequestContext", attempt: "PairAttempt", now_s: float) -> None:
    for worker in attempt.workers:
        if not worker.circuit.quiet:
            worker.circuit.record(Event.BEGUN, now_s)


def circuit_failed(failure: CallFailed, now_s: float) -> None:
    if failure.is_fault:
        failure.worker.circuit.record(Event.FAULT, now_s)


def circuit_blamed(request: "RequestContext", attempt: "PairAttempt", now_s: float) -> None:
    """Record a fault of the workers whose request `attempt` then answered."""
    if request.failed is not None:
        for worker in request.failed.take_suspects(attempt.workers):
            worker.circuit.record(Event.FAULT, now_s)


def circuit_answered(attempt: "PairAttempt", now_s: float) -> None:
    attempt.answering.record_end(now_s)


def circuit_prefilled(attempt: "PairAttempt", now_s: float) -> None:
    if attempt.prefill is not None:
        attempt.prefill.record_end(now_s)
