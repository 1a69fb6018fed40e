"""Registration of prefill at the bootstrap server, and decode's look-ups."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bootstrap_server.client import BootstrapError, Send, look_up, over_http
from bootstrap_server.protocol import Registration
from transfer_backends.contract import KVArgs, LookupFailed, Route
from transfer_backends.prefill.manager import PrefillManager
from transfer_backends.wire import PROTOCOL_VERSION

GRACE_S = 5.0  # time for a bootstrap server to restart
GAP_S = 2.0  # rooms look up every 0.5 s: such a gap ends an outage
MAX_SERVERS = 4096


def registration_of(manager: PrefillManager, kv_args: KVArgs, *, dp_size: int = 1, dp_rank: int = 0) -> Registration:
    host, _, port = manager.control_address.rpartition(":")
    return Registration(
        incarnation=manager.incarnation,
        control_host=host.strip("[]"),
        control_port=int(port),
        protocol_version=PROTOCOL_VERSION,
        page_size=kv_args.page_size,
        signature=kv_args.signature,
        dtype=kv_args.dtype,
        dp_size=dp_size,
        dp_rank=dp_rank,
    )


@dataclass(slots=True)
class Outages:
    """Bootstrap servers that refuse connections. Callers lock.

    A refusing server has `grace_s` to restart; then look-ups fail at once until one is answered or
    none came for `GAP_S`. A silent server's network may heal.
    """

    grace_s: float
    _runs: dict[str, tuple[float, float]] = field(default_factory=dict)  # server -> (first, last refusal), latest last

    def __len__(self) -> int:
        return len(self._runs)

    def refused(self, server: str, now_s: float) -> float | None:
        first_s, last_s = self._runs.pop(server, (now_s, now_s))
        if now_s - last_s > GAP_S:
            first_s = now_s
        self._runs[server] = (first_s, now_s)
        if len(self._runs) > MAX_SERVERS:
            del self._runs[next(iter(self._runs))]
        return now_s - first_s if now_s - first_s >= self.grace_s else None

    def answered(self, server: str) -> None:
        self._runs.pop(server, None)


@dataclass(eq=False, kw_only=True)
class RouteFinder:
    secret: bytes | None
    grace_s: float = GRACE_S
    clock: Callable[[], float] = time.monotonic
    send: Send = over_http

    def __post_init__(self) -> None:
        self._outages = Outages(self.grace_s)
        self._lock = threading.Lock()

    def find(self, bootstrap: str, room: int, any_but: Sequence[str] | None) -> Route:
        """The worker of `room`, or any other. Raises `LookupFailed`."""
        try:
            reply = look_up(bootstrap, room, any_but=any_but, secret=self.secret, send=self.send)
        except BootstrapError as error:
            raise self._failure(bootstrap, error) from error
        with self._lock:
            self._outages.answered(bootstrap)
        worker = reply.worker
        return Route(
            control=worker.control,
            incarnation=worker.incarnation,
            shared=reply.shared,
            dp_size=worker.dp_size,
            dp_rank=worker.dp_rank,
        )

    def _failure(self, bootstrap: str, error: BootstrapError) -> LookupFailed:
        with self._lock:
            if not error.refused:
                self._outages.answered(bootstrap)
                return LookupFailed(str(error), permanent=error.permanent, of_room=error.of_room)
            lasted_s = self._outages.refused(bootstrap, self.clock())
        if lasted_s is None:
            return LookupFailed(str(error))
        return LookupFailed(f"{error}; so for {lasted_s:.0f} s", permanent=True)
