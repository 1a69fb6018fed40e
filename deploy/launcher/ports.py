"""Free TCP ports, and a clear word about a taken one."""

import errno
import random
import socket
from pathlib import Path

from service.flags import ConfigError

LOWEST_PORT = 20000
ATTEMPTS = 10_000


def require_free(host: str, port: int, *, flag: str) -> None:
    """Raise `ConfigError` naming `flag` unless a server could listen on host:port now."""
    try:
        _bind(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{flag}: port {port} on {host} is taken by another process; choose another") from None
        raise ConfigError(f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}") from None


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct free ports below the range that the kernel hands out to outgoing connections.

    A port from inside that range could become some connection's source port between this call and the listen.
    """
    ceiling = max(LOWEST_PORT + 2 * count + 1000, _ephemeral_low())
    rng = random.SystemRandom()
    found: list[int] = []
    for _ in range(ATTEMPTS):
        if len(found) == count:
            return found
        port = rng.randrange(LOWEST_PORT, ceiling)
        if port not in found and _is_free(host, port):
            found.append(port)
    raise ConfigError(f"no {count} free ports between {LOWEST_PORT} and {ceiling}; end some servers on this machine")


def _is_free(host: str, port: int) -> bool:
    try:
        _bind(host, port).close()
    except OSError:
        return False
    return True


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
        0
    ]
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1)
    except OSError:
        sock.close()
        raise
    return sock


def _ephemeral_low() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
