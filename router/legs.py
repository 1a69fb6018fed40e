"""One leg: a request to one worker and its answer. Owns the classification of failures.

Decides nothing about retries between workers; a failure is one `LegError` that says what it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from router.deadline import less_time
from router.reports import says_draining
from router.upstream import STREAM_TYPE, Reply, Upstream, UpstreamError
from router.workers import Worker

RETRYABLE_STATUSES = frozenset((500, 502, 503))


class LegError(Exception):
    """A worker did not answer a request well.

    `reason`: one of `UpstreamError`, or "status" (an HTTP error answer, whole in `status`, `headers` (names in lower
    case), `body`).
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
    def retryable(self) -> bool:
        """Another worker may do better. Back-pressure and bad requests (4xx) are the client's to handle."""
        return self.reason in ("refused", "lost") or self.status in RETRYABLE_STATUSES


@dataclass(frozen=True, slots=True)
class Answer:
    """A good answer, begun: `first` is the whole body unless it is a stream, whose first bytes they are."""

    worker: Worker
    response: Reply
    first: bytes
    streaming: bool


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent: the same path and headers for both legs."""

    path: str
    headers: Mapping[str, str]

    def later(self, elapsed_s: float) -> "Call":
        """The same, sent again so many seconds after the first time: less of its timeout is left."""
        return Call(self.path, less_time(self.headers, elapsed_s))


class Legs:
    """Sends legs through one client."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def fetch(self, worker: Worker, call: Call, body: bytes) -> bytes:
        """Post and read the whole answer. `LegError` unless it is a good one."""
        answer = await self.open(worker, call, body, stream=False)
        return answer.first

    async def open(self, worker: Worker, call: Call, body: bytes, *, stream: bool = True) -> Answer:
        """Post and wait for the first bytes of an event stream, or for the whole of any other answer. `LegError`."""
        try:
            reply = await self._upstream.post(worker.url, call.path, headers=call.headers, body=body)
        except UpstreamError as err:
            raise broken_leg(worker, err) from None
        streaming = stream and reply.status < 300 and reply.headers.get("content-type", "").startswith(STREAM_TYPE)
        try:
            first = await (reply.readany() if streaming else reply.read())
        except UpstreamError as err:
            raise broken_leg(worker, err) from None
        except BaseException:  # cancelled
            reply.close()
            raise
        if reply.status >= 300:
            raise LegError(worker, reason="status", status=reply.status, headers=reply.headers, body=first)
        if streaming and not first:
            raise LegError(worker, reason="lost", detail="the stream ended before its first event")
        return Answer(worker, reply, first, streaming)


def broken_leg(worker: Worker, err: UpstreamError) -> LegError:
    """The `LegError` for an answer that did not come, or not to its end."""
    return LegError(worker, reason=err.reason, detail=str(err))
