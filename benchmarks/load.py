"""A closed-loop load on one HTTP port, by hand on uvloop, so that its own time hides little. Knows nothing of routers."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

PROMPT = "the quick brown fox jumps over the lazy dog " * 5  # a body of about 300 bytes
BODY = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":64,"temperature":0%s}'


@dataclass(slots=True)
class Seen:
    """What one load saw. Seconds; one entry a request."""

    first_byte_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    events: int = 0


def request_bytes(host: str, *, stream: bool, body: bytes | None = None) -> bytes:
    """A chat request; `body`: of another one than usual."""
    body = body or BODY % (PROMPT.encode(), b',"stream":true' if stream else b"")
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (host.encode(), len(body), body)
    )


class _Client(asyncio.Protocol):
    """One kept-alive connection: the next request when the last answer has ended."""

    def __init__(self, *, request: bytes, stream: bool, until_s: float, seen: Seen) -> None:
        self._request = request
        self._stream = stream
        self._until_s = until_s
        self._seen = seen
        self._got = b""
        self._first_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def _send(self) -> None:
        self._got, self._first_s, self._begin_s = b"", 0.0, time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._first_s == 0.0:
            body = self._got.find(b"\r\n\r\n")
            if body < 0 or len(self._got) == body + 4:
                return
            self._first_s = time.perf_counter()
        if not self._ended():
            return
        now_s = time.perf_counter()
        if b" 200 " not in self._got[:20]:
            return self._fail(RuntimeError(f"not 200: {self._got[:300]!r}"))
        self._seen.first_byte_s.append(self._first_s - self._begin_s)
        self._seen.whole_s.append(now_s - self._begin_s)
        self._seen.events += self._got.count(b"data: ") if self._stream else 0
        if now_s < self._until_s:
            return self._send()
        self._transport.close()
        self.done.set_result(None)
        return None

    def _ended(self) -> bool:
        if self._stream:
            return self._got.endswith(b"0\r\n\r\n")
        head, _, body = self._got.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        if at < 0:
            return self._got.endswith(b"0\r\n\r\n")
        return len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(exc or ConnectionError("the connection was closed under a request"))

    def _fail(self, err: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(err)


async def load(url: str, *, clients: int, seconds: float, stream: bool, body: bytes | None = None) -> Seen:
    """Keep `clients` connections busy for `seconds`. Raises on the first answer that is not 200."""
    parts = urlsplit(url)
    seen, until_s = Seen(), time.perf_counter() + seconds
    request = request_bytes(parts.netloc, stream=stream, body=body)
    loop = asyncio.get_running_loop()
    made = [
        await loop.create_connection(
            lambda: _Client(request=request, stream=stream, until_s=until_s, seen=seen), parts.hostname, parts.port
        )
        for _ in range(clients)
    ]
    await asyncio.gather(*(client.done for _, client in made))
    return seen
