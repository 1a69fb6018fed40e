"""Engine shared by a worker's receiver and sender, with serialized calls."""

import threading
from collections.abc import Sequence
from typing import Any

from transfer_backends.contract import Caps, OpState, Pieces, Region
from transfer_backends.ports import Engine


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
