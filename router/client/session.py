"""HTTP client of all calls except generation, and TCP keep-alive."""

import io
import socket
from collections.abc import Mapping

import aiohttp
import msgspec
from yarl import URL

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
    """`status` 0: none, with the error in `body`."""

    status: int
    body: bytes
    headers: dict[str, str]
    refused: bool = False


async def call_worker(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes = b"",
    *,
    timeout_s: float = CALL_TIMEOUT_S,
) -> WorkerAnswer:
    headers = {**headers, **({"Content-Type": "application/json"} if body else {})}
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(
            method,
            URL(url, encoded=True),
            data=io.BytesIO(body) if len(body) > READ_BUFFER_BYTES else body or None,  # a long one goes in pieces
            headers=headers,
            timeout=timeout,
            allow_redirects=False,
        ) as response:
            content_type = {"Content-Type": response.headers.get("Content-Type", "application/json")}
            return WorkerAnswer(response.status, await response.read(), content_type)
    except (aiohttp.ClientError, OSError, TimeoutError) as err:
        refused = isinstance(err, aiohttp.ClientConnectorError)
        return WorkerAnswer(0, (str(err) or type(err).__name__).encode(), {}, refused)
