"""HTTP reads of the launcher, and free ports."""

import errno
import os
import random
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any

import requests

from service.flags import ConfigError
from service.http.listening import require_free

_session = requests.Session()
_session.trust_env = False  # never use a proxy for cluster addresses


def is_healthy(url: str, *, timeout_s: float) -> bool:
    try:
        return _session.get(url, timeout=timeout_s).status_code == 200
    except (requests.RequestException, ValueError):
        return False


def get_json(url: str, *, timeout_s: float, api_key: str | None = None) -> dict[str, Any]:
    """{} on failure."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        reply = _session.get(url, headers=headers, timeout=timeout_s)
        reply.raise_for_status()
        value = reply.json()
    except (requests.RequestException, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- Free TCP ports.

LOWEST_PORT = 20000
ATTEMPTS = 10_000
MAX_RESERVED = 256  # later choices: by then the servers of the first ones listen
_reserved = deque[int]()  # descriptors


def free_ports(count: int) -> list[int]:
    """Distinct ports below the kernel's range for outgoing connections.

    A port of that range could become a connection's source port before the server listens. On Linux
    no other process gets one of them here meanwhile.
    """
    ceiling = max(LOWEST_PORT + 2 * count + 1000, _ephemeral_low())
    rng = random.SystemRandom()
    found: list[int] = []
    for _ in range(ATTEMPTS):
        if len(found) == count:
            return found
        port = rng.randrange(LOWEST_PORT, ceiling)
        if port not in found and _is_free(port) and _reserve(port):
            found.append(port)
    raise ConfigError(f"no {count} free ports between {LOWEST_PORT} and {ceiling}; end some servers on this machine")


def _is_free(port: int) -> bool:
    try:
        require_free("127.0.0.1", port, flag="--port")
    except ConfigError:
        return False
    return True


def _reserve(port: int) -> bool:
    """Hold the name of `port` as an abstract socket, which is free when this process ends.

    Where the system refuses such sockets, a port counts as reserved.
    """
    if sys.platform != "linux":
        return True
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0tandem-port-{port}")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        _reserved.append(name.detach())
    if len(_reserved) > MAX_RESERVED:
        os.close(_reserved.popleft())
    return True


def _ephemeral_low() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768
