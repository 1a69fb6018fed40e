"""The decode workers that a prefill worker knows: registration, links, heartbeats, fencing and reconnection. Pure.

A peer is one life of a decode process (its incarnation); its link is the connection its messages come by now. Rooms are
not known here: `prefill/rooms` is told by return values which peers were lost.

    CONNECTING --connected--> LIVE --op failed--> FENCING --fenced--> LIVE
                                                     +--fence failed--> CONNECTING (after a back-off)

A peer whose link closed is `lost`; it is dropped once none of its operations can still write, or comes back by a new link.
"""

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import Enum

from transfer_backends.contract import Region, TransferConfig
from transfer_backends.heartbeat import Heartbeat
from transfer_backends.liveness import ProcessMark
from transfer_backends.running_time import RunningTime
from transfer_backends.wire import (
    Layout,
    Message,
    Nudge,
    Ping,
    Refused,
    Register,
    Registered,
    WireRegion,
    clip,
    layout_conflict,
)

Link = Hashable
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
NUDGE_EVERY_S = 0.1  # decode stays awake for longer than that
ADDRESS_SPACE = 1 << 64
MAX_ITEMS = 1 << 31  # page ids are int32


class Phase(Enum):
    CONNECTING = "connecting"
    LIVE = "live"
    FENCING = "fencing"


@dataclass
class Peer:
    """`num_ops`: posted and not final. `generation` counts engine connections. `retry_at_s`: when to connect again."""

    incarnation: str
    link: Link
    kv: Region
    aux: Region
    descriptor: bytes
    pulse: Heartbeat
    deadline_s: float
    phase: Phase = Phase.CONNECTING
    registered: bool = False
    num_ops: int = 0
    generation: int = 0
    retry_at_s: float | None = None
    retry_s: float = FIRST_RETRY_S
    settle_at_s: float | None = None  # in running time
    lost: bool = False
    next_nudge_s: float = 0.0


@dataclass(frozen=True)
class ConnectPeer:
    """Connect the engine and prove the path with a probe; answer `on_connected` or `on_connect_failed`."""

    incarnation: str
    descriptor: bytes


@dataclass(frozen=True)
class FencePeer:
    """Run the engine's fence; answer `on_fenced`. When it fails, disconnect."""

    incarnation: str


@dataclass(frozen=True)
class DropPeer:
    incarnation: str


Command = ConnectPeer | FencePeer | DropPeer


@dataclass
class Effects:
    """What the shell owes: messages to send (in order), commands for the engine (in order), counters to show."""

    outbox: deque[tuple[Link, Message]] = field(default_factory=deque)
    commands: deque[Command] = field(default_factory=deque)
    counters: Counter[str] = field(default_factory=Counter)


