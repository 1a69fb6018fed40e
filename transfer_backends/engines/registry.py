"""Engines by name; importing a backend's library only for its own engine."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from transfer_backends.contract import BackendUnavailable, Caps, FakeEngine, OpState, Pieces, Region
from transfer_backends.ports import Engine
from transfer_backends.transports import rdma_facts

# ---- Engine shared by a worker's receiver and sender, with serialized calls.


class SharedEngine:
    """`ports.Engine` that registers memory once and closes with the last of `num_users`.

    The threads must not overlap: libraries crash when peers are added during other calls
    (engines/nixl.py), and a follower's proxy is single-threaded.
    """

    def __init__(self, engine: Engine, *, num_users: int) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._num_users = num_users
        self._registered = False

    @property
    def caps(self) -> Caps:
        return self._engine.caps

    def register(self, regions: Sequence[Region]) -> None:
        with self._lock:
            if not self._registered:
                self._registered = True
                self._engine.register(regions)

    def descriptor(self) -> bytes:
        with self._lock:
            return self._engine.descriptor()

    def connect(self, incarnation: str, descriptor: bytes) -> Any:
        with self._lock:
            return self._engine.connect(incarnation, descriptor)

    def disconnect(self, peer: Any) -> None:
        with self._lock:
            self._engine.disconnect(peer)

    def post(self, peer: Any, pieces: Pieces) -> Any:
        with self._lock:
            return self._engine.post(peer, pieces)

    def probe(self, peer: Any) -> Any:
        with self._lock:
            return self._engine.probe(peer)

    def trial(self, peer: Any) -> tuple[Any, int] | None:
        with self._lock:
            return self._engine.trial(peer)

    def fence(self, peer: Any) -> Any:
        with self._lock:
            return self._engine.fence(peer)

    def poll(self, op: Any) -> OpState:
        with self._lock:
            return self._engine.poll(op)

    def progress(self, *, eager: bool = False) -> None:
        with self._lock:
            self._engine.progress(eager=eager)

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
