"""HTTP client of all calls except generation: the session, its TCP keep-alive, and keys for workers."""

import io
import socket
import time
from collections.abc import Mapping

import aiohttp
import msgspec
from yarl import URL

from service.security.keys import KeyRing, bearer

READ_BUFFER_BYTES = 256 << 10  # buffered bytes beyond which reading stops
PROBES = 4
CALL_TIMEOUT_S = 30.0  # of an admin call
KEEPALIVE_S = 4.0  # below uvicorn's 5 s, so that a kept connection is rarely closed under a new request
_SKIPPED_HEADERS = ("User-Agent", "Accept", "Accept-Encoding")


def open_session(
    *, connect_timeout_s: float, request_timeout_s: float, dead_timeout_s: float = 0.0
) -> aiohttp.ClientSession:
    """Open a session without limits, decoding, proxies or cookies.

    The kernel closes connections dead for `dead_timeout_s`, 0 for never.
    """

    def open_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        opened = socket.socket(*address[:3])
        opened.setblocking(False)
        keep_alive(opened, dead_timeout_s)
        return opened

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10, socket_factory=open_socket
        ),
        timeout=aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=connect_timeout_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=_SKIPPED_HEADERS,
        auto_decompress=False,
        read_bufsize=READ_BUFFER_BYTES,
    )


def keep_alive(opened: socket.socket, dead_timeout_s: float) -> None:
    """Turn on TCP keep-alive (tcp(7)): a probe after a third of the time, then `PROBES`."""
    if dead_timeout_s == 0:
        return
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle_s = max(1, round(dead_timeout_s / 3))
    between_s = max(1, round((dead_timeout_s - idle_s) / PROBES))
    for name, value in (("TCP_KEEPIDLE", idle_s), ("TCP_KEEPINTVL", between_s), ("TCP_KEEPCNT", PROBES)):
        option = getattr(socket, name, None)  # Linux has them all
        if option is not None:
            opened.setsockopt(socket.IPPROTO_TCP, option, value)


class WorkerAnswer(msgspec.Struct, frozen=True):
    """A response. `status` 0: none, with the error in `body`."""

    status: int
    body: bytes
    headers: dict[str, str]
    refused: bool = False


def _in_pieces(body: bytes) -> bytes | io.BytesIO | None:
    """Wrap a long body, to write it as the worker reads it."""
    return io.BytesIO(body) if len(body) > READ_BUFFER_BYTES else body or None


async def call_worker(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> WorkerAnswer:
    """Call the URL verbatim."""
    headers = {**headers, **({"Content-Type": "application/json"} if body else {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(
            method,
            URL(url, encoded=True),
            data=_in_pieces(body),
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            content_type = {"Content-Type": response.headers.get("Content-Type", "application/json")}
            return WorkerAnswer(response.status, await response.read(), content_type)
    except (aiohttp.ClientError, OSError, TimeoutError) as err:
        refused = isinstance(err, aiohttp.ClientConnectorError)
        return WorkerAnswer(0, (str(err) or type(err).__name__).encode(), {}, refused)


class Credentials:
    """The router's own keys replace the client's. `api`: clients' keys, mostly shared with
    workers.
    """

    def __init__(self, *, api: KeyRing, worker: KeyRing | None = None, admin: KeyRing | None = None) -> None:
        self._api = api
        self._worker = worker or KeyRing()
        self._admin = admin or KeyRing()
        self._from_files = [ring for ring in (self._api, self._worker, self._admin) if ring.has_file]

    def own(self) -> dict[str, str]:
        self._refresh()
        return bearer(self._worker.first or self._api.first)

    def own_admin(self) -> dict[str, str]:
        self._refresh()
        return bearer(self._admin.first or self._worker.first or self._api.first)

    def for_client(self, authorization: str) -> dict[str, str]:
        """Return the headers of a client's request. A key that workers share passes, as during a
        rotation the client knows best which one all accept.
        """
        self._refresh()
        if self._worker.first is not None and self._worker.holder(authorization) is None:
            return bearer(self._worker.first)
        return {"Authorization": authorization} if authorization else {}

    def for_admin(self, authorization: str) -> dict[str, str]:
        self._refresh()
        if self._admin.first is None:
            return self.for_client(authorization)
        known = self._admin.holder(authorization) is not None
        return {"Authorization": authorization} if known else bearer(self._admin.first)

    def _refresh(self) -> None:
        """Read key files again each time, as a worker may already refuse the old key."""
        if self._from_files:
            now_s = time.monotonic()
            for ring in self._from_files:
                ring.refresh(now_s, every_s=0.0)
