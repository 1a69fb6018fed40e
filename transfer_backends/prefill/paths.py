"""Engine's paths into the memory of decode workers: connect, fence, drop. Pure.

  CONNECTING --connected--> OPEN --op failed--> FENCING --fenced--> OPEN
  FENCING --fence failed--> CONNECTING (after a back-off)

After a failed fence the broken connection reads our memory for at most `settle_s`; then pages are
free and the path is reused. TCP may land bytes of failed writes at decode later. Such rooms are
*landing*: no `Drained` and no new write until `settle_s` after the peer was reached, or as long as
the outage lasted, since back-off (RFC 6298, 5.5) retries within that time. `resend_s` after the
break the network holds nothing.

A lost peer is dropped once its path is *quiet*: no operation can write, here or there. All pairs of
ranks share one path, and its failures.
"""

import math
from collections import Counter, deque
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum
from functools import cached_property
from itertools import combinations
from zlib import crc32

from service.kv_layout import layout_conflict
from transfer_backends.contract import KVArgs, Pieces, Region
from transfer_backends.liveness import ProcessMark
from transfer_backends.shards import (
    LEADERS,
    Pair,
    Shard,
    SideShard,
    misfit,
    pack_descriptors,
    pairs_of,
    plan_shards,
    plan_side_shards,
    side_misfit,
)
from transfer_backends.sides import Link, Peer, PeerTable, RetryTimer, RoomKey, RunningTime, Send
from transfer_backends.wire import (
    Drained,
    Origin,
    PollRequest,
    Refused,
    Register,
    Registered,
    clip,
    layout_of,
)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
POLL_REQUEST_EVERY_S = 0.1  # decode stays awake for longer


class PathState(Enum):
    CONNECTING = "connecting"
    OPEN = "open"
    FENCING = "fencing"


@dataclass(eq=False)
class Path:
    """Path to one decode worker, with `memory` as registered there.

    - num_ops, num_pieces, num_bytes: posted and not final
    - taken_at_s: per pair of ranks with operations, when the network last took its bytes
    - whole_at_s: the earliest of these among operations failed since nothing was landing
    - read_until_s, lands_until_s: running time at which broken connections have read here, and
      landed there, their last byte
    - landing: rooms of such bytes, with the try of the pending `Drained`
    """

    memory: Register
    shards: tuple[Shard, ...]
    side_shards: tuple[SideShard, ...]
    of_ranks: bool
    state: PathState = PathState.CONNECTING
    num_ops: int = 0
    num_pieces: int = 0
    num_bytes: int = 0
    whole_at_s: float = math.inf
    ops_of_pairs: Counter[Pair] = field(default_factory=Counter)
    taken_at_s: dict[Pair, float] = field(default_factory=dict)
    reconnect: RetryTimer = field(default_factory=lambda: RetryTimer(FIRST_RETRY_S, LONGEST_RETRY_S))
    read_until_s: float = math.inf
    lands_until_s: float = math.inf
    landing: dict[RoomKey, int | None] = field(default_factory=dict)
    next_poll_request_s: float = 0.0
    error: str = "its engine has not answered"

    @classmethod
    def to(cls, memory: Register, mine: KVArgs, *, turn: int = 0) -> "Path":
        shards = plan_shards(mine, memory.ranks, turn=turn)
        beside = plan_side_shards(mine, memory.ranks, turn=turn)
        of_ranks = len(mine.ranks) > 1 or pairs_of([*shards, *beside]) != [LEADERS]
        return cls(memory, shards, beside, of_ranks=of_ranks)

    @cached_property
    def unit_bytes(self) -> int:
        return max(shard.end for shard in self.shards)

    @cached_property
    def page_bytes(self) -> int:
        return sum(shard.page_bytes for shard in self.shards)

    @property
    def descriptor(self) -> bytes:
        ranks = self.memory.ranks
        if not self.of_ranks:
            return ranks[0].descriptor
        return pack_descriptors(pairs_of([*self.shards, *self.side_shards]), ranks)

    @property
    def open(self) -> bool:
        return self.state is PathState.OPEN and self.read_until_s == math.inf

    @property
    def quiet(self) -> bool:
        return not self.num_ops and not self.landing and self.state is not PathState.FENCING

    @property
    def rests(self) -> bool:
        return self.open and self.quiet and self.lands_until_s == math.inf

    def on_posted(self, pieces: Pieces, now_s: float) -> None:
        pair = pieces.src_rank, pieces.dst_rank
        if not self.ops_of_pairs[pair]:
            self.taken_at_s[pair] = now_s
        self.ops_of_pairs[pair] += 1
        self.num_ops += 1
        self.num_pieces += len(pieces)
        self.num_bytes += pieces.size_bytes

    def on_final(self, pieces: Pieces, *, ok: bool, now_s: float) -> None:
        pair = pieces.src_rank, pieces.dst_rank
        self.ops_of_pairs[pair] -= 1
        self.num_ops -= 1
        self.num_pieces -= len(pieces)
        self.num_bytes -= pieces.size_bytes
        if ok:
            self.taken_at_s[pair] = now_s
        else:
            self.whole_at_s = min(self.whole_at_s, self.taken_at_s[pair])