class PeerTable:
    def __init__(
        self, *, incarnation: str, mark: ProcessMark, layout: Layout, items: tuple[int, int], config: TransferConfig
    ) -> None:
        """`items`: bytes of a kv item and of an aux item here."""
        self.incarnation = incarnation
        self.effects = Effects()
        self._mark = mark
        self._layout = layout
        self._items = items
        self._config = config
        self._peers: dict[str, Peer] = {}
        self._by_link: dict[Link, Peer] = {}
        self._ran = RunningTime()

    def get(self, incarnation: str) -> Peer | None:
        return self._peers.get(incarnation)

    def by_link(self, link: Link) -> Peer | None:
        return self._by_link.get(link)

    def links(self) -> list[Link]:
        return list(self._by_link)

    def __len__(self) -> int:
        return len(self._peers)

    def say(self, peer: Peer, message: Message) -> None:
        if self._by_link.get(peer.link) is peer:
            self.effects.outbox.append((peer.link, message))

    def refuse(self, link: Link, dst: str, reason: str, *, stale: bool = False) -> None:
        self.effects.counters["refused"] += 1
        self.effects.outbox.append((link, Refused(self.incarnation, dst, clip(reason), stale)))

    def register(self, link: Link, message: Register, now_s: float) -> Peer | None:
        """Returns the peer when it was known by an earlier link: what ran over that link is lost."""
        if message.dst not in ("", self.incarnation):
            self.refuse(link, message.src, "the prefill worker was restarted", stale=True)
            return None
        reason = self._objection(link, message)
        if reason is not None:
            self.refuse(link, message.src, reason)
            return None
        known = self._peers.get(message.src)
        if known is None:
            self._admit(link, message, now_s)
            return None
        self._relink(known, link)
        if known.registered:
            self._welcome(known)
        return known

    def _objection(self, link: Link, message: Register) -> str | None:
        holder = self._by_link.get(link)
        if holder is not None and holder.incarnation != message.src:
            return (
                "this connection belongs to another decode worker"  # which would be forgotten by it, and never dropped
            )
        if message.layout.version != self._layout.version or message.layout != self._layout:
            return layout_conflict(self._layout, message.layout, me="prefill", them="decode")
        theirs = (message.kv.item_bytes, message.aux.item_bytes)
        if theirs != self._items:
            return f"bytes of a page and of a metadata row differ: prefill has {self._items}, decode has {theirs}"
        if not all(_is_mapped(region) for region in (message.kv, message.aux)):
            return "a region of memory does not fit into an address space"
        if _overlap(message.kv, message.aux):
            return "the regions of pages and of metadata rows overlap"
        if message.src not in self._peers and len(self._peers) >= self._config.max_peers:
            return f"prefill has {len(self._peers)} decode workers, more than it may (max_peers)"
        return None

    def _admit(self, link: Link, message: Register, now_s: float) -> None:
        pulse = Heartbeat(
            interval_s=self._config.heartbeat_interval_s,
            max_failures=self._config.heartbeat_max_failures,
            now_s=now_s,
        )
        peer = Peer(
            incarnation=message.src,
            link=link,
            kv=_region(message.kv),
            aux=_region(message.aux),
            descriptor=message.descriptor,
            pulse=pulse,
            deadline_s=now_s + self._config.handshake_timeout_s,
        )
        self._peers[message.src] = peer
        self._by_link[link] = peer
        self._connect(peer)

    def _relink(self, peer: Peer, link: Link) -> None:
        if self._by_link.get(peer.link) is peer:
            del self._by_link[peer.link]
        peer.link = link
        self._by_link[link] = peer
        peer.pulse.heard()
        peer.lost = False

    def _connect(self, peer: Peer) -> None:
        peer.phase = Phase.CONNECTING
        peer.retry_at_s = None
        peer.generation += 1
        self.effects.commands.append(ConnectPeer(peer.incarnation, peer.descriptor))

    def _welcome(self, peer: Peer) -> None:
        self.say(peer, Registered(self.incarnation, peer.incarnation, self._mark))

    # ---- told by the engine driver

    def on_connected(self, incarnation: str) -> None:
        peer = self._peers.get(incarnation)
        if peer is None or peer.phase is not Phase.CONNECTING:
            return
        peer.phase = Phase.LIVE
        peer.retry_s = FIRST_RETRY_S
        if not peer.registered:
            peer.registered = True
            self._welcome(peer)

    def on_connect_failed(self, incarnation: str, error: str, now_s: float) -> None:
        peer = self._peers.get(incarnation)
        if peer is None or peer.phase is not Phase.CONNECTING:
            return
        self.effects.counters["connect_failures"] += 1
        if not peer.registered and now_s >= peer.deadline_s:
            self.refuse(peer.link, incarnation, f"prefill cannot reach decode's memory: {error}")
            self._drop(peer)
            return
        peer.retry_at_s = now_s + peer.retry_s
        peer.retry_s = min(2 * peer.retry_s, LONGEST_RETRY_S)

    def on_op_posted(self, peer: Peer) -> None:
        peer.num_ops += 1

    def on_op_final(self, peer: Peer, *, ok: bool) -> None:
        peer.num_ops -= 1
        if not ok and peer.phase is Phase.LIVE:
            peer.phase = Phase.FENCING
        if peer.num_ops == 0 and peer.phase is Phase.FENCING:
            self.effects.commands.append(FencePeer(peer.incarnation))

    def on_fenced(self, incarnation: str, *, ok: bool, settle_s: float, now_s: float) -> bool:
        """True: nothing of the peer's earlier operations can write any more (else: wait for `settled`)."""
        peer = self._peers.get(incarnation)
        if peer is None:
            return False
        if ok:
            if peer.phase is Phase.FENCING:
                peer.phase = Phase.LIVE
            return True
        self.effects.counters["fence_failures"] += 1
        peer.settle_at_s = self._ran.at(now_s) + settle_s
        if peer.phase is Phase.FENCING:
            peer.phase = Phase.CONNECTING
            peer.retry_at_s = now_s + peer.retry_s
            peer.retry_s = min(2 * peer.retry_s, LONGEST_RETRY_S)
        return False

    def on_pending(self, incarnation: str, now_s: float) -> None:
        """An operation to it has been asked for its end, and has none yet."""
        peer = self._peers.get(incarnation)
        if peer is not None and now_s >= peer.next_nudge_s:
            peer.next_nudge_s = now_s + NUDGE_EVERY_S
            self.effects.counters["nudges"] += 1
            self.say(peer, Nudge(self.incarnation, incarnation))

    # ---- told by the control plane and the clock

    def lose(self, link: Link) -> Peer | None:
        """The link closed, or the peer said goodbye. Returns the peer it belonged to."""
        peer = self._by_link.pop(link, None)
        if peer is not None:
            self.effects.counters["peers_lost"] += 1
            peer.lost = True
        return peer

    def retire(self, peer: Peer) -> None:
        """Forget a lost peer once nothing of it is pending; the caller has failed its rooms."""
        if not peer.lost or peer.num_ops or peer.settle_at_s is not None or peer.phase is Phase.FENCING:
            return
        self._drop(peer)

    def _drop(self, peer: Peer) -> None:
        if self._by_link.get(peer.link) is peer:
            del self._by_link[peer.link]
        del self._peers[peer.incarnation]
        self.effects.commands.append(DropPeer(peer.incarnation))

    def tick(self, now_s: float) -> tuple[list[Peer], list[Peer]]:
        """(peers that just became silent, peers whose earlier operations have settled)."""
        self._ran.tick(now_s)
        silent, settled = [], []
        for peer in list(self._peers.values()):
            if peer.settle_at_s is not None and self._ran.at(now_s) >= peer.settle_at_s:
                peer.settle_at_s = None
                settled.append(peer)
            if peer.retry_at_s is not None and now_s >= peer.retry_at_s and not peer.lost:
                self._connect(peer)
            if peer.registered and not peer.lost and self._beat(peer, now_s):
                silent.append(peer)
        return silent, settled

    def _beat(self, peer: Peer, now_s: float) -> bool:
        if not peer.pulse.due(now_s):
            return False
        self.say(peer, Ping(self.incarnation, peer.incarnation, peer.pulse.seq))
        return peer.pulse.silent

    def check(self) -> list[str]:
        problems = [
            f"decode peer {p.incarnation}: {p.num_ops} operations" for p in self._peers.values() if p.num_ops < 0
        ]
        for peer in self._peers.values():
            if not peer.lost and self._by_link.get(peer.link) is not peer:
                problems.append(f"decode peer {peer.incarnation}: its link is another's")
        for link, peer in self._by_link.items():
            if peer.link != link or self._peers.get(peer.incarnation) is not peer:
                problems.append(f"decode peer {peer.incarnation}: link table and peer table differ")
        return problems


def _is_mapped(region: WireRegion) -> bool:
    """Whether no address of it wraps around: what is inside the region is then inside the memory that decode meant."""
    return 0 < region.num_items <= MAX_ITEMS and region.base_ptr + region.num_items * region.item_bytes <= ADDRESS_SPACE


def _overlap(one: WireRegion, other: WireRegion) -> bool:
    first, second = sorted((one, other), key=lambda region: region.base_ptr)
    return one.device == other.device and second.base_ptr < first.base_ptr + first.num_items * first.item_bytes


def _region(wire: WireRegion) -> Region:
    return Region(wire.base_ptr, wire.num_items, wire.item_bytes, wire.device)
