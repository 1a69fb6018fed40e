"""Trial write to each new peer: its rate and transport."""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transfer_backends.contract import Caps, Clock, PeerPath
from transfer_backends.ports import Engine
from transfer_backends.prefill.paths import ConnectPeer
from transfer_backends.transports import (
    Evidence,
    RdmaFacts,
    explain_slow_gpu,
    name_transport,
    rdma_facts,
    surroundings_of,
    tcp_bytes_acked,
)

MAX_REPORTED = 64  # the newest

log = logging.getLogger(__name__)

Sockets = dict[int, int] | None  # acknowledged bytes, by inode


@dataclass(eq=False)
class Trial:
    """Sockets `known` before the peer, and `before` the write."""

    command: ConnectPeer
    size_bytes: int
    known: Sockets
    before: Sockets
    started_s: float

    @property
    def incarnation(self) -> str:
        return self.command.incarnation


@dataclass(eq=False, kw_only=True)
class Trials:
    """Any thread reads `paths`."""

    caps: Caps
    machine: str
    on_gpu: bool
    clock: Clock
    sockets: Callable[[], Sockets] = tcp_bytes_acked
    rdma: Callable[[], RdmaFacts] = rdma_facts
    _known: dict[str, Sockets] = field(default_factory=dict)
    _paths: OrderedDict[str, PeerPath] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def paths(self) -> list[PeerPath]:
        with self._lock:
            return list(self._paths.values())[-MAX_REPORTED:]

    def before_connect(self, incarnation: str) -> None:
        self._known[incarnation] = self.sockets()

    def start(self, command: ConnectPeer, engine: Engine, peer: Any) -> tuple[Trial, Any] | None:
        """None if the engine moves no bytes."""
        before, started_s = self.sockets(), self.clock()
        started = engine.trial(peer)
        if started is None:
            return None
        op, size_bytes = started
        return Trial(command, size_bytes, self._known.get(command.incarnation), before, started_s), op

    def end(self, trial: Trial) -> None:
        seconds = self.clock() - trial.started_s
        new, everything = delivered(trial.known, trial.before, self.sockets())
        seen = Evidence(trial.size_bytes, seconds, new, everything)
        caps = self.caps
        around = surroundings_of(
            self.machine,
            trial.command.origin.machine,
            rdma=self.rdma() if caps.carries_host_memory else RdmaFacts(has_rdma=False),  # RDMA would carry it
            inside=caps.inside_machine,
            backend=caps.name,
            ucx_tls=os.environ.get("UCX_TLS", ""),
        )
        transport = name_transport(seen, around)
        path = PeerPath(
            peer=trial.incarnation,
            address=trial.command.origin.address,
            near=around.near,
            transport=transport,
            bytes_a_s=seen.bytes_a_s,
            at_unix_s=time.time(),
        )
        with self._lock:
            self._paths.pop(trial.incarnation, None)
            self._paths[trial.incarnation] = path
        log.info("KV to decode worker %r: transport %s, %.2f GB/s", path.address, transport, path.bytes_a_s / 1e9)
        if self.on_gpu and (cause := explain_slow_gpu(transport, seen, around)) is not None:
            text = "KV of a GPU goes to decode worker %r at %.2f GB/s (%s): %s"
            log.warning(text, path.address, path.bytes_a_s / 1e9, transport, cause)

    def forget(self, incarnation: str) -> None:
        self._known.pop(incarnation, None)
        with self._lock:
            self._paths.pop(incarnation, None)


def delivered(known: Sockets, before: Sockets, after: Sockets) -> tuple[int | None, int | None]:
    """Bytes delivered since `before` by new sockets and by all, if known."""
    if known is None or before is None or after is None:
        return None, None
    grown = {inode: max(0, acked - before.get(inode, 0)) for inode, acked in after.items()}
    return sum(grown[inode] for inode in grown.keys() - known.keys()), sum(grown.values())
