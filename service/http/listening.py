"""The TCP port of a server, which may outlive it."""

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from service.flags import ConfigError

BACKLOG = 1024


class ListeningPort:
    """Made by `open_port`; `port` is never 0."""

    def __init__(self, host: str, port: int, sockets: list[socket.socket]) -> None:
        self.host, self.port, self.url = host, port, url_of(host, port)
        self.sockets = sockets

    @classmethod
    def inherited(cls, host: str, descriptors: Iterable[int]) -> "ListeningPort":
        """Take a port over from the parent."""
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        return cls(host, sockets[0].getsockname()[1], sockets)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(sock.fileno() for sock in self.sockets)


def url_of(host: str, port: int) -> str:
    """The URL for local clients."""
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def open_port(host: str, port: int, *, flag: str = "--port", shared: bool = False) -> Iterator[ListeningPort]:
    """Hold the port. `shared`: SO_REUSEPORT. ConfigError names `flag`."""
    sockets: list[socket.socket] = []
    try:
        try:
            for address in _addresses(host, port):
                bound_port = sockets[0].getsockname()[1] if sockets else port
                sockets.append(_bound(*address, port=bound_port, shared=shared))
        except OSError as error:
            raise ConfigError(_message(host, port, flag, error)) from None
        yield ListeningPort(host, sockets[0].getsockname()[1], sockets)
    finally:
        for sock in sockets:
            sock.close()


@contextmanager
def open_shared_ports(host: str, port: int, *, count: int) -> Iterator[tuple[ListeningPort, ...]]:
    """Hold one port `count` times: the kernel distributes connections. Raises ConfigError."""
    with open_port(host, port) as free:  # not shared, so that no other server shares it by accident
        number = free.port
    with ExitStack() as stack:
        yield tuple(stack.enter_context(open_port(host, number, shared=True)) for _ in range(count))


def require_free(host: str, port: int, *, flag: str) -> None:
    """Raise ConfigError if the port cannot be bound."""
    with open_port(host, port, flag=flag):
        pass


def _message(host: str, port: int, flag: str, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{flag}: {host}:{port} is taken; choose another {flag}"
    return f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}"


def why_unreachable(error: OSError | TimeoutError) -> str:
    """An error's text without addresses."""
    return os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or str(error)


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _bound(family: int, address: tuple[Any, ...], *, port: int, shared: bool) -> socket.socket:
    # asyncio sets TCP_NODELAY only where the protocol is named: else a body waits 40 ms for its head's acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):  # as in asyncio: IPv4 has a socket of its own
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port, *address[2:]))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


# ---- Calls to a server's other processes at unix sockets.

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class UnixPeers:
    def __init__(self, paths: Iterable[Path], *, headers: Mapping[str, str]) -> None:
        self._headers = {**headers, "Content-Type": "application/json"}
        self._sessions = [
            aiohttp.ClientSession("http://peer", connector=aiohttp.UnixConnector(path=str(path))) for path in paths
        ]

    @property
    def num(self) -> int:
        return len(self._sessions)

    async def request(self, method: str, path: str, body: Any = None, *, timeout_s: float = TIMEOUT_S) -> list[bytes]:
        """Send to all peers; return bodies of timely 200 answers."""
        data = None if body is None else msgspec.json.encode(body)
        calls = (self._request(session, method, path, data, timeout_s) for session in self._sessions)
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()

    async def _request(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None, timeout_s: float
    ) -> bytes | None:
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with session.request(method, path, data=data, headers=self._headers, timeout=timeout) as response:
                answer = await response.read()
                return answer if response.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError) as err:
            log.debug("a peer did not answer %s %s: %s", method, path, err)
            return None
