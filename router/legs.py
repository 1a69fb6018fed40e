"""One leg: a request to one worker and its answer. Owns the HTTP client's settings and the classification of failures.

Decides nothing about retries between workers; a failure is one `LegError` that says what it was.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from yarl import URL

from router.deadline import less_time
from router.reports import says_draining
from router.workers import MAX_WORKERS, Worker

RETRYABLE_STATUSES = frozenset((500, 502, 503))
MAX_URLS = 4 * MAX_WORKERS  # parsed ones that are kept
READ_BUFFER_BYTES = 256 << 10
KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that a kept connection is rarely closed under a new request

_SKIPPED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")
_STREAM_TYPE = "text/event-stream"


class LegError(Exception):
    """A worker did not answer a request well.

    `reason`: "refused" (nothing listens), "lost" (connection failed or broke), "timeout", or "status" (an HTTP error
    answer, whole in `status`, `headers`, `body`).
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
    response: aiohttp.ClientResponse
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


def open_session(*, connect_timeout_s: float, request_timeout_s: float) -> aiohttp.ClientSession:
    """The one client of a router: unlimited connections, nothing decoded, no proxies, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10),
        timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_SKIPPED_HEADERS,
        auto_decompress=False,
        read_bufsize=READ_BUFFER_BYTES,
    )


class Legs:
    """Sends legs through one session."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._urls: dict[tuple[str, str], URL] = {}

    async def fetch(self, worker: Worker, call: Call, body: bytes) -> bytes:
        """Post and read the whole answer. `LegError` unless it is a good one."""
        answer = await self.open(worker, call, body, stream=False)
        return answer.first

    async def open(self, worker: Worker, call: Call, body: bytes, *, stream: bool = True) -> Answer:
        """Post and wait for the first bytes of an event stream, or for the whole of any other answer. `LegError`."""
        try:
            response = await self._session.post(
                self._url(worker.url, call.path), data=body, headers=call.headers, allow_redirects=False
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            raise connection_error(worker, err) from None
        return await _begin(worker, response, stream=stream)

    def _url(self, base: str, path: str) -> URL:
        """Parsed once per worker and path: parsing costs more than a dictionary look-up."""
        url = self._urls.get((base, path))
        if url is None:
            if len(self._urls) >= MAX_URLS:  # of workers that left
                self._urls.clear()
            url = self._urls[base, path] = URL(base + path)
        return url


async def _begin(worker: Worker, response: aiohttp.ClientResponse, *, stream: bool) -> Answer:
    streaming = stream and response.status < 300 and response.content_type == _STREAM_TYPE
    try:
        first = await (response.content.readany() if streaming else response.read())
    except (aiohttp.ClientError, OSError, TimeoutError) as err:
        response.close()
        raise connection_error(worker, err) from None
    except asyncio.CancelledError:
        response.close()
        raise
    if response.status >= 300:
        raise LegError(worker, reason="status", status=response.status, headers=response.headers, body=first)
    if streaming and not first:
        raise LegError(worker, reason="lost", detail="the stream ended before its first event")
    return Answer(worker, response, first, streaming)


def connection_error(worker: Worker, err: BaseException) -> LegError:
    """The `LegError` for what the client library raised."""
    if isinstance(err, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return LegError(worker, reason="refused", detail=_detail(err))
    if isinstance(err, TimeoutError):
        return LegError(worker, reason="timeout", detail="no answer in time (--request-timeout-s)")
    return LegError(worker, reason="lost", detail=_detail(err))


def _detail(err: BaseException) -> str:
    return str(err) or type(err).__name__
