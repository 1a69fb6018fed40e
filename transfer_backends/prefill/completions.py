"""End of engine operations. Pure.

After a failed write prefill writes everything again (`transfer_retries`), once nothing of the last
try can land (paths.py). Results of earlier tries are dropped (docs/design/handover.md).
"""

from transfer_backends.kvpoll import KVPoll
from transfer_backends.peers import PeerTable
from transfer_backends.prefill.outbox import Outbox
from transfer_backends.prefill.paths import DecodePeer, Paths
from transfer_backends.prefill.posts import Post
from transfer_backends.prefill.room import PrefillRoom
from transfer_backends.prefill.rooms import PrefillRooms

PROGRESS_EVERY_S = 0.25  # each report wakes threads of both sides during a step


class Completions:
    def __init__(
        self,
        rooms: PrefillRooms,
        outbox: Outbox,
        paths: Paths,
        peers: PeerTable[DecodePeer],
        *,
        transfer_retries: int,
    ) -> None:
        self._rooms = rooms
        self._outbox = outbox
        self._paths = paths
        self._peers = peers
        self._counters = peers.effects.counters
        self._transfer_retries = transfer_retries

    def on_op_final(self, post: Post, *, ok: bool, error: str, now_s: float) -> None:
        """If not `ok`, bytes may still land until a fence."""
        room = self._rooms[post.key]
        peer = room.peer
        assert peer is not None and peer in self._peers, "a room and its peer outlive their operations"
        self._outbox.on_op_final(room, post)
        room.dirty |= not ok
        if room.final:  # its pages may be free now
            self._rooms.touch()
        self._paths.on_op_final(peer, post.pieces, ok=ok, now_s=now_s)
        if ok:
            self._on_written(room, post, now_s)
        else:
            self._counters["failed_posts"] += 1
            if not room.final and not room.awaits_fence:
                self._try_again(room, peer, error, now_s)
        self._rooms.report_drained(room)
        self._paths.retire(peer)

    def on_fenced(self, incarnation: str, *, ok: bool, now_s: float) -> None:
        peer = self._peers.get(incarnation)
        if peer is None:
            return
        dirty = [room.key for room in self._rooms.of(peer) if room.dirty]
        if self._paths.on_fenced(peer, dirty, ok=ok, now_s=now_s):
            self.settle(peer)

    def settle(self, peer: DecodePeer) -> None:
        """Release our pages: no failed operation reads them."""
        for room in self._rooms.of(peer):
            if room.num_ops == 0:
                room.dirty = False
                self._rooms.touch()
                self._rooms.report_drained(room)
        self.start_over(peer)

    def start_over(self, peer: DecodePeer) -> None:
        """Start the next try of rooms without bytes under way."""
        for room in self._rooms.of(peer):
            if room.awaits_fence and room.quiet and room.key not in peer.path.landing:
                room.start_over()
                self._outbox.add(room)
        self._paths.retire(peer)

    def _on_written(self, room: PrefillRoom, post: Post, now_s: float) -> None:
        self._counters["bytes"] += post.pieces.size_bytes
        if post.write_try != room.write_try:
            self._counters["late_completions"] += 1
            return
        room.done_bytes += post.kv_bytes
        room.progress_at_s = now_s
        if room.state is not KVPoll.Transferring:
            return
        if room.written:
            self._rooms.succeed(room)
        elif now_s - room.reported_at_s >= PROGRESS_EVERY_S:
            self._rooms.report_progress(room, now_s)

    def _try_again(self, room: PrefillRoom, peer: DecodePeer, error: str, now_s: float) -> None:
        if room.write_try >= self._transfer_retries or not peer.answers:
            times = f" ({room.write_try + 1} times)" if room.write_try else ""
            self._rooms.fail(room, f"writing to the decode worker failed{times}: {error}")
            return
        room.begin_next_try()
        room.progress_at_s = now_s
        self._counters["retried"] += 1
        self._rooms.report_progress(room, now_s)
