"""The HTTP port of a worker, bound for as long as the worker lives. Owns the sockets, not who answers there.

A worker that changes its role closes one server and opens the next. In between nobody is refused: connections wait in the
kernel's queue until the next server takes them.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import web

from service.flags import ConfigError

BACKLOG = 1024


class Listener:
    """Use `open_listener`. `host`: as the flag has it; `port`: the one that was taken (the flag may say 0)."""

    def __init__(self, host: str, port: int, sockets: list[socket.socket]) -> None:
        self.host, self.port = host, port
        self._sockets = sockets

    async def serve(self, runner: web.BaseRunner) -> None:
        """`runner` answers here until it is cleaned up. It closes copies; the port stays ours."""
        for sock in self._sockets:
            await web.SockSite(runner, sock.dup(), backlog=BACKLOG).start()


@contextmanager
def open_listener(host: str, port: int) -> Iterator[Listener]:
    """The port is ours while inside. Raises ConfigError where it cannot be had."""
    sockets: list[socket.socket] = []
    try:
        try:
            for address in _addresses(host, port):
                sockets.append(_bound(*address, port=sockets[0].getsockname()[1] if sockets else port))
        except OSError as e:
            raise ConfigError(
                f"--port {port}: cannot listen on {host}:{port} ({e.strerror or e}); choose another with --port"
            ) from None
        yield Listener(host, sockets[0].getsockname()[1], sockets)
    finally:
        for sock in sockets:
            sock.close()


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """(family, address) of each that the name stands for, as asyncio's servers take them; "": every one of this machine."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((int(family), address) for family, _, _, _, address in found))


def _bound(family: int, address: tuple[Any, ...], *, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):  # asyncio does so: IPv4 has a socket of its own
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port, *address[2:]))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
