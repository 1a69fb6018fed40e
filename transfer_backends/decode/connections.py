"""Connections to prefill workers. Pure."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from transfer_backends.contract import Route
from transfer_backends.kvpoll import RoomKey
from transfer_backends.liveness import ProcessMark
from transfer_backends.peers import Link, Peer, PeerTable
from transfer_backends.timers import RetryTimer
from transfer_backends.wire import Register

FIRST_PROOF_S = 0.02
LONGEST_PROOF_S = 1.0
MAX_GONE = 32
EAGER_S = 0.25  # after a poll request; the next one comes earlier if needed


@dataclass(eq=False, kw_only=True)
class PrefillPeer(Peer):
    """Prefill worker; `marks` is () until it first registered us.

    `settled_at_s`: running time at which its last bytes have landed.
    """

    route: Route
    marks: tuple[ProcessMark, ...] = ()
    unsent_aborts: list[RoomKey] = field(default_factory=list)
    proof: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_PROOF_S, LONGEST_PROOF_S))
    settled_at_s: float | None = None

    @property
    def connecting(self) -> bool:
        return not self.registered and not self.lost


@dataclass(frozen=True)
class Connect:
    link: Link
    control: str


@dataclass(frozen=True)
class Disconnect:
    link: Link


class Connections:
    """Links to prefill workers; recompute look-ups exclude the recently dropped `gone`."""

    def __init__(
        self, peers: PeerTable[PrefillPeer], *, register: Callable[[str], Register], handshake_timeout_s: float
    ) -> None:
        self.gone: deque[str] = deque(maxlen=MAX_GONE)
        self._peers = peers
        self._queue = peers.effects.queue
        self._register = register
        self._handshake_timeout_s = handshake_timeout_s
        self._next_link = 1
        self._eager_until_s = 0.0

    def obtain(self, route: Route, now_s: float) -> PrefillPeer:
        peer = self._peers.get(route.incarnation)
        if peer is None:
            peer = PrefillPeer(route.incarnation, self._peers.heartbeat(now_s), deadline_s=0.0, route=route)
            self._peers.add(peer)
            self.connect(peer, now_s)
        return peer

    def connect(self, peer: PrefillPeer, now_s: float) -> None:
        peer.deadline_s = now_s + self._handshake_timeout_s
        peer.registered = False
        self._peers.join(peer, self._next_link)
        self._queue.append(Connect(self._next_link, peer.route.control))
        self._next_link += 1
        self._peers.send(peer, self._register(peer.incarnation))

    def on_registered(self, peer: PrefillPeer, marks: tuple[ProcessMark, ...]) -> list[RoomKey]:
        """Return the rooms whose abort waited for it."""
        peer.registered = True
        peer.marks = marks
        peer.proof.reset()
        aborts, peer.unsent_aborts = peer.unsent_aborts, []
        return aborts

    def disconnect(self, peer: PrefillPeer) -> None:
        if peer.link is not None:
            self._queue.append(Disconnect(peer.link))
            self._peers.part(peer)

    def drop(self, peer: PrefillPeer) -> None:
        self.disconnect(peer)
        self._peers.drop(peer)
        self.gone.append(peer.incarnation)

    def overdue(self, now_s: float) -> list[PrefillPeer]:
        return [peer for peer in self._peers if peer.connecting and now_s >= peer.deadline_s]

    def on_poll_request(self, now_s: float) -> None:
        self._eager_until_s = now_s + EAGER_S

    def eager(self, now_s: float) -> bool:
        """A peer connects or waits for its writes: poll the engine often.

        Shared memory and RDMA need no polls, and each one interrupts a decode step.
        """
        return now_s < self._eager_until_s or any(peer.connecting for peer in self._peers)
