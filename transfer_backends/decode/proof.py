"""Proof that a lost prefill worker is dead, before pages it could write are reused. Pure.

    LOST --proof of death, settled--> dropped
      +-----alive--> CONNECTING (the same incarnation answers again)

Decode does not return to a dead incarnation until `DEAD_S` later: a firewall may have refused the
port.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from transfer_backends.contract import Route
from transfer_backends.liveness import GONE, UNMARKED, Liveness, ProcessMark, are_apart
from transfer_backends.peers import Link, Peer, PeerTable, RetryTimer, RunningTime
from transfer_backends.rooms import RoomKey
from transfer_backends.wire import Register

# ---- Connections to prefill workers. Pure.

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


# ---- proof

MAX_DEAD = 256
DEAD_S = 60.0  # longer than a worker's lease at the bootstrap server


@dataclass(frozen=True)
class Prove:
    """Command to check off-thread if any of the processes lives."""

    incarnation: str
    marks: tuple[ProcessMark, ...]
    control: str


class Proofs:
    def __init__(
        self,
        peers: PeerTable[PrefillPeer],
        connections: Connections,
        *,
        settle_s: float,
        resend_s: float,
        is_apart: bool = False,
    ) -> None:
        """`is_apart`: this worker's ranks have several addresses."""
        self._peers = peers
        self._effects = peers.effects
        self._connections = connections
        self._settle_s = settle_s
        self._resend_s = resend_s
        self._is_apart = is_apart
        self._ran = RunningTime()
        self._dead: dict[str, float] = {}  # ended incarnations, and until when to remember them

    def is_dead(self, incarnation: str, now_s: float) -> bool:
        return now_s < self._dead.get(incarnation, now_s)

    def bury(self, incarnation: str, now_s: float) -> None:
        self._dead.pop(incarnation, None)
        self._dead[incarnation] = now_s + DEAD_S
        while self._dead and (len(self._dead) > MAX_DEAD or next(iter(self._dead.values())) <= now_s):
            del self._dead[next(iter(self._dead))]

    def exhume(self, incarnation: str) -> None:
        self._dead.pop(incarnation, None)

    def on_lost(self, peer: PrefillPeer, now_s: float) -> None:
        """Drop a peer that never registered us; start a proof for others."""
        self._effects.counters["sessions_lost"] += 1
        if not peer.marks:
            self._connections.drop(peer)
            self._effects.queue.append(Prove(peer.incarnation, (UNMARKED,), peer.route.control))
            return
        self._connections.disconnect(peer)
        peer.proof.plan(now_s)

    def on_proof(self, incarnation: str, proof: Liveness, now_s: float) -> None:
        peer = self._peers.get(incarnation)
        if proof is Liveness.DEAD and (peer is None or not peer.live):  # otherwise the proof came late
            self.bury(incarnation, now_s)
        if peer is None or not peer.lost or peer.settled_at_s is not None:
            return
        if proof is Liveness.DEAD:
            # Its kernel may resend its last bytes after an outage as long as the time so far.
            # Nothing is known of paths between machines other than the leaders'.
            is_apart = self._is_apart or are_apart(peer.marks, peer.route.control)
            outage_s = self._resend_s if is_apart else min(now_s - peer.heartbeat.message_at_s, self._resend_s)
            peer.settled_at_s = self._ran.at(now_s) + max(self._settle_s, outage_s)
        elif proof is Liveness.ALIVE:
            self._connections.connect(peer, now_s)
        else:
            peer.proof.plan(now_s)

    def on_successor(self, peer: PrefillPeer, now_s: float) -> None:
        """A successor answers: the first process is dead, the others may write."""
        if len(peer.marks) > 1:
            peer.marks = (GONE, *peer.marks[1:])
            self.bury(peer.incarnation, now_s)
        else:
            self.on_proof(peer.incarnation, Liveness.DEAD, now_s)

    def tick(self, now_s: float) -> list[PrefillPeer]:
        """Request due proofs; drop and return dead peers whose bytes have settled."""
        self._ran.tick(now_s)
        dead = [peer for peer in self._peers if peer.lost and self._is_settled(peer, now_s)]
        for peer in dead:
            self._connections.drop(peer)
        return dead

    def _is_settled(self, peer: PrefillPeer, now_s: float) -> bool:
        if peer.settled_at_s is not None:
            return self._ran.at(now_s) >= peer.settled_at_s
        if peer.proof.due(now_s):
            peer.proof.at_s = None
            self._effects.queue.append(Prove(peer.incarnation, peer.marks, peer.route.control))
        return False
