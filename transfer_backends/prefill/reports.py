"""Reports to decode about its rooms. Pure."""

from transfer_backends.kvpoll import KVPoll, RoomKey
from transfer_backends.peers import PeerTable
from transfer_backends.prefill.paths import DecodePeer, Paths
from transfer_backends.prefill.room import PrefillRoom
from transfer_backends.wire import Status, clip


class Reports:
    def __init__(self, peers: PeerTable[DecodePeer], paths: Paths, *, page_bytes: int) -> None:
        self._peers = peers
        self._paths = paths
        self._page_bytes = page_bytes

    def status(self, room: PrefillRoom, state: KVPoll) -> None:
        peer = self._peer_of(room)
        if peer is not None:
            reason = f"prefill: {room.reason}" if room.reason else ""
            self._send_status(peer, room.key, state, room.done_bytes // self._page_bytes, reason, room.write_try)

    def progress(self, room: PrefillRoom, now_s: float) -> None:
        room.reported_at_s = now_s
        self.status(room, KVPoll.Transferring)

    def drained(self, room: PrefillRoom) -> None:
        """Report once nothing can write to the room's pages, if decode waits for that."""
        peer = self._peer_of(room)
        if room.owes_drained and room.quiet and peer is not None:
            room.owes_drained = False
            self.acknowledge(peer, room.key, room.write_try)

    def acknowledge(self, peer: DecodePeer, key: RoomKey, write_try: int) -> None:
        self._paths.drained(peer, key, write_try)

    def reject(self, peer: DecodePeer, key: RoomKey, reason: str) -> None:
        self._send_status(peer, key, KVPoll.Failed, 0, reason, 0)
        self.acknowledge(peer, key, 0)

    def _peer_of(self, room: PrefillRoom) -> DecodePeer | None:
        return self._peers.get(room.offer.incarnation) if room.offer else None

    def _send_status(
        self, peer: DecodePeer, key: RoomKey, state: KVPoll, num_pages: int, reason: str, write_try: int
    ) -> None:
        status = Status(*self._peers.address(peer), *key, int(state), num_pages, clip(reason), write_try)
        self._peers.send(peer, status)