@dataclass(eq=False, kw_only=True)
class DecodePeer(Peer):
    path: Path


@dataclass(frozen=True)
class ConnectPeer:
    """Connect the engine and probe the path."""

    incarnation: str
    descriptor: bytes
    origin: Origin
    of_ranks: bool = False


@dataclass(frozen=True)
class FencePeer:
    """Fence; disconnect if that fails."""

    incarnation: str


@dataclass(frozen=True)
class DropPeer:
    """Disconnect once idle."""

    incarnation: str


Command = ConnectPeer | FencePeer | DropPeer


class Paths:
    """`commands` are for the driver."""

    def __init__(self, peers: PeerTable[DecodePeer], *, settle_s: float, resend_s: float) -> None:
        self.commands: deque[Command] = deque()
        self._peers = peers
        self._settle_s = settle_s
        self._resend_s = resend_s
        self._ran = RunningTime()

    def connect(self, peer: DecodePeer) -> None:
        peer.path.state = PathState.CONNECTING
        peer.path.reconnect.at_s = None
        path = peer.path
        self.commands.append(ConnectPeer(peer.incarnation, path.descriptor, path.memory.origin, path.of_ranks))

    def on_connected(self, peer: DecodePeer, now_s: float) -> None:
        path = peer.path
        path.state = PathState.OPEN
        path.reconnect.reset()
        if path.landing:
            wait_s = max(self._settle_s, now_s - path.whole_at_s)
            path.lands_until_s = min(path.lands_until_s, self._ran.at(now_s) + wait_s)

    def on_op_final(self, peer: DecodePeer, pieces: Pieces, *, ok: bool, now_s: float) -> None:
        path = peer.path
        path.on_final(pieces, ok=ok, now_s=now_s)
        if not ok and path.state is PathState.OPEN:
            path.state = PathState.FENCING
        if path.num_ops == 0 and path.state is PathState.FENCING:
            self.commands.append(FencePeer(peer.incarnation))

    def on_fenced(self, peer: DecodePeer, dirty: list[RoomKey], *, ok: bool, now_s: float) -> bool:
        """True if no earlier operation can write; else `dirty` rooms are landing."""
        path = peer.path
        if ok:
            if path.state is PathState.FENCING:
                path.state = PathState.OPEN
            if not path.landing:
                path.whole_at_s = math.inf
            return True
        self._peers.effects.counters["fence_failures"] += 1
        path.landing |= {key: None for key in dirty if key not in path.landing}
        path.read_until_s = self._ran.at(now_s) + self._settle_s
        path.lands_until_s = path.read_until_s + self._resend_s
        if path.state is PathState.FENCING:
            path.state = PathState.CONNECTING
            path.reconnect.plan(now_s)
        return False

    def on_pending(self, incarnation: str, now_s: float) -> None:
        """Decode shall poll its engine."""
        peer = self._peers.get(incarnation)
        if peer is not None and now_s >= peer.path.next_poll_request_s:
            peer.path.next_poll_request_s = now_s + POLL_REQUEST_EVERY_S
            self._peers.effects.counters["nudges"] += 1
            self._peers.send(peer, PollRequest(*self._peers.address(peer)))

    def tick(self, now_s: float) -> tuple[list[DecodePeer], list[DecodePeer]]:
        """Reconnect where due; return peers that settled here, and that landed there."""
        self._ran.tick(now_s)
        settled, landed = [], []
        for peer in self._peers:
            path = peer.path
            if self._ran.at(now_s) >= path.read_until_s:
                path.read_until_s = math.inf
                settled.append(peer)
            if self._ran.at(now_s) >= path.lands_until_s:
                self._end_landing(peer)
                landed.append(peer)
            if path.reconnect.due(now_s) and not peer.lost:
                self.connect(peer)
        return settled, landed

    def drained(self, peer: DecodePeer, key: RoomKey, write_try: int) -> None:
        landing = peer.path.landing
        if key in landing:
            landing[key] = max(write_try, landing[key] or 0)
        else:
            self._peers.send(peer, Drained(*self._peers.address(peer), *key, write_try))

    def _end_landing(self, peer: DecodePeer) -> None:
        peer.path.lands_until_s = peer.path.whole_at_s = math.inf
        landing, peer.path.landing = peer.path.landing, {}
        for key, write_try in landing.items():
            if write_try is not None:
                self.drained(peer, key, write_try)

    def retire(self, peer: DecodePeer) -> None:
        if peer in self._peers and peer.lost and peer.path.quiet:
            self.drop(peer)

    def drop(self, peer: DecodePeer) -> None:
        self._peers.drop(peer)
        self.commands.append(DropPeer(peer.incarnation))

    def check(self) -> None:
        for peer in self._peers:
            assert peer.path.num_ops >= 0, f"decode peer {peer.incarnation}: {peer.path.num_ops} operations"


