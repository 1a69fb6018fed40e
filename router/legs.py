"""One leg: a request to one worker and its answer. Owns the waits for a worker and the classification of failures.

Decides nothing about retries between workers; a failure is one `LegError` that says what it was.
"""

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from router.deadline import less_time
from router.lifelines import Lifelines
from router.reports import says_draining
from router.workers import MAX_WORKERS, Role, Worker

log = logging.getLogger(__name__)

UNJOINED = 502  # what a decode worker answers when it could not find or reach the prefill worker
RETRYABLE_STATUSES = frozenset((500, 502, 503))
MAX_URLS = 4 * MAX_WORKERS  # parsed ones that are kept

_STREAM_TYPE = "text/event-stream"


class LegError(Exception):
    """A worker did not answer a request well.

    `reason`: "refused" (nothing listens), "lost" (connection failed or broke), "down" (given up: the worker is dead, see
    lifelines.py), "timeout", or "status" (an HTTP error answer, whole in `status`, `headers`, `body`).
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
        self.detail = detail
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
    def retryable(self) -> bool:
        """Another worker may do better. Back-pressure and bad requests (4xx) are the client's to handle."""
        return self.reason in ("refused", "lost", "down") or self.status in RETRYABLE_STATUSES


class Answer:
    """A good answer, begun: `first` is the whole body unless it is a stream, whose first bytes they are. `close()` it."""

    def __init__(self, response: aiohttp.ClientResponse, wait: "Wait") -> None:
        self.response = response
        self.streaming = False
        self.first = b""
        self._wait = wait

    @property
    def worker(self) -> Worker:
        return self._wait.worker

    async def read(self) -> bytes:
        """The next bytes of the stream, b"" at its end. `LegError` if it breaks off."""
        try:
            return await self._wait.read(self.response)
        except LegError as failure:
            if failure.reason == "down":
                raise
            raise LegError(self.worker, reason="lost", detail=f"the stream broke off: {failure.detail}") from None

    def close(self) -> None:
        """Nothing more of it is wanted. The connection of an answer that was read to its end is kept."""
        self._wait.close()
        self.response.release() if self.response.content.is_eof() else self.response.close()


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent: the same path and headers for both legs."""

    path: str
    headers: Mapping[str, str]

    def later(self, elapsed_s: float) -> "Call":
        """The same, sent again so many seconds after the first time: less of its timeout is left."""
        return Call(self.path, less_time(self.headers, elapsed_s))


class Legs:
    """Sends legs through one session; who runs is in `lifelines`."""

    def __init__(self, session: aiohttp.ClientSession, lifelines: Lifelines | None = None) -> None:
        self.lifelines = Lifelines(timeout_s=0) if lifelines is None else lifelines
        self._session = session
        self._urls: dict[tuple[str, str], URL] = {}

    def on_checked(self, worker: Worker) -> None:
        """`worker` was looked at: end the legs that wait for it in vain."""
        count = self.lifelines.give_up(worker, _now_s())
        if count:
            log.warning("%d requests at %s worker %s were given up: it is gone", count, worker.role, worker.url)

    async def fetch(self, worker: Worker, call: Call, body: bytes) -> bytes:
        """Post and read the whole answer. `LegError` unless it is a good one."""
        answer = await self.open(worker, call, body, stream=False)
        return answer.first

    async def open(self, worker: Worker, call: Call, body: bytes, *, stream: bool = True) -> Answer:
        """Post and wait for the first bytes of an event stream, or for the whole of any other answer. `LegError`."""
        wait = Wait(self.lifelines, worker)
        try:
            post = self._session.post(
                self._url(worker.url, call.path), data=body, headers=call.headers, allow_redirects=False
            )
            answer = Answer(await wait.until(post), wait)
            await _begin(answer, wait, stream=stream)
        except BaseException:
            wait.close()
            raise
        if not answer.streaming:
            wait.close()
        return answer

    def _url(self, base: str, path: str) -> URL:
        """Parsed once per worker and path: parsing costs more than a dictionary look-up."""
        url = self._urls.get((base, path))
        if url is None:
            if len(self._urls) >= MAX_URLS:  # of workers that left
                self._urls.clear()
            url = self._urls[base, path] = URL(base + path)
        return url


class Wait:
    """One leg's waits for its worker; each ends with bytes, a `LegError`, or when the leg is given up."""

    def __init__(self, lifelines: Lifelines, worker: Worker) -> None:
        self.worker = worker
        self._lifelines = lifelines
        self._line = lifelines.begin(worker, cut=_ignore, now_s=_now_s())

    async def until(self, response: Awaitable[aiohttp.ClientResponse]) -> aiohttp.ClientResponse:
        """The answer's head."""
        scope = asyncio.timeout(None)
        self._line.cut = lambda: scope.reschedule(_now_s())
        try:
            async with scope:
                return await response
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise self._error(err) from None

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """The next bytes of the body, b"" at its end."""
        line = self._line
        line.cut = response.close
        line.waits_since_s = _now_s()
        try:
            chunk = await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise self._error(err) from None
        line.waits_since_s = None
        if not chunk:
            self.close()
        return chunk

    def _error(self, err: BaseException) -> LegError:
        if self._line.why:
            return LegError(self.worker, reason="down", detail=self._line.why)
        return connection_error(self.worker, err)

    def close(self) -> None:
        self._lifelines.over(self._line)


async def _begin(answer: Answer, wait: Wait, *, stream: bool) -> None:
    """Read the first bytes of an event stream, or the whole of any other answer, into `answer.first`."""
    response = answer.response
    answer.streaming = stream and response.status < 300 and response.content_type == _STREAM_TYPE
    try:
        answer.first = await wait.read(response)
        if not answer.streaming:
            answer.first = await _whole(answer.first, wait, response)
    except BaseException:
        response.close()
        raise
    if response.status >= 300:
        raise LegError(
            wait.worker, reason="status", status=response.status, headers=response.headers, body=answer.first
        )
    if answer.streaming and not answer.first:
        raise LegError(wait.worker, reason="lost", detail="the stream ended before its first event")


async def _whole(first: bytes, wait: Wait, response: aiohttp.ClientResponse) -> bytes:
    parts = [first]
    while parts[-1]:
        parts.append(await wait.read(response))
    return b"".join(parts)


def _now_s() -> float:
    """The event loop's time: monotonic, and virtual in a simulation."""
    return asyncio.get_running_loop().time()


def _ignore() -> None:
    pass


def connection_error(worker: Worker, err: BaseException) -> LegError:
    """The `LegError` for what the client library raised."""
    if isinstance(err, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return LegError(worker, reason="refused", detail=_detail(err))
    if isinstance(err, TimeoutError):
        return LegError(worker, reason="timeout", detail="no answer in time (--request-timeout-s)")
    return LegError(worker, reason="lost", detail=_detail(err))


def _detail(err: BaseException) -> str:
    return str(err) or type(err).__name__
