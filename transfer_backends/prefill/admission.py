"""Registration of decode workers. Pure."""

from itertools import combinations
from zlib import crc32

from transfer_backends.contract import KVArgs, Region
from transfer_backends.liveness import ProcessMark
from transfer_backends.peers import Link, PeerTable, Send
from transfer_backends.prefill.paths import DecodePeer, Path, Paths, PathState
from transfer_backends.shards import misfit
from transfer_backends.side_shards import side_misfit
from transfer_backends.wire import Refused, Register, Registered, clip, layout_conflict, layout_of

ADDRESS_SPACE = 1 << 64
MAX_ITEMS = 1 << 31  # page ids are int32
REFUSED_AT = 0.8  # share of the handshake timeout: the reason arrives before decode gives up


class PeerAdmission:
    """Admits a peer once the engine has reached its memory."""

    def __init__(
        self,
        peers: PeerTable[DecodePeer],
        paths: Paths,
        *,
        marks: tuple[ProcessMark, ...],
        kv_args: KVArgs,
        backend: str,
        handshake_timeout_s: float,
    ) -> None:
        self._peers = peers
        self._paths = paths
        self._marks = marks
        self._kv_args = kv_args
        self._layout = layout_of(kv_args, backend=backend)
        self._handshake_timeout_s = handshake_timeout_s

    def register(self, link: Link, message: Register, now_s: float) -> DecodePeer | None:
        """Return a peer known from an earlier link, whose transfers are lost."""
        if message.dst not in ("", self._peers.incarnation):
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
        self._peers.join(known, link)
        known.heartbeat.on_message(now_s)
        if known.registered:
            self._welcome(known)
        return known

    def refuse(self, link: Link, dst: str, reason: str, *, stale: bool = False) -> None:
        self._peers.effects.counters["refused"] += 1
        self._peers.effects.queue.append(Send(link, Refused(self._peers.incarnation, dst, clip(reason), stale)))

    def on_connected(self, incarnation: str, now_s: float) -> None:
        peer = self._connecting(incarnation)
        if peer is None:
            return
        self._paths.on_connected(peer, now_s)
        if not peer.registered:
            peer.registered = True
            self._welcome(peer)

    def on_connect_failed(self, incarnation: str, error: str, now_s: float) -> None:
        peer = self._connecting(incarnation)
        if peer is None:
            return
        self._peers.effects.counters["connect_failures"] += 1
        peer.path.error = error
        peer.path.reconnect.plan(now_s)

    def tick(self, now_s: float) -> None:
        overdue = [peer for peer in self._peers if not peer.registered and now_s >= peer.deadline_s]
        for peer in overdue:
            if peer.link is not None:
                self.refuse(peer.link, peer.incarnation, f"prefill cannot reach decode's memory: {peer.path.error}")
            self._paths.drop(peer)

    def _connecting(self, incarnation: str) -> DecodePeer | None:
        peer = self._peers.get(incarnation)
        return peer if peer is not None and peer.path.state is PathState.CONNECTING else None

    def _objection(self, link: Link, message: Register) -> str | None:
        holder = self._peers.by_link(link)
        if holder is not None and holder.incarnation != message.src:
            return "this connection belongs to another decode worker"  # joining it would leave that peer without a link
        if message.layout != self._layout:
            return layout_conflict(self._layout, message.layout, me="prefill", them="decode")
        mine, theirs = self._kv_args.aux.item_bytes, message.aux.item_bytes
        if theirs != mine:
            return f"bytes of a metadata row differ: prefill has {mine}, decode has {theirs}"
        regions = [[rank.kv, *(pool.region for pool in rank.pools)] for rank in message.ranks]
        regions[0].append(message.aux)
        if not all(_is_mapped(region) for of_rank in regions for region in of_rank):
            return "a region of memory does not fit into an address space"
        reason = misfit(self._kv_args, message.ranks) or side_misfit(self._kv_args, message.ranks)
        if reason is not None:
            return reason
        if any(_overlap(one, other) for of_rank in regions for one, other in combinations(of_rank, 2)):
            return "the regions of pages, of metadata rows and of pools overlap"
        if self._peers.get(message.src) is None and self._peers.is_full:
            return f"prefill has {len(self._peers)} decode workers, more than it may (max_peers)"
        return None

    def _admit(self, link: Link, message: Register, now_s: float) -> None:
        peer = DecodePeer(
            message.src,
            self._peers.heartbeat(now_s),
            deadline_s=now_s + REFUSED_AT * self._handshake_timeout_s,
            path=Path.to(message, self._kv_args, turn=crc32(message.src.encode())),
        )
        self._peers.add(peer)
        self._peers.join(peer, link)
        self._paths.connect(peer)

    def _welcome(self, peer: DecodePeer) -> None:
        self._peers.send(peer, Registered(*self._peers.address(peer), self._marks))


def _is_mapped(region: Region) -> bool:
    return 0 < region.num_items <= MAX_ITEMS and region.base_ptr + region.num_items * region.item_bytes <= ADDRESS_SPACE


def _overlap(one: Region, other: Region) -> bool:
    first, second = sorted((one, other), key=lambda region: region.base_ptr)
    return one.device == other.device and second.base_ptr < first.base_ptr + first.num_items * first.item_bytes
