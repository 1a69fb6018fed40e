"""Proof that a lost prefill worker is dead, before pages it could write are reused. Pure.

    LOST --proof of death, settled--> dropped
      +-----alive--> CONNECTING (the same incarnation answers again)

Decode does not return to a dead incarnation until `DEAD_S` later: a firewall may have refused the
port.
"""

from dataclasses import KW_ONLY, dataclass

from transfer_backends.decode.lookup import Connections
from transfer_backends.decode.rooms import PrefillPeer
from transfer_backends.liveness import GONE, UNMARKED, Liveness, ProcessMark, are_apart
from transfer_backends.sides import PeerTable, RunningTime

MAX_DEAD = 256
DEAD_S = 60.0  # longer than a worker's lease at the bootstrap server


@dataclass(frozen=True)
class Prove:
    """A command to check off-thread if any of the processes lives."""

    incarnation: str
    marks: tuple[ProcessMark, ...]
    control: str


@dataclass(eq=False)
class Proofs:
    """`is_apart`: this worker's ranks have several addresses."""

    peers: PeerTable[PrefillPeer]
    connections: Connections
    _: KW_ONLY
    settle_s: float
    resend_s: float
    is_apart: bool = False

    def __post_init__(self) -> None:
        self._effects = self.peers.effects
        self._ran = RunningTime()
        self.ended: dict[str, float] = {}

    def bury(self, incarnation: str, now_s: float) -> None:
        self.ended.pop(incarnation, None)
        self.ended[incarnation] = now_s + DEAD_S
        while self.ended and (len(self.ended) > MAX_DEAD or next(iter(self.ended.values())) <= now_s):
            del self.ended[next(iter(self.ended))]

    def exhume(self, incarnation: str) -> None:
        self.ended.pop(incarnation, None)

    def on_lost(self, peer: PrefillPeer, now_s: float) -> None:
        """Drop a peer that never registered us; start a proof for others."""
        self._effects.counters["sessions_lost"] += 1
        if not peer.marks:
            self.connections.drop(peer)
            self._effects.queue.append(Prove(peer.incarnation, (UNMARKED,), peer.route.control))
            return
        self.connections.disconnect(peer)
        peer.proof.plan(now_s)

    def on_proof(self, incarnation: str, proof: Liveness, now_s: float) -> None:
        peer = self.peers.get(incarnation)
        if proof is Liveness.DEAD and (peer is None or not peer.live):  # otherwise the proof came late
            self.bury(incarnation, now_s)
        if peer is None or not peer.lost or peer.settled_at_s is not None:
            return
        if proof is Liveness.DEAD:
            # Its kernel may resend its last bytes after an outage as long as the time so far.
            # Nothing is known of paths between machines other than the leaders'.
            is_apart = self.is_apart or are_apart(peer.marks, peer.route.control)
            outage_s = self.resend_s if is_apart else min(now_s - peer.heartbeat.message_at_s, self.resend_s)
            peer.settled_at_s = self._ran.at(now_s) + max(self.settle_s, outage_s)
        elif proof is Liveness.ALIVE:
            self.connections.connect(peer, now_s)
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
        dead = [peer for peer in self.peers if peer.lost and self._is_settled(peer, now_s)]
        for peer in dead:
            self.connections.drop(peer)
        return dead

    def _is_settled(self, peer: PrefillPeer, now_s: float) -> bool:
        if peer.settled_at_s is not None:
            return self._ran.at(now_s) >= peer.settled_at_s
        if peer.proof.due(now_s):
            peer.proof.at_s = None
            self._effects.queue.append(Prove(peer.incarnation, peer.marks, peer.route.control))
        return False
