"""The engine's paths into the memory of decode workers: connect, fence, drop. Pure.

    CONNECTING --connected--> OPEN --op failed--> FENCING --fenced--> OPEN
                                                     +--fence failed--> CONNECTING (after a back-off)

Bytes of a connection whose fence failed may still land: TCP sends them again once the network is whole. The path settles when the
peer has been reached again and has stayed reachable for `settle_s`, or for as long as the outage lasted: a sender that backs off
(RFC 6298, 5.5) waits no longer than that before it tries again.

A lost peer is dropped once its path is *quiet*: none of its operations can still write. A peer has one path, to one KV region.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from transfer_backends.contract import Region
from transfer_backends.peers import Peer, PeerTable
from transfer_backends.timers import RetryTimer, RunningTime
from transfer_backends.wire import PollRequest

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
POLL_REQUEST_EVERY_S = 0.1  # decode stays awake for longer than that


class PathState(Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    FENCING = "fencing"


@dataclass(frozen=True)
class RemoteMemory:
    kv: Region
    aux: Region
    descriptor: bytes


@dataclass(eq=False)
class Path:
    """`num_ops`: posted and not final. In running time: `broken_at_s`, when a fence failed (None: the path is settled), and
    `settles_at_s`, until when bytes of the broken connection may land.
    """

    memory: RemoteMemory
    state: PathState = PathState.CONNECTING
    num_ops: int = 0
    reconnect: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_RETRY_S, LONGEST_RETRY_S))
    broken_at_s: float | None = None
    settles_at_s: float = math.inf
    next_poll_request_s: float = 0.0

    @property
    def open(self) -> bool:
        return self.state is PathState.OPEN and self.broken_at_s is None

    @property
    def quiet(self) -> bool:
        return not self.num_ops and self.broken_at_s is None and self.state is not PathState.FENCING


@dataclass(eq=False, kw_only=True)
class DecodePeer(Peer):
    path: Path


@dataclass(frozen=True)
class ConnectPeer:
    """Connect the engine and probe the path; call `on_connected` or `on_connect_failed`."""

    incarnation: str
    descriptor: bytes


@dataclass(frozen=True)
class FencePeer:
    """Run the engine's fence, disconnect if it fails, and call `on_fenced`."""

    incarnation: str


@dataclass(frozen=True)
class DropPeer:
    """Disconnect the engine once it is idle."""

    incarnation: str


Command = ConnectPeer | FencePeer | DropPeer


class Paths:
    """`commands`: for the engine, in order; the driver takes them."""

    def __init__(self, peers: PeerTable[DecodePeer], *, settle_s: float) -> None:
        self.commands: deque[Command] = deque()
        self._peers = peers
        self._settle_s = settle_s
        self._ran = RunningTime()

    def connect(self, peer: DecodePeer) -> None:
        peer.path.state = PathState.CONNECTING
        peer.path.reconnect.at_s = None
        self.commands.append(ConnectPeer(peer.incarnation, peer.path.memory.descriptor))

    def on_connected(self, peer: DecodePeer, now_s: float) -> None:
        path, ran_s = peer.path, self._ran.at(now_s)
        path.state = PathState.OPEN
        path.reconnect.reset()
        if path.broken_at_s is not None:
            path.settles_at_s = ran_s + max(self._settle_s, ran_s - path.broken_at_s)

    def on_op_final(self, peer: DecodePeer, *, ok: bool) -> None:
        """After a failed operation, fence when the last has ended."""
        path = peer.path
        path.num_ops -= 1
        if not ok and path.state is PathState.OPEN:
            path.state = PathState.FENCING
        if path.num_ops == 0 and path.state is PathState.FENCING:
            self.commands.append(FencePeer(peer.incarnation))

    def on_fenced(self, peer: DecodePeer, *, ok: bool, now_s: float) -> bool:
        """Return True if no earlier operation can write any more; else the path must settle first."""
        path = peer.path
        if ok:
            if path.state is PathState.FENCING:
                path.state = PathState.OPEN
            return True
        self._peers.effects.counters["fence_failures"] += 1
        path.broken_at_s, path.settles_at_s = self._ran.at(now_s), math.inf
        if path.state is PathState.FENCING:
            path.state = PathState.CONNECTING
            path.reconnect.plan(now_s)
        return False

    def on_pending(self, incarnation: str, now_s: float) -> None:
        """Ask decode to poll its engine, since an operation does not end."""
        peer = self._peers.get(incarnation)
        if peer is not None and now_s >= peer.path.next_poll_request_s:
            peer.path.next_poll_request_s = now_s + POLL_REQUEST_EVERY_S
            self._peers.effects.counters["nudges"] += 1
            self._peers.send(peer, PollRequest(*self._peers.address(peer)))

    def tick(self, now_s: float) -> list[DecodePeer]:
        """Reconnect where due; return the peers whose paths have settled."""
        self._ran.tick(now_s)
        settled = []
        for peer in self._peers:
            path = peer.path
            if path.broken_at_s is not None and self._ran.at(now_s) >= self._settles_at_s(peer, path.broken_at_s):
                path.broken_at_s = None
                settled.append(peer)
            if path.reconnect.due(now_s) and not peer.lost:
                self.connect(peer)
        return settled

    def _settles_at_s(self, peer: DecodePeer, broken_at_s: float) -> float:
        """A lost peer is not connected again, so its path settles without that."""
        return min(peer.path.settles_at_s, broken_at_s + self._settle_s) if peer.lost else peer.path.settles_at_s

    def retire(self, peer: DecodePeer) -> None:
        """Drop a lost peer once its path is quiet; the caller has failed its rooms."""
        if peer.lost and peer.path.quiet:
            self.drop(peer)

    def drop(self, peer: DecodePeer) -> None:
        self._peers.drop(peer)
        self.commands.append(DropPeer(peer.incarnation))

    def check(self) -> None:
        for peer in self._peers:
            assert peer.path.num_ops >= 0, f"decode peer {peer.incarnation}: {peer.path.num_ops} operations"