# ---- Registration of decode workers. Pure.

ADDRESS_SPACE = 1 << 64
MAX_ITEMS = 1 << 31  # page ids are int32
REFUSED_AT = 0.8  # share of the handshake timeout: the reason arrives before decode gives up


@dataclass(eq=False)
class PeerAdmission:
    """Admits a peer once the engine has reached its memory."""

    peers: PeerTable[DecodePeer]
    paths: Paths
    _: KW_ONLY
    marks: tuple[ProcessMark, ...]
    kv_args: KVArgs
    backend: InitVar[str]
    handshake_timeout_s: float

    def __post_init__(self, backend: str) -> None:
        self._layout = layout_of(self.kv_args, backend=backend)

    def register(self, link: Link, message: Register, now_s: float) -> DecodePeer | None:
        """A peer known from an earlier link, whose transfers are lost."""
        if message.dst not in ("", self.peers.incarnation):
            self.refuse(link, message.src, "the prefill worker was restarted", stale=True)
            return None
        reason = self._objection(link, message)
        if reason is not None:
            self.refuse(link, message.src, reason)
            return None
        known = self.peers.get(message.src)
        if known is None:
            self._admit(link, message, now_s)
            return None
        self.peers.join(known, link)
        known.heartbeat.on_message(now_s)
        if known.registered:
            self._welcome(known)
        return known

    def refuse(self, link: Link, dst: str, reason: str, *, stale: bool = False) -> None:
        self.peers.effects.counters["refused"] += 1
        self.peers.effects.queue.append(Send(link, Refused(self.peers.incarnation, dst, clip(reason), stale)))

    def on_connected(self, incarnation: str, now_s: float) -> None:
        peer = self._connecting(incarnation)
        if peer is None:
            return
        self.paths.on_connected(peer, now_s)
        if not peer.registered:
            peer.registered = True
            self._welcome(peer)

    def on_connect_failed(self, incarnation: str, error: str, now_s: float) -> None:
        peer = self._connecting(incarnation)
        if peer is None:
            return
        self.peers.effects.counters["connect_failures"] += 1
        peer.path.error = error
        peer.path.reconnect.plan(now_s)

    def tick(self, now_s: float) -> None:
        overdue = [peer for peer in self.peers if not peer.registered and now_s >= peer.deadline_s]
        for peer in overdue:
            if peer.link is not None:
                self.refuse(peer.link, peer.incarnation, f"prefill cannot reach decode's memory: {peer.path.error}")
            self.paths.drop(peer)

    def _connecting(self, incarnation: str) -> DecodePeer | None:
        peer = self.peers.get(incarnation)
        return peer if peer is not None and peer.path.state is PathState.CONNECTING else None

    def _objection(self, link: Link, message: Register) -> str | None:
        holder = self.peers.by_link(link)
        if holder is not None and holder.incarnation != message.src:
            return "this connection belongs to another decode worker"  # joining it would leave that peer without a link
        if message.layout != self._layout:
            return layout_conflict(self._layout, message.layout, me="prefill", them="decode")
        mine, theirs = self.kv_args.aux.item_bytes, message.aux.item_bytes
        if theirs != mine:
            return f"bytes of a metadata row differ: prefill has {mine}, decode has {theirs}"
        regions = [[rank.kv, *(pool.region for pool in rank.pools)] for rank in message.ranks]
        regions[0].append(message.aux)
        if not all(_is_mapped(region) for of_rank in regions for region in of_rank):
            return "a region of memory does not fit into an address space"
        reason = misfit(self.kv_args, message.ranks) or side_misfit(self.kv_args, message.ranks)
        if reason is not None:
            return reason
        if any(_overlap(one, other) for of_rank in regions for one, other in combinations(of_rank, 2)):
            return "the regions of pages, of metadata rows and of pools overlap"
        if self.peers.get(message.src) is None and self.peers.is_full:
            return f"prefill has {len(self.peers)} decode workers, more than it may (max_peers)"
        return None

    def _admit(self, link: Link, message: Register, now_s: float) -> None:
        peer = DecodePeer(
            message.src,
            self.peers.heartbeat(now_s),
            deadline_s=now_s + REFUSED_AT * self.handshake_timeout_s,
            path=Path.to(message, self.kv_args, turn=crc32(message.src.encode())),
        )
        self.peers.add(peer)
        self.peers.join(peer, link)
        self.paths.connect(peer)

    def _welcome(self, peer: DecodePeer) -> None:
        self.peers.send(peer, Registered(*self.peers.address(peer), self.marks))


def _is_mapped(region: Region) -> bool:
    return 0 < region.num_items <= MAX_ITEMS and region.base_ptr + region.num_items * region.item_bytes <= ADDRESS_SPACE


def _overlap(one: Region, other: Region) -> bool:
    first, second = sorted((one, other), key=lambda region: region.base_ptr)
    return one.device == other.device and second.base_ptr < first.base_ptr + first.num_items * first.item_bytes
