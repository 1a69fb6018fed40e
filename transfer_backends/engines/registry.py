"""Engines by name; importing a backend's library only for its own engine."""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from transfer_backends.contract import BackendUnavailable, FakeEngine, Region
from transfer_backends.ports import Engine
from transfer_backends.transports import rdma_facts

# ---- Engine shared by a worker's receiver and sender, with serialized calls.


def _one_at_a_time(name: str) -> Callable[..., Any]:
    def call(self: "SharedEngine", *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return getattr(self._engine, name)(*args, **kwargs)

    return call


class SharedEngine:
    """`ports.Engine` that registers memory once and closes with the last of `num_users`.

    The threads must not overlap: libraries crash when peers are added during other calls
    (engines/nixl.py), and a follower's proxy is single-threaded.
    """

    def __init__(self, engine: Engine, *, num_users: int) -> None:
        self._engine, self.caps = engine, engine.caps
        self._lock = threading.Lock()
        self._num_users = num_users
        self._registered = False

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            if not self._registered:
                self._registered = True
                self._engine.register(regions)

    descriptor = _one_at_a_time("descriptor")
    connect = _one_at_a_time("connect")
    disconnect = _one_at_a_time("disconnect")
    post = _one_at_a_time("post")
    probe = _one_at_a_time("probe")
    trial = _one_at_a_time("trial")
    fence = _one_at_a_time("fence")
    poll = _one_at_a_time("poll")
    progress = _one_at_a_time("progress")

    def close(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                self._engine.close()


# ---- registry

log = logging.getLogger(__name__)

BACKENDS = ("nixl", "mooncake", "fake")


def make_engine(
    name: str,
    *,
    host: str = "127.0.0.1",
    device: int | None = None,
    mooncake_protocol: str = "auto",
    ib_device: str | None = None,
) -> Engine:
    """Raises `BackendUnavailable`. `device`: the pages' GPU."""
    if device is not None and name != "fake" and (shortfall := rdma_facts().shortfall) is not None:
        log.warning("%s", shortfall)
    match name:
        case "nixl":
            from transfer_backends.engines.nixl import NixlEngine

            return NixlEngine(host=host, device=device, ib_device=ib_device)
        case "mooncake":
            from transfer_backends.engines.mooncake import MooncakeEngine

            return MooncakeEngine(host=host, device=device, protocol=mooncake_protocol, ib_device=ib_device)
        case "fake":
            return FakeEngine()
    raise BackendUnavailable(f"transfer backend {name!r} is not one of {', '.join(BACKENDS)}")
