"""One leg: a request to one worker and its answer. Owns the list of those that run, and the classification of failures.

Decides nothing about retries between workers; a failure is one `LegError` that says what it was.
"""

import logging
import math
from collections.abc import Mapping
from functools import partial

import msgspec

from router.client.upstream import STREAM_TYPE, Reply, Upstream, UpstreamError
from router.pool.breaker import UNJOINED, is_fault
from router.pool.lifelines import Lifelines
from router.pool.reports import says_draining
from router.pool.worker import Role, Worker
from router.requests.deadline import less_time

log = logging.getLogger(__name__)

RETRYABLE_STATUSES = frozenset((500, 502, 503))


class LegError(Exception):
    """A worker did not answer a request well.

    `reason`: one of `UpstreamError` ("down": the worker is dead, see lifelines.py; never "cancelled"), or "status" (an HTTP error answer,
    whole in `status`, `headers` (names in lower case), `body`).
    """

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
    def draining(self) -> bool:
        """The worker ends in good order: it takes nothing new, or could not finish this one."""
        return self.status == 503 and says_draining(self.body)

    @property
    def unjoined(self) -> bool:
        """Decode could not be joined with its prefill worker: it is told whose fault that is by nobody."""
        return self.status == UNJOINED and self.worker.role is Role.DECODE

    @property
    def is_fault(self) -> bool:
        """Its worker is to blame, and nobody else."""
        decode = self.worker.role is Role.DECODE
        return is_fault(
            reason=self.reason, status=self.status, headers=self.headers, draining=self.draining, decode=decode
        )

    @property
    def retryable(self) -> bool:
        """Another worker may do better. Back-pressure and bad requests (4xx) are the client's to handle."""
        return self.reason in ("refused", "lost", "down") or self.status in RETRYABLE_STATUSES


class Call(msgspec.Struct, frozen=True):
    """What is sent: the same path and headers for both legs."""

    path: str
    headers: Mapping[str, str]

    def later(self, elapsed_s: float) -> "Call":
        """The same, sent again so many seconds after the first time: less of its timeout is left."""
        return Call(self.path, less_time(self.headers, elapsed_s))


class Leg:
    """One request to one worker, under way. `reply.listener` hears when what is said here may have changed."""

    __slots__ = ("_failure", "_stream", "reply", "worker")

    def __init__(self, worker: Worker, reply: Reply, *, stream: bool) -> None:
        self.worker = worker
        self.reply = reply
        self._stream = stream
        self._failure: LegError | None = None

    @property
    def streaming(self) -> bool:
        """The answer is a good one, and to be passed on as it comes."""
        status = self.reply.status
        return self._stream and 0 < status < 300 and self.reply.headers.get("content-type", "").startswith(STREAM_TYPE)

    @property
    def ended(self) -> bool:
        """Nothing more will come."""
        return self.reply.complete or self.reply.error is not None

    @property
    def begun(self) -> bool:
        """There is something to give to the client: the first bytes of a stream, or the whole of any other answer."""
        return self.reply.complete or (self.reply.num_buffered > 0 and self.streaming)

    @property
    def well(self) -> bool:
        """A good answer came, and all of it."""
        return self.reply.complete and self.reply.status < 300

    def failure(self) -> LegError | None:
        """What went wrong before the answer had begun; an answer that begun is judged by who reads it."""
        if self._failure is None:
            self._failure = self._find_failure()
        return self._failure

    def _find_failure(self) -> LegError | None:
        reply = self.reply
        if reply.error is not None:
            return broken_leg(self.worker, reply.error)
        if not reply.complete:
            return None
        if reply.status >= 300:
            return LegError(self.worker, reason="status", status=reply.status, headers=reply.headers, body=reply.take())
        if self.streaming and not reply.num_buffered:
            return LegError(self.worker, reason="lost", detail="the stream ended before its first event")
        return None

    @property
    def waits_since_s(self) -> float | None:
        """Nothing came since then (the loop's time); None: what came is not taken."""
        return None if self.reply.num_buffered else self.reply.heard_s

    @property
    def heard_s(self) -> float:
        """When bytes came last (the loop's time); -inf: none did."""
        return self.reply.heard_s if self.reply.status else -math.inf

    def give_up(self, why: str) -> None:
        """End it: nobody will answer."""
        self.reply.close(UpstreamError("down", why))

    def close(self) -> None:
        self.reply.close()


class Legs:
    """Sends legs through one client; who runs is in `lifelines`."""

    def __init__(self, upstream: Upstream, lifelines: Lifelines) -> None:
        self.lifelines = lifelines
        self._upstream = upstream

    def send(self, worker: Worker, call: Call, body: bytes, *, stream: bool) -> Leg:
        """Send one. `stream`: its answer may be one that is passed on as it comes."""
        reply = self._upstream.post(worker.url, call.path, headers=call.headers, body=body)
        leg = Leg(worker, reply, stream=stream)
        if not leg.ended:
            self.lifelines.begin(leg)
            reply.on_end = partial(self.lifelines.over, leg)
        return leg


def broken_stream(worker: Worker, err: UpstreamError) -> LegError:
    """As `broken_leg`, for an answer of which the client has a part."""
    if err.reason == "down":
        return broken_leg(worker, err)
    return LegError(worker, reason="lost", detail=f"the stream broke off: {err}")


def broken_leg(worker: Worker, err: UpstreamError) -> LegError:
    """The `LegError` for an answer that did not come, or not to its end."""
    return LegError(worker, reason=err.reason, detail=str(err))
